"""The same step under Lightning's Trainer: with Lightning's DDP, or with Parallax at some layout.

It is: the LightningModule, its data, and a callback with the stopwatch. A step is timed from the end of the step
before to its own end, so the Trainer's own work counts.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from saved import SavedActivations
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from work import Cost, Work, build, global_batch, loss_fn, mean_over_ranks, optimizer, over_ranks

import parallax


class Lit(L.LightningModule):
    """The decoder, every step on the same batch."""

    def __init__(self, work: Work, steps: int) -> None:
        super().__init__()
        self.work, self.steps = work, steps
        self.model = build(work)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = loss_fn(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self, self.work)

    def train_dataloader(self) -> DataLoader[Any]:
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        mine = [part.chunk(place["num_replicas"])[place["rank"]] for part in global_batch(self.work)]
        rows = TensorDataset(*(part.repeat(self.steps, 1) for part in mine))
        return DataLoader(rows, batch_size=mine[0].shape[0])


class Stopwatch(L.Callback):
    """Seconds of each step after `warmup`, the logged losses of all of them, and what they cost.

    A last step, which is in none of these, says what is kept for backwards.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.counted, self.last = warmup, warmup + steps, 0.0
        self.cost, self.stopped = Cost(), (0.0, 0.0)
        self.saved: SavedActivations | None = None
        self.spent: dict[str, Any] = {}
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_train_start(self, *_: Any) -> None:
        self.cost.start()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.counted:
            self.stopped = self.cost.stop()
            self.saved = SavedActivations()
            self.saved.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.saved is not None:
            self.saved.__exit__()
            return
        self.losses.append(float(trainer.callback_metrics["loss"]))
        now = time.perf_counter()
        if trainer.global_step > self.warmup:
            self.seconds.append(now - self.last)
        self.last = now

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert self.saved is not None
        self.spent = over_ranks(self.stopped, self.saved.peak / 2**20)
        self.losses = mean_over_ranks(self.losses)


def run_trainer(
    kind: str, work: Work, world: int, warmup: int, steps: int
) -> tuple[list[float], list[float], Any, bool]:
    """Train; `kind` is "lightning-ddp" or "parallax:<layout>". Seconds, losses, cost, and whether this is rank 0."""
    if kind == "lightning-ddp":
        strategy: Any = DDPStrategy(process_group_backend="gloo")
    else:
        strategy = parallax.ParallaxStrategy(kind.removeprefix("parallax:"))
    watch = Stopwatch(warmup, steps)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_steps=warmup + steps + 1,
        callbacks=[watch],
        use_distributed_sampler=False,  # the loader above deals the batch out itself
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(work, warmup + steps + 1))
    return watch.seconds, watch.losses, watch.spent, trainer.is_global_zero
