"""Checks a schedule before any process runs it, and computes what it costs.

It is: a pure, event-driven run of action lists with given costs, in time linear in the number of actions: completeness,
order, absence of deadlock, and the times of all actions. It is not: a measurement (`trace.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallax.plugins.pipeline.actions import KINDS, Action, Kind, Lists, placement
from parallax.plugins.pipeline.gantt import Gantt

Cost = float | Sequence[float]
"""The time of one action: one number, or one for each virtual stage."""


@dataclass(frozen=True)
class Costs:
    """How long actions take, in any one unit of time.

    Attributes:
        forward: of "F".
        backward: of a whole backward, "B".
        weight: of "W", the part of a backward that computes gradients of weights; None: half of it.
        input: of "I"; None: backward - weight.
        transfer: from the end of an action to the moment another rank can use its result; ranks do not work on it.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    weight: Cost | None = None
    input: Cost | None = None
    transfer: float = 0.0

    def table(self, stages: int) -> dict[Kind, list[float]]:
        """Per kind, the cost on each of `stages` virtual stages.

        Raises:
            ValueError: a cost below 0, no cost at all, or not as many as there are stages.
        """
        table = {"F": _each("F", self.forward, stages), "B": _each("B", self.backward, stages)}
        table["W"] = [b / 2 for b in table["B"]] if self.weight is None else _each("W", self.weight, stages)
        halves = zip(table["B"], table["W"], strict=True)
        table["I"] = [b - w for b, w in halves] if self.input is None else _each("I", self.input, stages)
        for kind, costs in table.items():
            if min(costs) < 0:
                why = " (backward - weight)" if kind == "I" and self.input is None else ""
                raise ValueError(f"the cost of {kind}{why} is {min(costs):g}; costs are at least 0")
        if self.transfer < 0 or not any(table["F"] + table["B"]):
            raise ValueError(f"costs must be at least 0 and not all 0, got {self}")
        return {kind: table[kind] for kind in KINDS}


def _each(kind: str, cost: Cost, stages: int) -> list[float]:
    if isinstance(cost, int | float):
        return [float(cost)] * stages
    if len(cost) != stages:
        raise ValueError(f"{len(cost)} costs of {kind} are given for {stages} virtual stages")
    return [float(value) for value in cost]


def check(lists: Lists, num_microbatches: int, *, backward: bool = True) -> None:
    """Refuse lists that are incomplete, out of order or deadlock.

    Raises:
        ValueError: naming the rank, the stage and the action.
    """
    stages = placement(lists)
    for rank, actions in enumerate(lists):
        mine = [stage for stage, at in enumerate(stages) if at == rank]
        _check_rank(f"rank {rank}", actions, mine, num_microbatches, backward=backward)
    simulate(lists)


_AFTER = {("", "F"): "F", ("F", "B"): "FB", ("F", "I"): "FI", ("FI", "W"): "FIW"}
"""(what has run of one micro-batch on one stage, what runs next) -> what has run then."""


def _check_rank(who: str, actions: Sequence[Action], stages: Sequence[int], count: int, *, backward: bool) -> None:
    """Each micro-batch passes each stage once, its F before its B or I, its I before its W."""
    ran: dict[tuple[int, int], str] = {}
    for action in actions:
        kind, i, stage = action.kind, action.microbatch, action.stage
        if kind not in KINDS or not 0 <= i < count or (kind != "F" and not backward):
            kinds = "F, B, I, W" if backward else "F"
            raise ValueError(f"{who} runs {action}; there are micro-batches 0 to {count - 1} and kinds {kinds}")
        before = ran.get((stage, i), "")
        after = _AFTER.get((before, kind))
        if after is None:
            missing = "I" if kind == "W" else "F"
            why = f"before {missing}{i}@{stage}" if missing not in before and "B" not in before else f"after {before}"
            raise ValueError(f"{who} runs {action} {why}; a micro-batch passes a stage as F B or as F I W")
        ran[stage, i] = after
    for stage in stages:
        for i in range(count):
            found = ran.get((stage, i), "")
            if found not in (("FB", "FIW") if backward else ("F",)):
                missing = {"": "F", "F": "B", "FI": "W"}[found]
                raise ValueError(f"{who} never runs {missing}{i}@{stage}; each of {count} micro-batches must pass")


def simulate(lists: Lists, costs: Costs | None = None) -> Gantt:
    """Run the lists with `costs` (default: forward 1, backward 2, of which weight 1, free transfers).

    Raises:
        ValueError: the lists deadlock; the message says what every rank is waiting for.
    """
    run = _Run(lists, costs or Costs())
    run.all()
    return Gantt(lists, run.starts, run.ends)


class _Run:
    """Every rank runs until it needs what is not there, and is woken by who makes it."""

    def __init__(self, lists: Lists, costs: Costs) -> None:
        self.lists, self.place = lists, placement(lists)
        self.cost, self.transfer = costs.table(len(self.place)), costs.transfer
        self.starts: list[list[float]] = [[] for _ in lists]
        self.ends: list[list[float]] = [[] for _ in lists]
        self.made: dict[tuple[bool, int, int], float] = {}
        self.waiting: dict[tuple[bool, int, int], int] = {}

    def all(self) -> None:
        ready = list(range(len(self.lists)))
        while ready:
            self._advance(ready.pop(), ready)
        pairs = enumerate(zip(self.lists, self.ends, strict=True))
        waits = ", ".join(f"rank {rank} at {a[len(ends)]}" for rank, (a, ends) in pairs if len(ends) < len(a))
        if waits:
            raise ValueError(f"the schedule deadlocks: {waits}; each waits for another that never gets there")

    def _advance(self, rank: int, ready: list[int]) -> None:
        actions, ends = self.lists[rank], self.ends[rank]
        for index in range(len(ends), len(actions)):
            action = actions[index]
            stage, i, forward = action.stage, action.microbatch, action.kind == "F"
            at = ends[-1] if ends else 0.0
            source = stage - 1 if forward else stage + 1
            if action.kind != "W" and 0 <= source < len(self.place):
                needs = (forward, source, i)
                if needs not in self.made:
                    self.waiting[needs] = rank
                    return
                at = max(at, self.made[needs] + (self.transfer if self.place[source] != rank else 0.0))
            cost = self.cost[action.kind][stage]
            self.starts[rank].append(at)
            ends.append(at + cost)
            if action.kind != "W":
                self.made[forward, stage, i] = at + cost
                if (forward, stage, i) in self.waiting:
                    ready.append(self.waiting.pop((forward, stage, i)))
