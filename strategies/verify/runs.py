"""The two runs that are compared, as functions each process calls: the layout's ranks, and one process.

It is: Lightning Trainers with the same settings and an `Observer` on both. It is not: the starting of processes
(`pool.py`) or the comparison. The one-process run is plain Lightning on batches put together from those the data
ranks read; of Parallax it takes the initial weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from parallax.plugins.base import ParallelPlugin, ParamShard
from parallax.strategies.batch import shifts_labels, valid_tokens
from parallax.strategies.deferred import Recording, deferred_init
from parallax.strategies.layout import Layout
from parallax.strategies.materialize import materialize
from parallax.strategies.strategy import ParallaxStrategy
from parallax.strategies.tree import flatten, unflatten
from parallax.strategies.verify.exact import KeepDouble
from parallax.strategies.verify.expect import Asked, Expectation, Theory
from parallax.strategies.verify.given import Given
from parallax.strategies.verify.observe import Named, Observation, Observer, parallel_lens, plain_lens
from parallax.strategies.verify.shrink import shrunk_configs
from parallax.strategies.verify.target import Target, loader_of, synthetic_loader
from parallax.strategies.verify.whole import assemble_whole

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
        dropout: leave it on.
    """

    target: Target
    steps: int = 3
    dtype: str = "fp64"
    clip: float = 0.1
    seed: int = 0
    shrink: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None
    dropout: bool = False


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
        epoch: samples of the dataset, and which of them this rank reads in an epoch; None where the loader is the
            user's to divide.
    """

    seen: Observation
    shards: dict[str, ParamShard | None]
    coordinates: dict[str, int]
    tokens: list[float]
    groups: dict[str, tuple[int, ...]]
    averaged_over: dict[str, str]
    epoch: tuple[int, list[int]] | None = None


def run_layout(rank: int, world: int, settings: Settings, layout: str) -> RankResult:
    """Train on this rank at `layout`. Collective over `world` ranks."""
    observer = Observer(parallel_lens())
    module, strategy = train_at(rank, world, settings, layout, observer)
    names = [n for n, _ in module.named_parameters()]
    mesh = strategy.mesh
    result = RankResult(
        observer.seen,
        {n: strategy.shard_of(n) for n in names},
        coordinates(strategy),
        [valid_targets_of(module, batch) for batch in observer.seen.batches],
        {name: comm.ranks for name, comm in mesh.comms.items()},
        {n: strategy.averaged_over(n) for n in names},
        _epoch(module.trainer.train_dataloader),
    )
    strategy.close()
    return result


def train_at(
    rank: int, world: int, settings: Settings, layout: str, *observers: Callback
) -> tuple[LightningModule, ParallaxStrategy]:
    """Train on this rank at `layout`, watched by `observers`; the strategy is still open. Collective."""
    if settings.prepare is not None:
        settings.prepare()
    strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world), **settings.options)
    with _prepared(settings):
        module, data = settings.target.build()
        trainer = _trainer(settings, module, *observers, strategy=strategy, devices=world)
        if settings.target.synthetic is not None:
            copies = strategy.requested_layout.resolve(world).data_parallel_size or 1
            like = sketch(settings.target, shrink=settings.shrink)
            data = synthetic_loader(like, settings.target.synthetic, copies, settings.steps)
        trainer.fit(module, **loader_of(module, data))
    return module, strategy


def train_alone(settings: Settings, batches: list[Any], *observers: Callback) -> None:
    """Train in this process, with plain Lightning, on whole `batches`, one per step."""
    with _prepared(settings):
        module, _ = settings.target.build()
        trainer = _trainer(settings, module, *observers, strategy=_OneProcess(settings.seed), devices=1)
        loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        trainer.fit(module, train_dataloaders=loader)


def _epoch(loader: Any) -> tuple[int, list[int]] | None:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return None
    return len(loader.dataset), [int(i) for i in sampler]


def coordinates(strategy: ParallaxStrategy) -> dict[str, int]:
    return {axis: strategy.mesh.index(axis) for axis in ("pp", "dp", "cp", "tp", "data")}


def valid_targets_of(module: LightningModule, batch: Any) -> float:
    """Targets that count in `batch`; 1 where it has no labels."""
    count = valid_tokens(batch, shifted=shifts_labels(module))
    return 1.0 if count is None else float(count)


Parts = list[list[tuple[Named, dict[str, ParamShard | None]]]]
"""Step -> rank -> its tensors, and how they sit in the whole ones."""


def run_one(
    rank: int,
    world: int,
    settings: Settings,
    batches: list[Any],
    asked: Asked | None = None,
    follow: Parts | None = None,
) -> tuple[Observation, list[list[Theory]]]:
    """Train in this process alone on whole `batches`, one per step; and what was `asked`.

    Args:
        follow: the layout's weights after each step, from which the next step starts here too. See `follows`.
    """
    observer, more = Observer(plain_lens()), list[Expectation]()
    if asked is not None:
        strategy = ParallaxStrategy(str(asked.layout), **settings.options)
        more = [Expectation(asked, strategy.new_plugins(asked.layout), strategy.new_data_engine(asked.layout))]
    following = [] if follow is None else [_Follow(follow)]
    train_alone(settings, batches, observer, *following, *more)
    return observer.seen, more[0].theories if more else []


def follows(dtype: str) -> bool:
    """Whether one process starts each step from the layout's weights.

    In fp32 and below two right runs part by themselves: an optimizer that divides gradients by their size turns the
    rounding of the smallest ones into whole updates. So each step is compared by itself.
    """
    return dtype != "fp64"


class _Follow(Callback):
    """Takes over the weights of a layout's ranks after each step."""

    def __init__(self, parts: Parts) -> None:
        self._parts = iter(parts)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        params = dict(pl_module.named_parameters())
        whole = assemble_whole(next(self._parts), {n: p.detach() for n, p in params.items()})
        for name, param in params.items():
            param.copy_(torch.where(whole.tensors[name].isnan(), param, whole.tensors[name]))


