"""The two runs that are compared, as functions each process calls: the layout's ranks, and one process.

It is: Lightning Trainers with the same settings and an `Observer` on both. It is not: the starting of processes
(`pool.py`) or the comparison. The one-process run is plain Lightning on batches put together from those the data
ranks read; of Parallax it takes the initial weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from parallax.plugins.base import ParamShard
from parallax.strategies.batch import shifts_labels, valid_tokens
from parallax.strategies.deferred import Recording, deferred_init
from parallax.strategies.materialize import materialize
from parallax.strategies.strategy import ParallaxStrategy
from parallax.strategies.verify.exact import KeepDouble
from parallax.strategies.verify.expect import Asked, Expectation, Theory
from parallax.strategies.verify.observe import Observation, Observer, parallel_lens, plain_lens
from parallax.strategies.verify.shrink import shrunk_configs
from parallax.strategies.verify.target import Target, loader_of, synthetic_loader

PRECISION = {"fp64": "64-true", "fp32": "32-true", "bf16": "bf16-true"}


@dataclass(frozen=True)
class Settings:
    """How both runs train.

    Attributes:
        target: what to train.
        steps: optimizer steps.
        dtype: "fp64", "fp32" or "bf16".
        clip: gradient_clip_val; below the norm of most models, so that a wrong norm changes weights.
        seed: of everything.
        shrink: build the architecture small.
        options: further arguments of ParallaxStrategy.
        prepare: called on each rank of the layout first; a test plants its faults here.
    """

    target: Target
    steps: int = 3
    dtype: str = "fp64"
    clip: float = 0.1
    seed: int = 0
    shrink: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None


@dataclass
class RankResult:
    """What one rank brings back.

    Attributes:
        seen: its view of the run.
        shards: how its tensors sit in the whole ones.
        coordinates: axis -> index.
        tokens: valid target tokens of the batch of each step (1 without labels).
        groups: name of a group of the mesh -> its ranks.
        averaged_over: parameter -> the group its gradient is averaged over.
    """

    seen: Observation
    shards: dict[str, ParamShard | None]
    coordinates: dict[str, int]
    tokens: list[float]
    groups: dict[str, tuple[int, ...]]
    averaged_over: dict[str, str]


class Given(ClusterEnvironment):
    """Ranks numbered by whoever started the processes; the process group exists already."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


def run_layout(rank: int, world: int, settings: Settings, layout: str) -> RankResult:
    """Train on this rank at `layout`. Collective over `world` ranks."""
    if settings.prepare is not None:
        settings.prepare()
    strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world), **settings.options)
    observer = Observer(parallel_lens())
    with _prepared(settings):
        module, data = settings.target.build()
        trainer = _trainer(settings, observer, strategy=strategy, devices=world)
        if settings.target.synthetic is not None:
            copies = strategy.requested_layout.resolve(world).data_parallel_size or 1
            data = synthetic_loader(
                sketch(settings.target, shrink=settings.shrink), settings.target.synthetic, copies, settings.steps
            )
        trainer.fit(module, **loader_of(module, data))
    names = [n for n, _ in module.named_parameters()]
    mesh = strategy.mesh
    result = RankResult(
        observer.seen,
        {n: strategy.shard_of(n) for n in names},
        {axis: mesh.index(axis) for axis in ("pp", "dp", "cp", "tp", "data")},
        [_tokens(module, batch) for batch in observer.seen.batches],
        {name: comm.ranks for name, comm in mesh.comms.items()},
        {n: strategy.averaged_over(n) for n in names},
    )
    strategy.close()
    return result


def _tokens(module: LightningModule, batch: Any) -> float:
    count = valid_tokens(batch, shifted=shifts_labels(module))
    return 1.0 if count is None else float(count)


def run_one(
    rank: int, world: int, settings: Settings, batches: list[Any], asked: Asked | None = None
) -> tuple[Observation, list[list[Theory]]]:
    """Train in this process alone, with plain Lightning, on whole `batches`, one per step; and what was `asked`."""
    observer, more = Observer(plain_lens()), list[Expectation]()
    if asked is not None:
        plugins = ParallaxStrategy(str(asked.layout), **settings.options).new_plugins(asked.layout)
        more = [Expectation(asked, plugins)]
    with _prepared(settings):
        module, _ = settings.target.build()
        trainer = _trainer(settings, observer, *more, strategy=_OneProcess(settings.seed), devices=1)
        loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        trainer.fit(module, train_dataloaders=loader)
    return observer.seen, more[0].theories if more else []


def sketch(target: Target, *, shrink: bool) -> LightningModule:
    """The module on the meta device, to read its config and plans."""
    with shrunk_configs(shrink):
        module, _ = target.build()
        with deferred_init():
            module.configure_model()
    return module


@contextmanager
def _prepared(settings: Settings) -> Iterator[None]:
    seed_everything(settings.seed, verbose=False)
    with shrunk_configs(settings.shrink):
        if settings.dtype == "fp64":
            with KeepDouble():
                yield
        else:
            yield


def _trainer(settings: Settings, *observers: Callback, **options: Any) -> Trainer:
    callbacks: list[Any] = [_NoDropout(), *observers]
    return Trainer(
        accelerator="cpu",
        precision=PRECISION[settings.dtype],  # type: ignore[arg-type]
        max_steps=settings.steps,
        gradient_clip_val=settings.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=callbacks,
        **options,
    )


class _OneProcess(SingleDeviceStrategy):
    """Lightning's own strategy; `configure_model` gets the initial weights every layout starts from."""

    def __init__(self, seed: int) -> None:
        super().__init__(device="cpu")
        self._seed = seed
        self._recording: Recording | None = None

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        with deferred_init() as recording:
            yield
        self._recording = recording

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None and self._recording is not None
        self._recording.capture(module)
        materialize(module, self._recording, shard_of=lambda fqn: None, seed=self._seed, device="cpu")
        self.precision_plugin.convert_module(module)
        super().setup(trainer)


class _NoDropout(Callback):
    """Switches dropout off: it draws other random numbers at every layout."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in pl_module.modules():
            for name, value in vars(module).items():
                if isinstance(value, float) and (
                    "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
                ):
                    setattr(module, name, 0.0)


def batches_read(ranks: list[RankResult]) -> list[list[Any]]:
    """Step -> data rank -> the batch it read."""
    readers = {r.coordinates["dp"]: r for r in reversed(ranks)}
    steps = len(ranks[0].seen.batches)
    return [[readers[i].seen.batches[step] for i in sorted(readers)] for step in range(steps)]


def whole_batches(ranks: list[RankResult]) -> list[Any]:
    """The global batch of each step: those the data ranks read, in the order of their ranks."""
    return [_joined(batches) for batches in batches_read(ranks)]


def _joined(batches: list[Any]) -> Any:
    """Batches of data ranks as one, joined along dim 0."""
    flat = [tree_flatten(batch) for batch in batches]
    leaves = [
        torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].dim() else parts[0]
        for parts in zip(*(f[0] for f in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])
