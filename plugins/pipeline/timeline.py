"""When each action of this rank ran: the record behind the picture of a real step.

It is: start and end of every action, by the host's clock or, on a GPU, by events in the order of its work. It is not:
the picture, and it costs nothing where no `Timeline` is given to the executor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from parallax.plugins.pipeline.actions import Action
from parallax.strategies.comm import AxisComm


class Timeline:
    """Starts and ends of actions; the wait for what an action needs comes before its start.

    Args:
        device: where the actions compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Action, Any, Any]] = []
        self.clear()

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        start = self._mark()
        try:
            yield
        finally:
            self._spans.append((action, start, self._mark()))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def clear(self) -> None:
        """Start anew."""
        self._spans.clear()
        if self._cuda:
            torch.cuda.synchronize()  # now the host's clock says when the event was
            self._zero = time.time(), self._mark()

    def spans(self) -> list[tuple[Action, float, float]]:
        """(action, start, end) in the order they ran, in seconds since the epoch: processes of one machine compare."""
        if not self._cuda:
            return list(self._spans)
        torch.cuda.synchronize()
        base, zero = self._zero
        return [
            (action, base + zero.elapsed_time(start) / 1e3, base + zero.elapsed_time(end) / 1e3)
            for action, start, end in self._spans
        ]


Times = tuple[tuple[float, ...], ...]


def gather(timeline: Timeline, comm: AxisComm) -> tuple[list[list[Action]], Times, Times]:
    """Of all ranks of `comm`, the pipeline axis: lists, starts and ends as `simulator.Simulation` has them. Collective.

    Times are in seconds since the first start of any rank.
    """
    everyone = comm.gather_objects(timeline.spans())
    zero = min(start for spans in everyone for _, start, _ in spans)
    lists = [[action for action, _, _ in spans] for spans in everyone]
    starts = tuple(tuple(start - zero for _, start, _ in spans) for spans in everyone)
    return lists, starts, tuple(tuple(end - zero for _, _, end in spans) for spans in everyone)