def plugins_of(settings: Settings, layout: Layout) -> list[ParallelPlugin]:
    """Fresh plugins of a resolved layout."""
    return ParallaxStrategy(str(layout), **settings.options).new_plugins(layout)


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


def _trainer(settings: Settings, module: LightningModule, *observers: Callback, **options: Any) -> Trainer:
    callbacks: list[Any] = [_StepsOnly(), *([] if settings.dropout else [_NoDropout()]), *observers]
    if settings.dropout:  # masks are compared, at weights that stay
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
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
        assert module is not None
        if self._recording is not None:  # else `__init__` has built the model, from the same seed as on every rank
            self._recording.capture(module)
            materialize(module, self._recording, shard_of=lambda fqn: None, seed=self._seed, device="cpu")
        self.precision_plugin.convert_module(module)
        super().setup(trainer)


class _StepsOnly(Callback):
    """Leaves out schedulers of epochs: all steps of one process are one epoch, however short the layout's are."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        strategy.lr_scheduler_configs = [c for c in strategy.lr_scheduler_configs if c.interval == "step"]


class _NoDropout(Callback):
    """Switches dropout off: it draws other random numbers at every layout."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in pl_module.modules():
            for name, value in vars(module).items():
                if isinstance(value, float) and (
                    "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
                ):
                    setattr(module, name, 0.0)


def batches_read(data_index: Sequence[int], batches: Sequence[list[Any]]) -> list[list[Any]]:
    """Step -> data rank -> the batch it read, from those of all ranks; `data_index` is each rank's on "dp"."""
    readers = dict(reversed(list(zip(data_index, batches, strict=True))))
    return [[readers[i][step] for i in sorted(readers)] for step in range(len(batches[0]))]


def joined(batches: list[list[Any]]) -> list[Any]:
    """The global batch of each step: those the data ranks read, in the order of their ranks."""
    return [_joined(of_step) for of_step in batches]


def _joined(batches: list[Any]) -> Any:
    """Batches of data ranks as one, joined along dim 0."""
    flat = [flatten(batch) for batch in batches]
    leaves = [
        torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].dim() else parts[0]
        for parts in zip(*(f[0] for f in flat), strict=True)
    ]
    return unflatten(leaves, flat[0][1])
