"""What one run measured, in one file.

It is: a callback for the Trainer that times steps, asks every rank for its memory and traffic, and writes `record.json`
on rank 0. It is not: part of the training, and it costs nothing but two readings of the clock a step (on a GPU also the
wait for the end of the step, without which there is no time to read).

The record of a run that went well:

    status               "ok"
    layout, layout_keys  in words, and every key of the resolved layout
    ranks, model         world size; `model` as given
    steps                optimizer steps that were timed, after `warmup`
    step_time_s          their median; step_time_spread_s: first and third quartile; step_times_s: all of them
    tokens_per_s         of the whole job, at the median
    peak_memory_bytes    of each rank (`memory.py`)
    bytes_per_step       axis -> bytes a rank sends in a step (`comm.wire_bytes`), the mean over the ranks, as the
                         mesh's ledger counts them, DeepSpeed's for ZeRO too
    bubble               idle share of the pipeline's schedule, simulated with backward = 2 x forward; 0 without one
    loss                 at the last step, the mean over the data ranks
    expert_load          layer -> tokens of each of its experts, where the Trainer has the callback ExpertLoad
    versions, host, date
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch

from parallax.plugins.expert.callbacks import ExpertLoad
from parallax.plugins.pipeline.catalog import find_schedule, make_lists
from parallax.plugins.pipeline.simulator import simulate
from parallax.plugins.sweep.folder import RECORD, write_json
from parallax.plugins.sweep.host import describe_host, versions
from parallax.plugins.sweep.layouts import in_words, normal
from parallax.plugins.sweep.memory import PeakMemory
from parallax.strategies.comm import Ledger, wire_bytes
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.strategy import ParallaxStrategy


class RunRecord(L.Callback):
    """Writes `folder/record.json` when training has ended.

    Args:
        folder: of this run; made when missing.
        tokens_per_step: tokens of one optimizer step over all ranks.
        model: anything that says which model this was, for the record.
        warmup: steps at the start that are not timed.

    Raises:
        ValueError: not a ParallaxStrategy, or no step is left after `warmup`.
    """

    def __init__(self, folder: str | Path, tokens_per_step: int, model: Any = None, warmup: int = 2) -> None:
        self._folder, self._tokens, self._model, self._warmup = Path(folder), tokens_per_step, model, warmup
        self._seconds: list[float] = []
        self._step_started: float | None = None
        self._sent: dict[tuple[str, str], int] = {}
        self._loss: torch.Tensor | None = None
        self._steps = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, ParallaxStrategy):
            raise ValueError("RunRecord reads the mesh of a ParallaxStrategy: give the Trainer one, or leave it out")
        self._memory = PeakMemory(trainer.strategy.root_device)  # before the model is built

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._step_started is None:  # with gradient accumulation a step has several batches
            self._step_started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self._loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        assert self._step_started is not None
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self._seconds.append(time.perf_counter() - self._step_started)
        self._step_started = None
        if len(self._seconds) == self._warmup:
            self._sent = _sent(_mesh(trainer).ledger)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        mesh, timed = _mesh(trainer), self._seconds[self._warmup :]
        if not timed:
            raise ValueError(
                f"RunRecord times the steps after the first {self._warmup}, and there were {len(self._seconds)}: give "
                f"the Trainer more max_steps"
            )
        loss = float(self._loss) if self._loss is not None else None
        mine = (self._memory.read(), _per_step(mesh, self._sent, len(timed)), loss)
        everyones = mesh["control"].gather_objects(mine)
        if mesh.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(self._folder / RECORD, self._record(mesh, timed, everyones) | _expert_load(trainer))

    def _record(self, mesh: Mesh, timed: list[float], everyones: list[Any]) -> dict[str, Any]:
        memory, sent, losses = zip(*everyones, strict=True)
        known = [loss for loss in losses if loss is not None]
        median = statistics.median(timed)
        quartiles = statistics.quantiles(timed, n=4, method="inclusive") if len(timed) > 1 else [median] * 3
        layout = mesh.layout
        return {
            "status": "ok",
            "layout": in_words(normal(layout, layout.world_size)),
            "layout_keys": layout.to_dict(),
            "ranks": layout.world_size,
            "model": self._model,
            "steps": len(timed),
            "step_time_s": median,
            "step_time_spread_s": [quartiles[0], quartiles[2]],
            "step_times_s": timed,
            "tokens_per_s": self._tokens / median,
            "peak_memory_bytes": list(memory),
            "bytes_per_step": {
                axis: round(sum(each.get(axis, 0.0) for each in sent) / len(sent))
                for axis in sorted({axis for each in sent for axis in each})
            },
            "bubble": bubble(layout),
            "loss": sum(known) / len(known) if known else None,
            "versions": versions(),
            "host": describe_host(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }


def _expert_load(trainer: L.Trainer) -> dict[str, Any]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    counted = next((each.totals() for each in callbacks if isinstance(each, ExpertLoad)), {})
    return {"expert_load": counted} if counted else {}


def bubble(layout: Layout) -> float:
    """Idle share of all ranks' time in the schedule of a resolved `layout`, a backward taking twice a forward."""
    if layout.pipeline_parallel_size == 1:
        return 0.0
    schedule, ranks = find_schedule(layout.schedule), layout.pipeline_parallel_size
    return simulate(make_lists(schedule, ranks, layout.num_microbatches or 1, layout.stages_per_rank)).bubble


def _mesh(trainer: L.Trainer) -> Mesh:
    assert isinstance(trainer.strategy, ParallaxStrategy)
    return trainer.strategy.mesh


def _sent(ledger: Ledger) -> dict[tuple[str, str], int]:
    """(axis, kind) -> payload bytes so far."""
    found: dict[tuple[str, str], int] = {}
    for (axis, kind, _), traffic in ledger.counts.items():
        found[axis, kind] = found.get((axis, kind), 0) + traffic.bytes
    return found


def _per_step(mesh: Mesh, before: Mapping[tuple[str, str], int], steps: int) -> dict[str, float]:
    """Axis -> bytes this rank has sent in a step since `before`."""
    found: dict[str, float] = {}
    for (axis, kind), payload in _sent(mesh.ledger).items():
        since = payload - before.get((axis, kind), 0)
        if since:
            found[axis] = found.get(axis, 0.0) + wire_bytes(kind, since, mesh[axis].size) / steps
    return found
