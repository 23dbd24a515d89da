"""What a training run did, noted by a Lightning callback: the same one in the parallel run and in one process.

It is: the record of losses, norms, gradients, weights, optimizer states, logged metrics and batches of a few steps.
It is not: a judgement (`compare.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from parallax.strategies.comm import Ledger
from parallax.strategies.tree import map_tensors

Named = dict[str, Tensor]
Counted = dict[tuple[str, str, str], tuple[int, int]]
"""(axis, kind, phase) -> (calls, bytes)."""

LOOKING = "verification"
"""The ledger's phase while the observer itself gathers what it looks at."""


@dataclass
class Observation:
    """One rank's view of a run. Tensors are this rank's parts, named by FQN; lists are by step.

    Attributes:
        losses, norms: loss of the rank's batch and global gradient norm before clipping.
        grads, weights: after each backward, after each update.
        moments: FQN -> optimizer state of the parameter after the last step.
        metrics: what `trainer.callback_metrics` showed at the end of each step.
        batches: batches this rank read, on the CPU.
        traffic: (axis, kind, phase) -> (calls, bytes) of each step; empty in one process.
        order: FQNs in the order the first forward used them.
        initial: weights before the first step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[Named] = field(default_factory=list)
    weights: list[Named] = field(default_factory=list)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)
    traffic: list[Counted] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    initial: Named = field(default_factory=dict)


@dataclass(frozen=True)
class Lens:
    """How to look at a run: each takes the trainer and an FQN (norm, ledger: the trainer).

    `early`: the norm is there before the optimizer step, not after it.
    """

    grad: Callable[[Trainer, str], Tensor | None]
    param: Callable[[Trainer, str], Tensor]
    state: Callable[[Trainer, str], dict[str, Tensor]]
    norm: Callable[[Trainer], Any]
    early: bool
    ledger: Callable[[Trainer], Ledger]


class Observer(Callback):
    """Notes everything of every step. For a few steps of a small model: it keeps copies."""

    def __init__(self, lens: Lens) -> None:
        self.seen = Observation()
        self._lens = lens
        self._hooks: list[Any] = []
        self._before: Counted = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        owners = [m for m in pl_module.modules() if next(m.parameters(recurse=False), None) is not None]
        names = {m: n for n, m in pl_module.named_modules()}
        for module in owners:
            self._hooks.append(module.register_forward_pre_hook(lambda m, _: self._use(m, names[m])))
        with self._looking(trainer):
            self.seen.initial = self._weights(trainer, pl_module)

    def _looking(self, trainer: Trainer) -> AbstractContextManager[None]:
        """What is gathered inside is no traffic of the run."""
        return self._lens.ledger(trainer).during(LOOKING)

    def _counted(self, trainer: Trainer) -> Counted:
        counts = self._lens.ledger(trainer).counts
        return {key: (t.calls, t.bytes) for key, t in counts.items() if key[2] != LOOKING}

    def _use(self, module: torch.nn.Module, prefix: str) -> None:
        for name, _ in module.named_parameters(recurse=False):
            fqn = f"{prefix}.{name}" if prefix else name
            if fqn not in self.seen.order:
                self.seen.order.append(fqn)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.seen.batches.append(map_tensors(lambda t: t.detach().cpu().clone(), batch))
        self._before = self._counted(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        names = [n for n, p in pl_module.named_parameters() if p.requires_grad]
        with self._looking(trainer):
            found = [(n, self._lens.grad(trainer, n)) for n in names]
        self.seen.grads.append({n: g.detach().clone() for n, g in found if g is not None})
        if self._lens.early:
            self.seen.norms.append(float(self._lens.norm(trainer)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.seen.traffic.append(_since(self._before, self._counted(trainer)))
        self.seen.losses.append(float(outputs["loss"]))
        if not self._lens.early:
            self.seen.norms.append(float(self._lens.norm(trainer)))
        with self._looking(trainer):
            self.seen.weights.append(self._weights(trainer, pl_module))
        self.seen.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items() if v.numel() == 1})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = [n for n, p in pl_module.named_parameters() if p.requires_grad]
        with self._looking(trainer):
            self.seen.moments = {n: self._lens.state(trainer, n) for n in names}

    def _weights(self, trainer: Trainer, module: LightningModule) -> Named:
        return {n: self._lens.param(trainer, n).detach().clone() for n, _ in module.named_parameters()}


def _since(before: Counted, now: Counted) -> Counted:
    gone = {key: (n - before.get(key, (0, 0))[0], b - before.get(key, (0, 0))[1]) for key, (n, b) in now.items()}
    return {key: counts for key, counts in gone.items() if counts != (0, 0)}


def plain_lens() -> Lens:
    """One process, plain Lightning: gradients are `param.grad`, the norm is torch's of all of them."""

    def param(trainer: Trainer, name: str) -> Tensor:
        return trainer.lightning_module.get_parameter(name)

    def norm(trainer: Trainer) -> Any:
        grads = [p.grad for p in trainer.lightning_module.parameters() if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))

    def state(trainer: Trainer, name: str) -> dict[str, Tensor]:
        return _tensors(trainer.optimizers[0].state.get(param(trainer, name), {}))

    nothing = Ledger()
    return Lens(lambda t, n: param(t, n).grad, param, state, norm, early=True, ledger=lambda t: nothing)


def parallel_lens() -> Lens:
    """The same through the data engine, whole over the data axis."""

    def engine(trainer: Trainer) -> Any:
        strategy: Any = trainer.strategy
        return strategy.engine.data

    def norm(trainer: Trainer) -> Any:
        strategy: Any = trainer.strategy
        return strategy.last_step.grad_norm

    def ledger(trainer: Trainer) -> Ledger:
        strategy: Any = trainer.strategy
        found: Ledger = strategy.mesh.ledger
        return found

    return Lens(
        lambda t, n: engine(t).full_grad(n),
        lambda t, n: engine(t).full_param(n),
        lambda t, n: _tensors(engine(t).full_state(n)),
        norm,
        early=False,
        ledger=ledger,
    )


def _tensors(state: Any) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0}
