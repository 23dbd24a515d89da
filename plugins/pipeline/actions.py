"""What a pipeline rank does, as data: one `Action` per unit of work, one list of them per rank.

It is: the action and what can be read off a set of lists. It is not: a schedule (`schedules/`), the search for one
by name (`catalog.py`), or the check of a list (`simulator.py`).

The model is cut into *virtual stages* 0..S-1 in model order; each lives on one rank, a rank may hold several. A list is
the order in which its rank works. Transfers are implied and never listed: F of stage s needs F of s-1, B (or I) of s
needs B (or I) of s+1, of the same micro-batch; what goes from one rank to another is matched by stage and micro-batch,
so that neighbours need not agree on an order. Neighbouring stages of one rank exchange nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work of one rank.

    Attributes:
        kind: "F" forward, "B" whole backward, or its halves: "I" gradients of the inputs, then, any time later, "W"
            gradients of the weights (Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2).
        microbatch: index of the micro-batch, from 0.
        stage: index of the virtual stage, from 0, in model order.
    """

    kind: Kind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


Lists = Sequence[Sequence[Action]]
"""One list of actions for each rank, in the order the rank runs them."""


def placement(lists: Lists) -> tuple[int, ...]:
    """Rank of each virtual stage, read off the lists: s % p where stages loop, min(s, 2p - 1 - s) where they turn (V).

    Raises:
        ValueError: a stage sits on two ranks, on none, or a rank has no stage.
    """
    ranks: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        if not actions:
            raise ValueError(f"rank {rank} of the schedule has nothing to do; every rank needs a stage")
        for stage in {action.stage for action in actions}:
            if ranks.setdefault(stage, rank) != rank:
                raise ValueError(
                    f"virtual stage {stage} is on rank {ranks[stage]} and on rank {rank} of the schedule; a stage's "
                    f"weights live on one rank"
                )
    count = max(ranks) + 1
    absent = [stage for stage in range(count) if stage not in ranks]
    if absent or min(ranks) < 0:
        raise ValueError(f"the schedule runs stages {sorted(ranks)}; they must be 0 to n - 1, every one of them")
    return tuple(ranks[stage] for stage in range(count))


def splits_backward(lists: Lists) -> bool:
    """Whether some backward runs in two halves, "I" and "W"."""
    return any(action.kind in "IW" for actions in lists for action in actions)
