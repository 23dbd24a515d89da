"""Puts the weight halves of backwards where a rank would wait.

It is: the last step of schedules that say only the order of F and I (`v_shape.py`). It is not: a schedule, and its
clock is no cost model: F, I and W all count as one tick, as in the papers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from parallax.plugins.pipeline.actions import Action


def fill_weights(orders: Sequence[Sequence[Action]], limit: int) -> list[list[Action]]:
    """Each rank's F and I in their order, with a W whenever the next one cannot run yet.

    Args:
        orders: one for each rank, of F and I.
        limit: activations a rank may hold at once, unless its order alone needs more: an F that would exceed it waits
            for a W. Unit: one micro-batch's of one stage.
    """
    stages = sum(len({action.stage for action in order}) for order in orders)
    limits = [max(limit, _needed(order)) for order in orders]
    lists: list[list[Action]] = [[] for _ in orders]
    at, held = [0] * len(orders), [0] * len(orders)
    owed: list[deque[Action]] = [deque() for _ in orders]
    made: set[Action] = set()
    total = sum(len(order) + sum(action.kind == "I" for action in order) for order in orders)
    while total:
        tick: list[Action] = []
        for rank, order in enumerate(orders):
            action = order[at[rank]] if at[rank] < len(order) else None
            full = action is not None and action.kind == "F" and held[rank] >= limits[rank]
            if action is not None and not full and _ready(action, made, stages):
                at[rank] += 1
            elif owed[rank]:
                action = owed[rank].popleft()
            else:
                continue
            lists[rank].append(action)
            tick.append(action)
            held[rank] += {"F": 1, "I": 0, "W": -1}[action.kind]
            if action.kind == "I":
                owed[rank].append(Action("W", action.microbatch, action.stage))
        made.update(tick)
        total -= len(tick)
    return lists


def _needed(order: Sequence[Action]) -> int:
    """The most activations in flight if every W ran right after its I."""
    now = peak = 0
    for action in order:
        now += 1 if action.kind == "F" else -1
        peak = max(peak, now)
    return peak


def _ready(action: Action, made: set[Action], stages: int) -> bool:
    source = action.stage - 1 if action.kind == "F" else action.stage + 1
    return not 0 <= source < stages or Action(action.kind, action.microbatch, source) in made
