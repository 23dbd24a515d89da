"""Valid schedules in random order: each rank works on whatever is ready, so neighbours rarely agree on an order.

It is: a source of action lists for the executor's tests that no one has tuned. It is not: any schedule of a paper.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from parallax.plugins.pipeline.actions import Action


def random_lists(placement: Sequence[int], num_microbatches: int, seed: int, halves: float) -> list[list[Action]]:
    """One list per rank. `halves`: share of the backwards that run as I and W."""
    rng = random.Random(seed)
    last = len(placement) - 1
    done: set[Action] = set()
    lists: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    split = {(s, i) for s in range(last + 1) for i in range(num_microbatches) if rng.random() < halves}

    def finished(kind: str, i: int, stage: int) -> bool:
        kinds = ("B", "I") if kind == "B" else (kind,)
        return any(Action(k, i, stage) in done for k in kinds)  # type: ignore[arg-type]

    def ready(action: Action) -> bool:
        i, s = action.microbatch, action.stage
        if action in done:
            return False
        if action.kind == "F":
            return s == 0 or finished("F", i, s - 1)
        if action.kind == "W":
            return finished("I", i, s)
        return finished("F", i, s) and (s == last or finished("B", i, s + 1))

    todo = [Action("F", i, s) for s in range(last + 1) for i in range(num_microbatches)]
    for s in range(last + 1):
        for i in range(num_microbatches):
            kinds = ("I", "W") if (s, i) in split else ("B",)
            todo += [Action(kind, i, s) for kind in kinds]  # type: ignore[arg-type]
    while todo:
        action = rng.choice([a for a in todo if ready(a)])
        lists[placement[action.stage]].append(action)
        done.add(action)
        todo.remove(action)
    return lists


def loop_in_disorder(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """A schedule: stages go round the ranks."""
    placed = [s % num_ranks for s in range(num_ranks * stages_per_rank)]
    return random_lists(placed, num_microbatches, seed=7, halves=0.0)


def loop_in_halves(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """The same, with every backward in halves."""
    placed = [s % num_ranks for s in range(num_ranks * stages_per_rank)]
    return random_lists(placed, num_microbatches, seed=8, halves=1.0)


def turned_in_disorder(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """A schedule: stages go down the ranks and up again, and so on; some backwards run in halves."""
    down = list(range(num_ranks))
    placed = [rank for turn in range(stages_per_rank) for rank in (down if turn % 2 == 0 else down[::-1])]
    return random_lists(placed, num_microbatches, seed=9, halves=0.5)
