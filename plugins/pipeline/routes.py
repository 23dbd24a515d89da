"""What travels between ranks for a set of action lists, and when its receiver asks for it.

It is: pure arithmetic on lists: `Message`, and the `Route` of one rank. It is not: communication (`transfer.py`).

Why an order at all, when messages are matched by stage and micro-batch? On NCCL the sends and receives between two
ranks are carried out one after the other in the order they were issued, whatever their tags. So every receive from a
rank is posted in the order in which *that rank* sends, which the receiver reads off the sender's list. Nobody waits in
vain for that: what is posted before a message the receiver needs now was sent before it. Gloo matches by tag and
would not need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from parallax.plugins.pipeline.actions import Action, Lists


@dataclass(frozen=True, slots=True)
class Message:
    """What a virtual stage hands to a neighbour for one micro-batch.

    Attributes:
        kind: "F" the activation that leaves `stage`, "B" the gradient of its input.
        stage: the virtual stage it leaves.
        microbatch: index of the micro-batch.
        source, target: ranks; equal when both stages live on one rank, and then nothing travels.
    """

    kind: Literal["F", "B"]
    stage: int
    microbatch: int
    source: int
    target: int

    @property
    def edge(self) -> int:
        """Number of the boundary it crosses: edge s lies between the stages s and s + 1."""
        return self.stage if self.kind == "F" else self.stage - 1


def incoming(action: Action, placement: Sequence[int]) -> Message | None:
    """What `action` needs of a neighbouring stage."""
    stage = action.stage
    if action.kind == "F" and stage > 0:
        return Message("F", stage - 1, action.microbatch, placement[stage - 1], placement[stage])
    if action.kind in "BI" and stage + 1 < len(placement):
        return Message("B", stage + 1, action.microbatch, placement[stage + 1], placement[stage])
    return None


def outgoing(action: Action, placement: Sequence[int]) -> Message | None:
    """What `action` gives to a neighbouring stage."""
    stage = action.stage
    if action.kind == "F" and stage + 1 < len(placement):
        return Message("F", stage, action.microbatch, placement[stage], placement[stage + 1])
    if action.kind in "BI" and stage > 0:
        return Message("B", stage, action.microbatch, placement[stage], placement[stage - 1])
    return None


@dataclass(frozen=True)
class Step:
    """One action of a rank, with what it needs and gives."""

    action: Action
    needs: Message | None
    gives: Message | None
    halves: bool
    """Whether the backward of this action's stage and micro-batch runs in two halves."""


@dataclass(frozen=True)
class Route:
    """One rank's way through a schedule.

    Attributes:
        steps: its actions, in order.
        receives: every message from another rank, in the order to post them.
        due: per action, how many of `receives` must be posted before it starts.
        placement: rank of each virtual stage.
    """

    steps: tuple[Step, ...]
    receives: tuple[Message, ...]
    due: tuple[int, ...]
    placement: tuple[int, ...]


def route(lists: Lists, placement: Sequence[int], rank: int) -> Route:
    """The route of `rank`; `lists` are free of deadlock (`simulator.check`)."""
    halved = {(a.stage, a.microbatch) for a in lists[rank] if a.kind == "I"}
    steps = tuple(
        Step(a, incoming(a, placement), outgoing(a, placement), (a.stage, a.microbatch) in halved) for a in lists[rank]
    )
    senders = {source: _sent(lists[source], placement, rank) for source in range(len(lists)) if source != rank}
    posted: set[Message] = set()
    receives: list[Message] = []
    counts = []
    for step in steps:
        before = len(receives)
        needed = step.needs
        while needed is not None and needed.source != rank and needed not in posted:
            receives.append(next(senders[needed.source]))
            posted.add(receives[-1])
        counts.append(len(receives) - before)
    return Route(steps, tuple(receives), tuple(accumulate(counts)), tuple(placement))


def _sent(actions: Sequence[Action], placement: Sequence[int], target: int) -> Iterator[Message]:
    """What these actions send to rank `target`, in order."""
    for action in actions:
        message = outgoing(action, placement)
        if message is not None and message.target == target:
            yield message
