"""Checks a schedule before any process runs it, and counts what it costs.

It is: a pure, event-driven run of action lists with given costs: completeness, order, absence of
deadlock, makespan, bubble and activations in flight. It is not: a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallax.plugins.pipeline.schedules import Action


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs.

    Attributes:
        makespan: time from the first start to the last end.
        bubble: idle share of all stages' time, 1 - busy / (stages x makespan).
        peak_in_flight: per stage, the most micro-batches whose forward ran and whose backward did not.
        starts: per stage, the start time of each action.
    """

    makespan: float
    bubble: float
    peak_in_flight: tuple[int, ...]
    starts: tuple[tuple[float, ...], ...]


def check(schedule: Sequence[Sequence[Action]], num_microbatches: int, *, backward: bool = True) -> None:
    """Refuse a schedule that is incomplete, out of order or deadlocks.

    Raises:
        ValueError: naming the stage and the action.
    """
    kinds = ("F", "B") if backward else ("F",)
    orders: dict[str, list[int]] = {}
    for stage, actions in enumerate(schedule):
        for kind in kinds:
            order = [a.microbatch for a in actions if a.kind == kind]
            if sorted(order) != list(range(num_microbatches)):
                raise ValueError(
                    f"stage {stage} runs {kind} of micro-batches {order}; each of 0..{num_microbatches - 1} "
                    f"must appear exactly once"
                )
            if orders.setdefault(kind, order) != order:
                raise ValueError(
                    f"stage {stage} runs {kind} in order {order}, stage 0 in order {orders[kind]}; "
                    f"neighbours exchange tensors in order, so they must agree"
                )
        done: set[int] = set()
        for action in actions:
            if action.kind == "B" and action.microbatch not in done:
                raise ValueError(f"stage {stage} runs {action} before F{action.microbatch}")
            done.add(action.microbatch)
    simulate(schedule)


def simulate(schedule: Sequence[Sequence[Action]], forward: float = 1.0, backward: float = 2.0) -> Simulation:
    """Run the lists with one cost per forward and per backward; transfers are free.

    Raises:
        ValueError: the lists deadlock; the message says what every stage is waiting for.
    """
    stages = len(schedule)
    ends: dict[tuple[int, Action], float] = {}
    at = [0] * stages
    clock = [0.0] * stages
    starts: list[list[float]] = [[] for _ in range(stages)]
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule):
            while at[stage] < len(actions):
                action = actions[at[stage]]
                source = stage - 1 if action.kind == "F" else stage + 1
                needs = None if source in (-1, stages) else ends.get((source, action))
                if needs is None and source not in (-1, stages):
                    break
                start = max(clock[stage], needs or 0.0)
                clock[stage] = start + (forward if action.kind == "F" else backward)
                ends[stage, action] = clock[stage]
                starts[stage].append(start)
                at[stage] += 1
                moved = True
    stuck = {s: str(schedule[s][at[s]]) for s in range(stages) if at[s] < len(schedule[s])}
    if stuck:
        waits = ", ".join(f"stage {s} at {a}" for s, a in stuck.items())
        raise ValueError(f"the schedule deadlocks: {waits}; each waits for a neighbour that never gets there")
    makespan = max(clock)
    busy = sum(forward if a.kind == "F" else backward for actions in schedule for a in actions)
    return Simulation(
        makespan, 1 - busy / (stages * makespan), tuple(map(_peak_in_flight, schedule)), tuple(map(tuple, starts))
    )


def _peak_in_flight(actions: Sequence[Action]) -> int:
    now = peak = 0
    for action in actions:
        now += 1 if action.kind == "F" else -1
        peak = max(peak, now)
    return peak
