"""One stage per rank, backwards in two halves: ZB-H1 and ZB-H2.

It is: pure functions that list actions (Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.1). It is not:
their relatives with two stages per rank (`v_shape.py`).

The gradient of the inputs (I) is all the previous stage waits for; that of the weights (W) waits for nobody and fills
what would be bubble. Bubbles below are the longest time of any one rank less its work, with f, i, w the costs.
"""

from __future__ import annotations

from parallax.plugins.pipeline.actions import Action
from parallax.plugins.pipeline.catalog import stages_per_rank as stages


@stages(default=1, most=1)
def zb_h1(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """1F1B's memory, a third of its bubble when f = i = w.

    Bubble: (p - 1) (f + i - w) for m >= p; activations in flight: min(p, m) on every rank.
    """
    return _lists(num_ranks, num_microbatches, ahead=1)


@stages(default=1, most=1)
def zb_h2(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """No bubble when f = i = w, for twice 1F1B's memory.

    Bubble: (p - 1) (f + i - 2 w), not below 0, for m >= 2 p - 1; it counts a rank's time from its own first action to
    its own last, so ranks must not be made to start together. Activations in flight: min(2 p - 1, m) on every rank.
    """
    return _lists(num_ranks, num_microbatches, ahead=2)


def _lists(num_ranks: int, num_microbatches: int, ahead: int) -> list[list[Action]]:
    """Rank r runs `ahead` forwards more per rank behind it than it must, and owes `ahead` W per rank before it."""
    return [
        _rank(rank, num_microbatches, warmup=ahead * (num_ranks - rank - 1), owed=ahead * rank)
        for rank in range(num_ranks)
    ]


def _rank(rank: int, count: int, warmup: int, owed: int) -> list[Action]:
    """`warmup` F, then F and I in turn, W trailing I by `owed` micro-batches."""
    actions = [Action("F", i, rank) for i in range(min(warmup, count))]
    for i in range(count):
        if warmup + i < count:
            actions.append(Action("F", warmup + i, rank))
        actions.append(Action("I", i, rank))
        if i >= owed:
            actions.append(Action("W", i - owed, rank))
    return actions + [Action("W", i, rank) for i in range(max(count - owed, 0), count)]
