"""DualPipeV: two stages per rank in a V, a forward of one next to a backward of the other.

It is: a pure function that lists actions. It is not: the overlap itself: a forward and the backward after it in the
list belong to different micro-batches and stages, and what runs them may run them at once.

DualPipe (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.1) feeds micro-batches from both ends and keeps two copies of every
stage; cut in half, each copy meets only its own half and one is enough (Qi et al. 2025, "Cut-in-half").
"""

from __future__ import annotations

from collections.abc import Iterator

from parallax.plugins.pipeline.actions import Action, Kind
from parallax.plugins.pipeline.catalog import stages_per_rank as stages


@stages(default=2, least=2, most=2)
def dualpipe_v(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    """Few bubbles, and most forwards have a backward to overlap with.

    Activations in flight: 2p + 1 stages' at most. The pattern needs 2p micro-batches; fewer run in the order they would
    have among 2p.
    """
    count = max(num_microbatches, 2 * num_ranks)
    lists = [list(_rank(rank, num_ranks, count)) for rank in range(num_ranks)]
    return [[action for action in actions if action.microbatch < num_microbatches] for actions in lists]


def _rank(rank: int, num_ranks: int, count: int) -> Iterator[Action]:
    """`count` micro-batches on `rank`, whose stages are the one on the way down (0) and the one on the way up (1)."""
    behind = num_ranks - rank - 1
    line = _Line(rank, 2 * num_ranks - 1 - rank)
    for _ in range(2 * behind):
        yield line.forward(0)
    for _ in range(rank + 1):
        yield from (line.forward(0), line.forward(1))
    for _ in range(behind):
        yield from (line.inputs(1), line.weights(), line.forward(1))
    for _ in range(count - 2 * num_ranks + rank + 1):
        yield from (line.forward(0), line.backward(1), line.forward(1), line.backward(0))
    for _ in range(behind):
        yield from (line.backward(1), line.forward(1), line.backward(0))
    # The second half of the last rank + 1 rounds, counted in backwards, leaves its weight halves for the end.
    for i in range(2 * (rank + 1)):
        side = 1 - i % 2
        yield line.inputs(side) if i >= rank + 1 else line.backward(side)
    for _ in range(behind):
        yield from (line.weights(), line.inputs(0))
    for _ in range(rank + 1):
        yield line.weights()


class _Line:
    """The next micro-batch of every kind on a rank's two stages."""

    def __init__(self, *stages: int) -> None:
        self._stages = stages
        self._next = {("F", 0): 0, ("F", 1): 0, ("B", 0): 0, ("B", 1): 0}
        self._owed: list[Action] = []

    def forward(self, side: int) -> Action:
        return self._take("F", "F", side)

    def backward(self, side: int) -> Action:
        return self._take("B", "B", side)

    def inputs(self, side: int) -> Action:
        action = self._take("B", "I", side)
        self._owed.append(Action("W", action.microbatch, action.stage))
        return action

    def weights(self) -> Action:
        return self._owed.pop(0)

    def _take(self, counter: str, kind: Kind, side: int) -> Action:
        i = self._next[counter, side]
        self._next[counter, side] += 1
        return Action(kind, i, self._stages[side])
