"""One process of the bubble measurement: layers that sleep, so that every action takes a given time on any machine.

    torchrun --nproc-per-node 4 benchmarks/pipeline_worker.py "pp4 mb8 zb_h1" 0.02 6

It is: a model whose forward, gradient of the input and gradient of the weights each take one unit of time on each
virtual stage, trained by Parallax at a layout; rank 0 prints measured and predicted bubbles and seconds of each step.
It is not: arithmetic; nothing here needs a core, so that four stages run at once on two.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import parallax
from parallax.plugins.pipeline.trace_callback import PipelineTrace

MARK = "RESULT "
DIM = 4


class SleepBackward(torch.autograd.Function):
    """The identity; its backward takes `seconds`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class SleepingLayer(nn.Module):
    """One unit of time for the forward, one for the gradient of the input, one for that of the weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.inner = nn.Linear(DIM, DIM, bias=False)
        self.inner.weight.register_hook(lambda grad: time.sleep(seconds))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x + SleepBackward.apply(self.inner(x), self.seconds)


class Sleeper(L.LightningModule):
    """As many sleeping layers as there are virtual stages."""

    pp_plan = {"first": (["x"], ["x"]), "layers": (["x"], ["x"]), "last": (["x"], ["x"])}

    def __init__(self, layers: int, seconds: float) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(SleepingLayer(seconds) for _ in range(layers))
        self.last = nn.Linear(DIM, DIM)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.first(batch[0])
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Bubbles(L.Callback):
    """Traces every step after the first two."""

    def __init__(self) -> None:
        self.measured: list[float] = []
        self.predicted: list[float] = []
        self.seconds: list[float] = []
        self._trace = PipelineTrace(step=0)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self._trace = PipelineTrace(step=index)
        self._trace.on_train_batch_start(trainer, module, batch, index)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self._trace.on_train_batch_end(trainer, module, outputs, batch, index)
        found = self._trace.comparison
        if index >= 2 and found is not None:
            self.measured.append(found.measured.bubble)
            self.predicted.append(found.predicted.bubble)
            self.seconds.append(found.measured.makespan)


def main(layout: str, seconds: float, steps: int) -> None:
    """Train at `layout` and print what was found, from rank 0."""
    warnings.filterwarnings("ignore")
    strategy = parallax.ParallaxStrategy(layout)
    asked = strategy.requested_layout
    stages = asked.pipeline_parallel_size * (2 if asked.schedule in ("interleaved_1f1b", "zb_v", "dualpipe_v") else 1)
    bubbles = Bubbles()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=asked.pipeline_parallel_size,
        strategy=strategy,
        max_steps=2 + steps,
        callbacks=[bubbles],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    microbatches = asked.num_microbatches or 1
    rows = TensorDataset(torch.ones((2 + steps) * microbatches, DIM))
    each = seconds * asked.pipeline_parallel_size / stages  # the same work on a rank, whatever the number of its stages
    trainer.fit(Sleeper(stages, each), DataLoader(rows, batch_size=microbatches))
    if trainer.is_global_zero:
        found = {"measured": bubbles.measured, "predicted": bubbles.predicted, "seconds": bubbles.seconds}
        print(MARK + json.dumps(found), flush=True)
    strategy.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
