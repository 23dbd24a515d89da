"""When each action of each rank ran: the same for a simulated and for a real step.

It is: lists with start and end times, and the numbers read off them. It is not: what made the times (`simulator.py`,
`trace.py`) or a picture of them (`picture_text.py`, `picture_svg.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parallax.plugins.pipeline.actions import Action, Lists, placement


@dataclass(frozen=True)
class Gantt:
    """Actions and their times, in any one unit and from any one zero.

    Attributes:
        lists: per rank, its actions in the order they ran.
        starts, ends: per rank, the times of each action.
    """

    lists: Lists
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]

    def ranks(self) -> list[list[tuple[Action, float, float]]]:
        """Per rank, (action, start, end) of each action."""
        return [list(zip(*rank, strict=True)) for rank in zip(self.lists, self.starts, self.ends, strict=True)]

    @cached_property
    def begin(self) -> float:
        """The first start of all."""
        return min(starts[0] for starts in self.starts)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        return max(ends[-1] for ends in self.ends) - self.begin

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the time its actions took."""
        return tuple(sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def ideal(self) -> float:
        """The mean of `busy`: the makespan if no rank ever waited and all had equal work."""
        return sum(self.busy) / len(self.busy)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time: (makespan - ideal) / makespan."""
        return 1 - self.ideal / self.makespan

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time over the ideal time, as many papers have it: (makespan - ideal) / ideal."""
        return self.makespan / self.ideal - 1

    @property
    def span(self) -> float:
        """The longest any one rank takes, from its own first start to its own last end.

        What a step costs where ranks need not start together (Qi et al. 2023, section 2.3).
        """
        return max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True))

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Rank of each virtual stage."""
        return placement(self.lists)

    @cached_property
    def microbatches(self) -> int:
        """How many micro-batches run."""
        return 1 + max(action.microbatch for actions in self.lists for action in actions)

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the most activations it holds at once.

        Unit: one micro-batch's activations of one virtual stage, held from the start of its F to the end of its B or W.
        """
        return tuple(map(_peak_in_flight, self.lists))

    @property
    def peak_of_1f1b(self) -> float:
        """The largest peak as a share of what 1F1B holds, min(p, m) micro-batches of a whole rank's layers."""
        ranks, stages = len(self.lists), len(self.placement)
        return max(self.peak_in_flight) * ranks / stages / min(ranks, self.microbatches)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Per virtual stage, which of its rank's stages it is, in model order from 0."""
        return tuple(self.placement[:stage].count(rank) for stage, rank in enumerate(self.placement))


def _peak_in_flight(actions: Sequence[Action]) -> int:
    now = peak = 0
    for action in actions:
        now += {"F": 1, "I": 0}.get(action.kind, -1)
        peak = max(peak, now)
    return peak
