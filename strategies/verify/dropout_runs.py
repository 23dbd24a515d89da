"""The two runs of a verification with dropout on, as functions each process calls.

It is: training steps that change no weight, at the layout and in one process on the same batches, with every dropout
noted. It is not: the judgement (`dropout.py`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from parallax.strategies.layout import Layout
from parallax.strategies.tree import map_tensors
from parallax.strategies.verify.dropout import DropoutRun, Mask, Masks, watched
from parallax.strategies.verify.expect import microbatch
from parallax.strategies.verify.runs import (
    Settings,
    coordinates,
    plugins_of,
    train_alone,
    train_at,
    valid_targets_of,
)
from parallax.strategies.verify.trace import unlogged, untouched

OTHER_SEED = 7919
"""Added to the seed of the one process: its masks are drawn apart from the layout's."""


class _Watch(Callback):
    """Notes losses, batches and masks."""

    def __init__(self, seed: int | None = None) -> None:
        self.masks, self.losses, self.batches = Masks(), list[float](), list[Any]()
        self._stack, self._seed = ExitStack(), seed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stack.enter_context(watched(pl_module, self.masks))
        if self._seed is not None:
            torch.manual_seed(self._seed)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.batches.append(map_tensors(lambda t: t.detach().cpu().clone(), batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stack.close()


class _Whole(Callback):
    """Masks that one process draws in one micro-batch of each layout's rank, when training is over."""

    def __init__(self, settings: Settings, layout: Layout, batch: Any) -> None:
        self.masks = Masks()
        self._settings, self._layout, self._batch = settings, layout, batch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plugins = plugins_of(self._settings, self._layout)
        part, _, _ = microbatch(pl_module, self._batch, self._layout, plugins)
        with (
            trainer.precision_plugin.forward_context(),
            untouched(pl_module),
            unlogged(pl_module, []),
            watched(pl_module, self.masks),
        ):
            pl_module.training_step(part, 0)


def dropout_at(rank: int, world: int, settings: Settings, layout: str) -> tuple[DropoutRun, list[Any]]:
    """This rank at `layout`, and the batches it read. Collective."""
    watch = _Watch()
    module, strategy = train_at(rank, world, settings, layout, watch)
    tokens = [valid_targets_of(module, batch) for batch in watch.batches]
    run = DropoutRun(watch.losses, watch.masks, coordinates(strategy), tokens)
    strategy.close()
    return run, watch.batches


def dropout_alone(
    rank: int, world: int, settings: Settings, layout: Layout, batches: list[Any], one_rank: Any
) -> tuple[DropoutRun, dict[str, list[Mask]]]:
    """One process on whole `batches`; and the masks of one micro-batch of `one_rank`, a data rank's batch."""
    watch, whole = _Watch(settings.seed + OTHER_SEED), _Whole(settings, layout, one_rank)
    train_alone(settings, batches, watch, whole)
    return DropoutRun(watch.losses, watch.masks), whole.masks.drawn
