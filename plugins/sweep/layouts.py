"""Every layout of a number of ranks, and which of them are the same.

It is: the space of a sweep, enumerated from the `Layout` dataclass, and one normal form for layouts that do the same
work. It is not: what a model allows (`filter.py`) or how fast a layout is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from omegaconf import OmegaConf

from parallax.conf.schema import SIZES, SweepConf
from parallax.strategies.layout import Layout
from parallax.strategies.layout_nearest import valid_sizes
from parallax.strategies.layout_words import OPTIONAL, SHORT, TEXT_FIELDS, read_mapping


def layouts(world: int, sizes: Sequence[str], vary: Mapping[str, Sequence[Any]] | None = None) -> Iterator[Layout]:
    """Every valid, different layout of `world` ranks, resolved.

    Args:
        world: number of ranks.
        sizes: axes that may be longer than 1.
        vary: other keys of a layout, each with the values to try.

    Raises:
        ValueError: an unknown key, or a name that no plugin has.
    """
    seen = set()
    vary = vary or {}
    varied = [_given(dict(zip(vary, values, strict=True))) for values in product(*vary.values())]
    for values in varied:
        for ranks in valid_sizes(world, folded="ep" in sizes, etp=values.get("expert_tensor_parallel_size")):
            if any(size > 1 for axis, size in ranks.items() if axis not in sizes):
                continue
            given: dict[str, Any] = {**{SHORT[axis]: size for axis, size in ranks.items()}, **values}
            try:
                layout = normal(Layout(**given), world)
            except ValueError:
                continue  # these values do not go with these sizes
            if layout not in seen:
                seen.add(layout)
                yield layout


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by their long names, names of schedules and engines checked."""
    Layout.from_any({key: value for key, value in values.items() if SHORT.get(key, key) in TEXT_FIELDS})
    return read_mapping(values)


def normal(layout: Layout, world: int) -> Layout:
    """`layout` on `world` ranks, with one spelling for all layouts that do the same.

    Open sizes are filled in. ZeRO over one rank shards nothing and is stage 0; without a pipeline and with one
    micro-batch all schedules are one.

    Raises:
        ValueError: it does not fit `world`.
    """
    layout = layout.resolve(world)
    alone = (layout.data_parallel_size or 1) * layout.context_parallel_size == 1
    if alone and layout.zero_stage and layout.data_engine == "auto":
        layout = replace(layout, zero_stage=0)
    if layout.pipeline_parallel_size == 1 and layout.num_microbatches == 1 and layout.stages_per_rank is None:
        layout = replace(layout, schedule=type(layout).schedule)
    return replace(layout, data_engine=layout.resolved_data_engine)


def in_words(layout: Layout) -> str:
    """The shortest words for a normal `layout`: what follows from the rest is left out."""
    auto = replace(layout, data_engine=type(layout).data_engine)
    if auto.resolved_data_engine == layout.data_engine:
        layout = auto
    for name in OPTIONAL:
        with suppress(ValueError):  # it does not follow: ep may fold over tp as far as etp says
            shorter = Layout(**{**layout.to_dict(), name: None})  # type: ignore[arg-type]
            if name != "data_parallel_size" and shorter.resolve(layout.world_size) == layout:
                layout = shorter
    return str(layout)


def as_choice(sweep: Any) -> str:
    """The layouts of a `sweep` node, as Hydra's choice of options of group `layout`.

    Raises:
        ValueError: a bad node, or no layout at all.
    """
    given: Any = OmegaConf.to_container(sweep, resolve=True) if OmegaConf.is_config(sweep) else sweep
    conf = SweepConf(**given)
    found = [in_words(layout) for layout in layouts(conf.ranks, conf.sizes, conf.vary)]
    if not found:
        raise ValueError(
            f"sweep: {conf.ranks} ranks cannot be divided over {', '.join(conf.sizes)} with vary={conf.vary}; add an "
            f"axis to sweep.sizes (of {', '.join(SIZES)}) or values to sweep.vary"
        )
    return ",".join(f"'{words}'" if re.search(r"[^\w ]", words) else words for words in found)
