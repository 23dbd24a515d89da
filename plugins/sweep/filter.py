"""Which points of a sweep are worth starting: the impossible and the repeated ones are dropped, with the reason.

It is: the checks that a run makes before it trains, made beforehand, without processes, on a model without memory; and
a fingerprint that is the same for points that would do the same. It is not: a prediction of what fits into memory or is
fast.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from parallax.conf.models import build_model
from parallax.conf.reading import explain, read, without_hydra
from parallax.conf.schema import ModelConf, RunConf
from parallax.plugins import registry
from parallax.plugins.pipeline.catalog import find_schedule
from parallax.plugins.sweep.layouts import in_words, normal
from parallax.strategies.assemble import make_plugins
from parallax.strategies.layout import Layout

NOT_THE_WORK = ("output_dir", "sweep")
"""Parts of a configuration that do not change what a job does."""


@dataclass
class Point:
    """One job that a sweep could run.

    Attributes:
        overrides: of Hydra's command line.
        config: composed from them.
        varied: those of the overrides that are not the same in the whole sweep.
        layout: in its normal form; None when the point is impossible.
        ranks: processes.
        digest: the same for points that do the same work.
        dropped: why it is not run; "" when it is.
    """

    overrides: tuple[str, ...]
    config: DictConfig
    varied: tuple[str, ...] = ()
    layout: Layout | None = None
    ranks: int = 0
    digest: str = ""
    dropped: str = ""

    @property
    def words(self) -> str:
        """The layout, for people."""
        return in_words(self.layout) if self.layout is not None else "impossible"


@dataclass
class Filter:
    """Judges points; the models it builds for that are kept."""

    _models: dict[str, nn.Module] = field(default_factory=dict)

    def sift(self, points: Sequence[Point]) -> list[Point]:
        """Fill in what `points` are; those without a reason to be `dropped` are returned: of points that do
        the same the first.

        A configuration with the schema of `parallax.conf` is checked as a whole; of any other its `layout`, and its
        `cluster.ranks` if there is one.
        """
        seen: dict[str, Point] = {}
        for point in points:
            self.judge(point)
            if point.dropped:
                continue
            first = seen.setdefault(point.digest, point)
            if first is not point:
                point.dropped = f"does the same as {' '.join(first.varied or first.overrides)}"
        return [point for point in points if not point.dropped]

    def judge(self, point: Point) -> None:
        """Fill in what one point is, or why it is impossible."""
        try:
            self._judge(point)
        except OmegaConfBaseException as error:
            point.dropped = str(explain(error))
        except ValueError as error:
            point.dropped = str(error)

    def _judge(self, point: Point) -> None:
        conf = read(point.config) if OmegaConf.get_type(point.config) is RunConf else None
        asked = conf.layout if conf is not None else _layout(point.config)
        ranks = conf.cluster.ranks if conf is not None else OmegaConf.select(point.config, "cluster.ranks")
        world = ranks or asked.ranks_needed
        layout = asked.resolve(world)
        check_layout(layout)
        if conf is not None:
            check_batch(conf, layout)
            self._check_model(conf.model, layout)
        point.layout, point.ranks = normal(layout, world), world
        point.digest = digest(point.config, point.layout)

    def _check_model(self, model: ModelConf, layout: Layout) -> None:
        """What each axis's plugin says of the model; one model is built for all layouts, without memory."""
        key = repr(model)
        if key not in self._models:
            root = nn.Module()
            with torch.device("meta"):
                root.model = build_model(model)
            self._models[key] = root
        for plugin in make_plugins(layout, {}):
            plugin.check(layout, self._models[key])


def check_layout(layout: Layout) -> None:
    """What the strategy checks before there is a model.

    Raises:
        ValueError: an axis no plugin serves, an engine or a schedule that cannot run this.
    """
    make_plugins(layout, {})
    registry.load("parallax.data_engines", layout.resolved_data_engine).check(layout)
    find_schedule(layout.schedule)


def check_batch(conf: RunConf, layout: Layout) -> None:
    """That the batch can be divided over data ranks and micro-batches.

    Raises:
        ValueError: it cannot, with the nearest batch sizes that can.
    """
    parts = (layout.data_parallel_size or 1) * (layout.num_microbatches or 1)
    size = conf.data.global_batch_size
    if size % parts:
        near = [n for n in (size // parts * parts, -(-size // parts) * parts) if n]
        raise ValueError(
            f"data.global_batch_size={size} does not divide over dp{layout.data_parallel_size} x "
            f"mb{layout.num_microbatches} = {parts}; use {' or '.join(map(str, near))}"
        )


def digest(config: DictConfig, layout: Layout) -> str:
    """Stands for what a job with this configuration and normal layout does."""
    work = OmegaConf.to_container(without_hydra(config), resolve=True)
    assert isinstance(work, dict)
    text = json.dumps(
        {**{key: value for key, value in work.items() if key not in NOT_THE_WORK}, "layout": layout.to_dict()},
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def reasons(points: Sequence[Point]) -> Mapping[str, list[Point]]:
    """Reason -> the points dropped for it, the most frequent first."""
    found: dict[str, list[Point]] = {}
    for point in points:
        if point.dropped:
            found.setdefault(point.dropped, []).append(point)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _layout(config: DictConfig) -> Layout:
    node: Any = OmegaConf.select(config, "layout")
    if node is None:
        raise ValueError("this configuration has no `layout`, which hydra/launcher=parallax needs")
    return Layout.from_any(node)
