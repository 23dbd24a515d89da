"""Known faults, each planted on the ranks of a layout by replacing one function of the product.

It is: the mistakes systems of this kind are known for. It is not: used anywhere but in `test_faults.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Fault:
    """A planted fault and how the verifier must name it.

    Attributes:
        plant: replaces something.
        target: class of `targets.py`.
        layout: where it shows.
        what: kind of the first difference.
        cause: words its likely cause must contain; any of them.
        ranks: those that the first difference names.
    """

    plant: Callable[[], None]
    target: str
    layout: str
    what: tuple[str, ...]
    cause: tuple[str, ...]
    ranks: tuple[int, ...] = (0, 1)


def scaled_by_microbatches() -> None:
    from parallax.strategies.engine import Engine

    right = Engine._weights
    Engine._weights = lambda self, counts: right(self, counts) * len(counts)  # type: ignore[method-assign]


def loss_weight_missing() -> None:
    from parallax.strategies.engine import Engine

    Engine._weights = lambda self, counts: torch.ones_like(counts) / len(counts)  # type: ignore[method-assign]


def tied_gradients_not_summed() -> None:
    from parallax.plugins.pipeline.plugin import PipelineParallel

    PipelineParallel.finalize_grads = lambda self, model, mesh: None  # type: ignore[method-assign, misc, assignment]


def partial_gradients_not_summed() -> None:
    """The norms of sequence parallelism."""
    from parallax.plugins.tensor.plugin import TensorParallel

    TensorParallel.finalize_grads = lambda self, model, mesh: None  # type: ignore[method-assign, misc, assignment]


def sampler_rank_wrong() -> None:
    from parallax.strategies.processes import ProcessStrategy

    right: Any = ProcessStrategy.distributed_sampler_kwargs
    wrong = property(lambda self: {**right.fget(self), "rank": 0})
    ProcessStrategy.distributed_sampler_kwargs = wrong  # type: ignore[method-assign, assignment]


def sampler_of_too_many() -> None:
    """As if the ranks of all axes read samples of their own."""
    from parallax.strategies.processes import ProcessStrategy

    right: Any = ProcessStrategy.distributed_sampler_kwargs
    wrong = property(lambda self: {**right.fget(self), "num_replicas": 2 * right.fget(self)["num_replicas"]})
    ProcessStrategy.distributed_sampler_kwargs = wrong  # type: ignore[method-assign, assignment]


def _silent(axis: str, kind: str = "all_reduce", phase: str | None = None, least: int = 0) -> None:
    """Calls of `kind` on `axis` (in `phase`, of at least so many bytes) do nothing."""
    from parallax.strategies.comm import AxisComm, nbytes

    right: Any = getattr(AxisComm, kind)

    def call(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        hit = self.axis == axis and phase in (None, self.ledger.phase) and nbytes(tensor) >= least
        return None if hit else right(self, tensor, *args, **kwargs)

    setattr(AxisComm, kind, call)


def norm_without_other_ranks() -> None:
    _silent("model")


def gradients_not_reduced() -> None:
    _silent("data", phase="step", least=64)


def _no_agreement() -> None:
    """The tensor plugin compares replicated gradients in the first step, and would stop there."""
    from parallax.plugins.tensor import plugin

    plugin.require_agreement = lambda *args, **kwargs: True


def region_entry_not_reduced() -> None:
    _no_agreement()
    _silent("tp", phase="backward")


def region_exit_not_reduced() -> None:
    _no_agreement()
    _silent("tp", phase="forward")


def gradients_summed() -> None:
    from parallax.plugins.data.buckets import GradBuckets

    right = GradBuckets.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self.average_of = 1

    GradBuckets.__init__ = init  # type: ignore[method-assign]


def replicas_counted_twice() -> None:
    from parallax.strategies import strategy

    strategy.owned_lookup = lambda shard_of: lambda fqn: True


def buffer_reused_too_early() -> None:
    # Once all of a message is here it goes into the memory of the message before, which a backward still needs: the
    # loss stays right, whatever comes when. (`data`: as for what comes from a wire, autograd sees no change.)
    from parallax.plugins.pipeline.transfer import Transfer

    kept: dict[Any, torch.Tensor] = {}
    right = Transfer.take

    def take(self: Any, message: Any) -> list[torch.Tensor]:
        here = right(self, message)
        again = [kept.setdefault((id(self), each.shape, each.dtype), torch.empty_like(each)) for each in here]
        for memory, each in zip(again, here, strict=True):
            memory.data.copy_(each)
        return again

    Transfer.take = take  # type: ignore[method-assign]


def experts_swapped() -> None:
    from parallax.plugins.base import ParamShard

    right = ParamShard.take

    def take(self: Any, whole: Any) -> Any:
        return right(self, whole.roll(whole.shape[0] // 2, 0) if self.axis == "ep" and self.dim == 0 else whole)

    ParamShard.take = take  # type: ignore[method-assign]


def shard_transposed() -> None:
    from parallax.plugins.base import ParamShard

    right = ParamShard.take

    def take(self: Any, whole: Any) -> Any:
        square = self.dim is not None and len(self.shape) == 2 and self.shape[0] == self.shape[1]
        return right(self, whole.t().contiguous() if square else whole)

    ParamShard.take = take  # type: ignore[method-assign]


def labels_shifted_again() -> None:
    from parallax.strategies import engine

    right = engine.split

    def split(batch: Any, count: int) -> Any:
        return right({**batch, "labels": batch["labels"].roll(1, -1)}, count)

    engine.split = split


def stepped_twice() -> None:
    """On one rank."""
    if os.environ["RANK"] == "0":
        return
    from parallax.plugins.data.replicated import ReplicatedEngine

    right = ReplicatedEngine.step

    def step(self: Any, clip: Any) -> Any:
        plain = self.optimizer.step
        self.optimizer.step = lambda: (plain(), plain())
        try:
            return right(self, clip)
        finally:
            self.optimizer.step = plain

    ReplicatedEngine.step = step  # type: ignore[method-assign]


def clipped_twice() -> None:
    from parallax.plugins.data import replicated

    right = replicated.apply_plan

    def twice(grads: Any, plan: Any) -> None:
        right(grads, plan)
        right(grads, plan)

    replicated.apply_plan = twice


def metric_of_last_microbatch() -> None:
    from parallax.strategies import logs

    logs.weighted_mean = lambda values, *rest: torch.as_tensor(values[-1]).double().reshape(())


FAULTS: dict[str, Fault] = {
    "scaled by m": Fault(scaled_by_microbatches, "Lit", "dp2 mb4", ("gradient",), ("off by m = 4",)),
    "loss weight missing": Fault(loss_weight_missing, "Lit", "dp2 mb2", ("gradient",), ("weigh",)),
    "tied gradients not summed": Fault(tied_gradients_not_summed, "Gpt2", "pp2", ("gradient",), ("replicas disagree",)),
    "partial gradients not summed": Fault(
        partial_gradients_not_summed, "Lit", "tp2 sp1", ("gradient",), ("replicas disagree",)
    ),
    "sampler rank wrong": Fault(sampler_rank_wrong, "Lit", "dp2", ("sample",), ("sampler",)),
    "samples lost": Fault(sampler_of_too_many, "Lit", "dp2", ("sample",), ("32 of 64 samples are read by no",)),
    "norm without other stages": Fault(norm_without_other_ranks, "Lit", "pp2", ("norm",), ("left out of the norm",)),
    "norm of one tp rank": Fault(norm_without_other_ranks, "Lit", "tp2", ("norm",), ("norm",)),
    "gradients not reduced": Fault(gradients_not_reduced, "Lit", "dp2", ("gradient",), ("replicas disagree",)),
    "entry of a region not reduced": Fault(
        region_entry_not_reduced, "Plain", "tp2 sp0", ("gradient",), ("replicas disagree", "reduction")
    ),
    "exit of a region not reduced": Fault(
        region_exit_not_reduced, "Plain", "tp2 sp0", ("loss",), ("no constant factor", "constant factor")
    ),
    "gradients summed": Fault(gradients_summed, "Lit", "dp2", ("gradient",), ("off by dp = 2",)),
    "replicas counted twice": Fault(replicas_counted_twice, "Lit", "tp2", ("norm",), ("counted twice", "counted 2")),
    "buffer reused too early": Fault(
        buffer_reused_too_early, "Lit", "pp2 gpipe mb4", ("gradient",), ("no constant factor",), (0,)
    ),
    "experts swapped": Fault(experts_swapped, "Moe", "dp2 ep2", ("initial weight",), ("swapped",)),
    "shard transposed": Fault(shard_transposed, "Plain", "tp2", ("initial weight",), ("transposed",)),
    "labels shifted again": Fault(labels_shifted_again, "Lit", "dp2", ("loss",), ("labels shifted",)),
    "stepped twice": Fault(stepped_twice, "Lit", "tp2", ("weight",), ("update",), (1,)),
    "clipped twice": Fault(clipped_twice, "Lit", "tp2", ("weight", "moment"), ("update", "constant factor")),
    "metric of the last micro-batch": Fault(
        metric_of_last_microbatch, "Lit", "pp2 mb4", ("metric",), ("no constant factor", "constant factor")
    ),
}
