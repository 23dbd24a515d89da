"""Lightning callback: one real step as a trace, beside the predicted one.

It is: when to record, the gathering over the ranks, and the files. It is not: the record (`timeline.py`) or the
comparison (`trace.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from parallax.plugins.pipeline.gantt import Gantt
from parallax.plugins.pipeline.picture_svg import draw_both
from parallax.plugins.pipeline.timeline import Timeline, gather
from parallax.plugins.pipeline.trace import Comparison, compare, save_trace


class PipelineTrace(Callback):
    """Records one training step on every rank, says how it compares with the prediction, and writes both.

    Args:
        path: a file for `python -m parallax schedule --trace`; the page with both pictures is written next to it, with
            suffix .html. None: no files. Rank 0 writes, for the pipeline it is part of.
        step: `batch_idx` of the recorded batch; the first ones are slower than the rest.

    Attributes:
        comparison: measured and predicted, on every rank, once the step has run.
    """

    def __init__(self, path: str | Path | None = None, step: int = 3) -> None:
        if step < 0:
            raise ValueError(f"step must be the index of a batch, at least 0; got {step}")
        self._path, self._step = None if path is None else Path(path), step
        self.comparison: Comparison | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.comparison is None and batch_idx == self._step:
            trainer.strategy.engine.executor.timeline = Timeline(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        timeline = strategy.engine.executor.timeline
        if timeline is None:
            return
        strategy.engine.executor.timeline = None
        self.comparison = compare(Gantt(*gather(timeline, strategy.mesh["pp"])))
        rank_zero_info(f"pipeline, batch {batch_idx}: {self.comparison}")
        if self._path is not None and trainer.is_global_zero:
            save_trace(self.comparison.measured, self._path)
            text = draw_both(f"Batch {batch_idx}, {strategy.mesh.layout}", self.comparison)
            self._path.with_suffix(".html").write_text(text, encoding="utf-8")
