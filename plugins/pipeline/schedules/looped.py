"""Several stages per rank, stage s on rank s mod p: interleaved 1F1B and breadth-first.

It is: pure functions that list actions. It is not: schedules whose stages turn around (`v_shape.py`, `dualpipe.py`).
"""

from __future__ import annotations

from itertools import chain

from parallax.plugins.pipeline.actions import Action
from parallax.plugins.pipeline.catalog import stages_per_rank as stages


@stages(default=2, least=2)
def interleaved_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    """1F1B on v stages per rank (Narayanan et al. 2021, section 2.2.2), for any number of micro-batches.

    Micro-batches go through a rank's stages in rounds. The paper has rounds of p and so needs multiples of p; here m
    micro-batches make m // p rounds of p or more, as even as they can be, which keeps the bubble.

    Bubble: (p - 1) (f + b) idle time, with f and b those of one of the v stages: (p - 1) / (v m) of the ideal time,
    for m >= p. Activations in flight on rank r: 2 (p - r - 1) + (v - 1) g + 1 stages', g the largest round (p when p
    divides m), and never more than v m.
    """
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    rounds = _rounds(p, m)
    lists = []
    for rank in range(p):
        forwards = [Action("F", i, c * p + rank) for part in rounds for c in range(v) for i in part]
        backwards = [Action("B", i, c * p + rank) for part in rounds for c in reversed(range(v)) for i in part]
        warmup = min(2 * (p - rank - 1) + (v - 1) * len(rounds[0]), m * v)
        pairs = zip(forwards[warmup:], backwards, strict=False)
        lists.append([*forwards[:warmup], *chain.from_iterable(pairs), *backwards[m * v - warmup :]])
    return lists


def _rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """Micro-batches in m // p consecutive rounds (one when m < p), the first ones larger by one where it must be."""
    count = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(lo, hi) for lo, hi in zip(starts, starts[1:], strict=False)]


@stages(default=2)
def looped_bfs(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    """Breadth first: all micro-batches through a rank's first stage, then its second, ...; backwards reversed
    (Lamy-Poirier 2023, Breadth-First Pipeline Parallelism, section 3).

    Bubble as interleaved 1F1B's; activations in flight v m on every rank. A stage's weights are in use for one stretch
    of forwards and one of backwards, so gathering and reducing them happens once.
    """
    p, order = num_ranks, range(num_microbatches)
    lists = []
    for rank in range(p):
        mine = range(rank, p * stages_per_rank, p)
        forwards = [Action("F", i, stage) for stage in mine for i in order]
        lists.append([*forwards, *(Action("B", a.microbatch, a.stage) for a in reversed(forwards))])
    return lists
