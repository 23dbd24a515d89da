"""Pipeline schedules as data: what each stage does, in which order.

It is: `Action`, and one small pure function per schedule, found by entry point `parallax.schedules`.
It is not: the executor that runs a list (`executor.py`) or the checks on it (`simulator.py`).

A schedule is a function `(num_stages, num_microbatches) -> list of action lists`, one list per stage, in
the order that stage runs them. Transfers are implied: the forward of a micro-batch on stage s needs the
forward on s-1, its backward needs the backward on s+1; each stage must order its forwards (and its
backwards) as its neighbours do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B"]


@dataclass(frozen=True)
class Action:
    """One unit of work of one stage.

    Attributes:
        kind: "F" forward, "B" backward.
        microbatch: index of the micro-batch, from 0.
    """

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Schedule = Callable[[int, int], list[list[Action]]]


def gpipe(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards (Huang et al. 2019, GPipe, section 2.3).

    Bubble: (p - 1) / (m + p - 1) of the time. Activations in flight: m on every stage.
    """
    order = range(num_microbatches)
    one = [Action("F", i) for i in order] + [Action("B", i) for i in order]
    return [list(one) for _ in range(num_stages)]


def one_f_one_b(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Warm up, then alternate one forward and one backward (Narayanan et al. 2021, section 2.2.1).

    Bubble as GPipe's; activations in flight on stage s: min(p - s, m).
    """
    return [_one_f_one_b_stage(stage, num_stages, num_microbatches) for stage in range(num_stages)]


def _one_f_one_b_stage(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    warmup = min(num_stages - stage - 1, num_microbatches)
    actions = [Action("F", i) for i in range(warmup)]
    for i in range(num_microbatches - warmup):
        actions += [Action("F", warmup + i), Action("B", i)]
    actions += [Action("B", i) for i in range(num_microbatches - warmup, num_microbatches)]
    return actions


def forward_only(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Evaluation: every micro-batch forward, in order."""
    return [[Action("F", i) for i in range(num_microbatches)] for _ in range(num_stages)]
