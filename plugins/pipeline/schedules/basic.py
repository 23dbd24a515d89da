"""One stage per rank, whole backwards: GPipe and 1F1B; and the order of an evaluation.

It is: pure functions that list actions. It is not: schedules of several stages per rank (`looped.py`) or with backwards
in two halves (`zero_bubble.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from parallax.plugins.pipeline.actions import Action
from parallax.plugins.pipeline.catalog import stages_per_rank as stages


@stages(default=1, most=1)
def gpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """All forwards, then all backwards (Huang et al. 2019, GPipe, section 2.3).

    Bubble: (p - 1) / (m + p - 1) of the time. Activations in flight: m on every rank.
    """
    order = range(num_microbatches)
    return [
        [Action("F", i, rank) for i in order] + [Action("B", i, rank) for i in order] for rank in range(num_ranks)
    ]


@stages(default=1, most=1)
def one_f_one_b(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """Warm up, then alternate one forward and one backward (Narayanan et al. 2021, section 2.2.1).

    Bubble as GPipe's; activations in flight on rank r: min(p - r, m).
    """
    return [_one_f_one_b_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


def _one_f_one_b_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    warmup = min(num_ranks - rank - 1, num_microbatches)
    actions = [Action("F", i, rank) for i in range(warmup)]
    for i in range(num_microbatches - warmup):
        actions += [Action("F", warmup + i, rank), Action("B", i, rank)]
    actions += [Action("B", i, rank) for i in range(num_microbatches - warmup, num_microbatches)]
    return actions


def forward_only(placement: Sequence[int], num_microbatches: int) -> list[list[Action]]:
    """The order of an evaluation on stages placed as `placement` says, see `actions.placement`.

    Micro-batches go in rounds of p, each round through a rank's first stage, then its second, and so on: p of them keep
    p ranks busy, and no stage waits for one that comes later in its own list.
    """
    ranks = max(placement) + 1
    held = [[stage for stage, rank in enumerate(placement) if rank == mine] for mine in range(ranks)]
    rounds = [range(lo, min(lo + ranks, num_microbatches)) for lo in range(0, num_microbatches, ranks)]
    return [[Action("F", i, stage) for part in rounds for stage in mine for i in part] for mine in held]
