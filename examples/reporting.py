"""What a training run shows: tokens per second while it runs, a loss plot at the end.

It is: one Lightning callback and a drawing of the metrics file. It is not:
part of the training.
"""

from __future__ import annotations

import csv
import time
from collections import deque
from pathlib import Path
from typing import Any

import lightning as L


class TokensPerSecond(L.Callback):
    """Logs `tokens_per_s`: tokens of the whole job (all ranks) per second of training, over the last steps.

    Time spent in validation and checkpointing between two steps does not count.

    Args:
        tokens_per_step: tokens of one batch over all data-parallel ranks.
        window: number of steps averaged over.
    """

    def __init__(self, tokens_per_step: int, window: int = 10) -> None:
        self.tokens_per_step = tokens_per_step
        self.seconds: deque[float] = deque(maxlen=window)
        self.started = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        rate = self.tokens_per_step * len(self.seconds) / sum(self.seconds)
        pl_module.log("tokens_per_s", rate, prog_bar=True)


def read_curve(metrics: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one column of a CSVLogger's `metrics.csv`; rows without a value are left out."""
    with metrics.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(name)]
    return [int(row["step"]) + 1 for row in rows], [float(row[name]) for row in rows]


def plot_losses(metrics: Path, picture: Path, title: str) -> None:
    """Draw `train_loss` and `val_loss` of `metrics` (CSV) over the optimizer step into `picture` (PNG)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.subplots()
    for name, label, style in (
        ("train_loss", "training", {"color": "tab:blue", "linewidth": 1.2}),
        ("val_loss", "validation", {"color": "tab:orange", "marker": "o", "markersize": 4}),
    ):
        steps, values = read_curve(metrics, name)
        if values:
            axes.plot(steps, values, label=f"{label} (last: {values[-1]:.3f})", **style)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross-entropy (nats per byte)")
    axes.set_title(title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
