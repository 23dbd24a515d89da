"""A real step beside the predicted one: measured costs, bubble, and which stage is the slowest.

It is: what becomes of the times an executor recorded, in memory and in a JSON file. It is not: the recording
(`executor.py`) or the pictures (`picture_text.py`, `picture_svg.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from parallax.plugins.pipeline.actions import KINDS, Action, Kind
from parallax.plugins.pipeline.gantt import Gantt
from parallax.plugins.pipeline.simulator import Costs, simulate


@dataclass(frozen=True)
class Comparison:
    """A measured step and what the simulator says of the same lists at the measured costs.

    Attributes:
        measured, predicted: the two, times in seconds from 0.
        costs: mean seconds of each kind on each virtual stage, and the median time of a transfer.
    """

    measured: Gantt
    predicted: Gantt
    costs: Costs

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """Mean time of one micro-batch on each virtual stage, forward and backward."""
        times = [0.0] * len(self.measured.placement)
        for rank in self.measured.ranks():
            for action, start, end in rank:
                times[action.stage] += end - start
        return tuple(time / self.measured.microbatches for time in times)

    @property
    def slowest_stage(self) -> int:
        """The virtual stage whose micro-batches take longest."""
        times = self.stage_seconds
        return times.index(max(times))

    def __str__(self) -> str:
        times, at = self.stage_seconds, self.slowest_stage
        mean = sum(times) / len(times)
        return (
            f"measured {self.measured.makespan * 1e3:.3g} ms, bubble {self.measured.bubble:.1%}; predicted "
            f"{self.predicted.makespan * 1e3:.3g} ms, bubble {self.predicted.bubble:.1%}; slowest: stage {at} on rank "
            f"{self.measured.placement[at]}, {times[at] * 1e3:.3g} ms a micro-batch, {times[at] / mean:.2f} x the mean"
        )


def compare(measured: Gantt) -> Comparison:
    """Compare a step with the prediction at its own mean costs.

    Args:
        measured: what ran when, in seconds on one clock; an action starts when it has what it needs.
    """
    costs = _mean_costs(measured)
    return Comparison(measured, simulate(measured.lists, costs), costs)


def save_trace(measured: Gantt, path: str | Path) -> None:
    """Write a step as JSON: per rank, [kind, micro-batch, stage, start, end] of each action."""
    rows = [[[a.kind, a.microbatch, a.stage, start, end] for a, start, end in rank] for rank in measured.ranks()]
    Path(path).write_text(json.dumps({"unit": "s", "ranks": rows}) + "\n")


def load_trace(path: str | Path) -> Gantt:
    """Read what `save_trace` wrote.

    Raises:
        ValueError: no such file, or it is not a trace.
    """
    try:
        rows: Any = json.loads(Path(path).read_text())["ranks"]
        lists = [[_action(*row[:3]) for row in rank] for rank in rows]
        times = [[(float(start), float(end)) for *_, start, end in rank] for rank in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"trace file {str(path)!r} cannot be read: {type(error).__name__}: {error}") from error
    if not lists or not all(lists):
        raise ValueError(f"trace file {str(path)!r} has a rank without actions")
    return Gantt(lists, [[start for start, _ in rank] for rank in times], [[end for _, end in rank] for rank in times])


def _action(kind: Kind, microbatch: int, stage: int) -> Action:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of action")
    return Action(kind, int(microbatch), int(stage))


def _mean_costs(gantt: Gantt) -> Costs:
    total: dict[tuple[str, int], float] = {}
    count: dict[tuple[str, int], int] = {}
    for rank in gantt.ranks():
        for action, start, end in rank:
            key = action.kind, action.stage
            total[key] = total.get(key, 0.0) + end - start
            count[key] = count.get(key, 0) + 1

    def of(kind: Kind) -> list[float]:
        keys = [(kind, stage) for stage in range(len(gantt.placement))]
        return [total[key] / count[key] if key in count else 0.0 for key in keys]

    return Costs(forward=of("F"), backward=of("B"), weight=of("W"), input=of("I"), transfer=_transfer(gantt))


def _transfer(gantt: Gantt) -> float:
    """Median time from the end of an action to the start of one that waited for it on another rank."""
    timed = [(action, end) for rank in gantt.ranks() for action, _, end in rank if action.kind != "W"]
    ends = {(action.kind == "F", action.stage, action.microbatch): end for action, end in timed}
    gaps = []
    for index, rank in enumerate(gantt.ranks()):
        free = gantt.begin
        for action, start, end in rank:
            source = action.stage - 1 if action.kind == "F" else action.stage + 1
            made = ends.get((action.kind == "F", source, action.microbatch))
            if action.kind != "W" and made is not None and gantt.placement[source] != index and made >= free:
                gaps.append(max(start - made, 0.0))  # clocks of two machines may differ
            free = end
    return median(gaps) if gaps else 0.0
