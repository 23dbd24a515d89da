"""Replica sentinels: every few steps, what must be the same on several ranks is compared by fingerprints.

It is: a Lightning callback, off unless it is passed to the Trainer. It is not: a proof of the layout (`verify/`), and
it corrects nothing. Cost: two numbers per tensor, one small all-gather per group, one wait for the device every `every`
steps.

Compared are: parameters over the ranks that hold replicas of them ("data", or "edp" for experts; "tp" for those no
plan cuts; first and last stage for tied weights), optimizer states over the same data ranks (ZeRO stage 0, where they
are replicas), and the batch over the ranks that share one model copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from parallax.strategies.comm import AxisComm
from parallax.strategies.fingerprint import fingerprint
from parallax.strategies.tree import tensors_of


class ReplicaDrift(RuntimeError):
    """Replicas have become different. The message says which, on which ranks, and since which step."""


class ReplicaSentinel(Callback):
    """Raises `ReplicaDrift` when replicas differ.

    Args:
        every: steps between two looks.

    Raises:
        ValueError: `every` is below 1, or the strategy is not Parallax's.
    """

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self.every = every
        self._agreed_at = 0
        self._batch: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "shard_of"):
            raise ValueError(f"ReplicaSentinel watches ParallaxStrategy, not {type(trainer.strategy).__name__}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch if (trainer.global_step + 1) % self.every == 0 else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._batch is None or trainer.global_step % self.every:
            return
        self.look(trainer, pl_module, self._batch)
        self._agreed_at, self._batch = trainer.global_step, None

    def look(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        """Compare now. Collective over the world."""
        strategy: Any = trainer.strategy
        mesh = strategy.mesh
        found: list[str] = []
        for group, tensors in self._replicas(strategy, module).items():
            found += _differences(mesh[group], tensors, group)
        found += _differences(mesh["model"], {f"batch tensor {i}": t for i, t in enumerate(tensors_of(batch))}, "model")
        everyones = mesh["control"].gather_objects(found)
        drifted = sorted({text for texts in everyones for text in texts})
        if drifted:
            raise ReplicaDrift(
                f"replicas differ after step {trainer.global_step} (they agreed after step {self._agreed_at}): "
                + "; ".join(drifted)
            )

    def _replicas(self, strategy: Any, module: LightningModule) -> dict[str, dict[str, Tensor]]:
        """Group -> name -> this rank's replica."""
        layout = strategy.mesh.layout
        out: dict[str, dict[str, Tensor]] = {"data": {}, "edp": {}, "tp": {}, "tie": {}}
        for fqn, param in module.named_parameters():
            if layout.shards_weights:
                continue  # shares, not replicas
            over = strategy.averaged_over(fqn)
            out[over][fqn] = param
            shard = strategy.shard_of(fqn)
            if over == "data" and (shard is None or shard.dim is None):
                out["tp"][fqn] = param
            if strategy.is_tied(fqn):
                out["tie"][_tie_name(shard)] = param
            if layout.zero_stage == 0:
                for name, state in strategy.engine.data.full_state(fqn).items():
                    out[over][f"{fqn} ({name})"] = state
        return out


def _tie_name(shard: Any) -> str:
    return f"tied weight of shape {None if shard is None else shard.shape}"


def _differences(comm: AxisComm, tensors: Mapping[str, Tensor], group: str) -> list[str]:
    """What differs from the first rank of the group, as text; empty when everything agrees."""
    if comm.size == 1 or not tensors:
        return []
    mine = torch.tensor([fingerprint(t) for t in tensors.values()], dtype=torch.float64)
    everyones = comm.gather_objects(mine)
    out = []
    for i, name in enumerate(tensors):
        differ = [
            rank
            for rank, theirs in zip(comm.ranks, everyones, strict=True)
            if len(theirs) != len(mine) or not torch.equal(theirs[i], everyones[0][i])
        ]
        if differ:
            out.append(f"{name} on rank(s) {differ} from rank {comm.ranks[0]} (group {group!r})")
    return out


class TrafficLogger(Callback):
    """Logs what each axis has sent since the last log: `bytes/<axis>`, payload bytes per optimizer step on this rank.

    Args:
        every: steps between two logs; None takes the Trainer's `log_every_n_steps`.
    """

    def __init__(self, every: int | None = None) -> None:
        self._every = every
        self._last: dict[str, int] = {}
        self._last_step = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self._every or trainer.log_every_n_steps  # type: ignore[attr-defined]
        steps = trainer.global_step - self._last_step
        if steps < every:
            return
        strategy: Any = trainer.strategy
        totals: dict[str, int] = {}
        for (axis, _, phase), traffic in strategy.mesh.ledger.counts.items():
            if phase != "setup":
                totals[axis] = totals.get(axis, 0) + traffic.bytes
        sent = {f"bytes/{axis}": (n - self._last.get(axis, 0)) / steps for axis, n in totals.items()}
        for logger in trainer.loggers:
            logger.log_metrics(sent, step=trainer.global_step)
        self._last, self._last_step = totals, trainer.global_step
