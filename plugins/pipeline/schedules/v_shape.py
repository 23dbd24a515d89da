"""Two stages per rank, the second on the way back (s and 2p - 1 - s on one rank): ZB-V, V-Half and V-Min.

It is: pure functions that list actions, backwards in halves. It is not: DualPipeV, which pairs a forward with a
backward (`dualpipe.py`).

The last stage is on the rank of the first, so a rank's two activations balance: one held long, one short. Memory is in
activations of one stage, half a rank's, so 1F1B's peak is 2p; times are in the cost of one F = I = W.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from parallax.plugins.pipeline.actions import Action, Kind
from parallax.plugins.pipeline.catalog import stages_per_rank as stages
from parallax.plugins.pipeline.schedules.fill import fill_weights


@stages(default=2, least=2, most=2)
def zb_v(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    """No bubble when f = i = w, in 1F1B's memory (Qi et al. 2023, section 6).

    Bubble: none for m >= 2p, from a rank's own first action to its own last. Activations in flight: 2p at most.
    """
    orders = [_zb_v_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return fill_weights(orders, limit=2 * num_ranks)


def _zb_v_rank(rank: int, num_ranks: int, count: int) -> list[Action]:
    """Warm up until both stages have work, then F and I of one stage and of the other in turn."""
    down, up = rank, 2 * num_ranks - 1 - rank
    pattern: list[tuple[Kind, int]] = [("F", down)] * (2 * (num_ranks - rank) - 1)
    pattern += [("F", up), ("F", down)] * rank
    pattern += [("F", up), ("I", up)] * (num_ranks - rank)
    pattern += [("F", down), ("I", down), ("F", up), ("I", up)] * (count + num_ranks)
    left = {key: iter(range(count)) for key in pattern}
    return [Action(kind, i, stage) for kind, stage in pattern if (i := next(left[kind, stage], None)) is not None]


@stages(default=2, least=2, most=2)
def v_half(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    """Half of 1F1B's memory and of its bubble (Qi et al. 2024, Pipeline Parallelism with Controllable Memory, sec. 3).

    Bubble: 3p - 4 (p odd) or 3p - 5 (p even), where 1F1B has 6 (p - 1); activations in flight: 2 floor((p + 2) / 2).
    """
    turns = (1, 2, 1) if num_ranks % 2 else (4, 2, 4)
    return _repeat(num_ranks, num_microbatches, (2, 1, 2, 1), turns, limit=2 * ((num_ranks + 2) // 2))


@stages(default=2, least=2, most=2)
def v_min(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    """A third of 1F1B's memory, two thirds of its bubble (Qi et al. 2024, section 3).

    Bubble: 4p - 5, where 1F1B has 6 (p - 1); activations in flight: 2 floor((p + 4) / 3). Costs that differ between
    stages or kinds make it longer than that: a micro-batch leaves a rank as soon as it can.
    """
    turns = (1, 1, 1) if num_ranks % 3 else (3, 1, 3)
    return _repeat(num_ranks, num_microbatches, (1, 1, 1, 1), turns, limit=2 * ((num_ranks + 4) // 3))


def _repeat(
    num_ranks: int, num_microbatches: int, steps: Sequence[int], turns: Sequence[int], limit: int
) -> list[list[Action]]:
    """One micro-batch's passes at fixed times, repeated every 6 ticks, then squeezed together.

    Args:
        steps: ticks from one rank to the next on the way down (F), up (F), down (I) and up (I). Their sum sets how long
            activations live, and so the memory.
        turns: ticks at the three turning points. They are such that no two passes of a rank meet in one tick modulo 6.
        limit: as in `fill_weights`.
    """
    down, up = list(range(num_ranks)), list(range(num_ranks, 2 * num_ranks))
    legs: list[tuple[Kind, list[int]]] = [("F", down), ("F", up), ("I", up[::-1]), ("I", down[::-1])]
    passes = [(kind, stage) for kind, leg in legs for stage in leg]
    gaps = [gap for step, turn in zip(steps, (*turns, 0), strict=True) for gap in [step] * (num_ranks - 1) + [turn]]
    times = dict(zip(passes, accumulate(gaps, initial=0), strict=False))
    orders = []
    for rank in range(num_ranks):
        mine = [(at, kind, stage) for (kind, stage), at in times.items() if stage in (rank, 2 * num_ranks - 1 - rank)]
        timed = [(at + 6 * i, Action(kind, i, stage)) for at, kind, stage in mine for i in range(num_microbatches)]
        orders.append([action for _, action in sorted(timed, key=lambda pair: pair[0])])
    return fill_weights(orders, limit)
