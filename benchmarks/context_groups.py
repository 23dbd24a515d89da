"""Groups for the floor and the wire of `context_worker.py`, and the clocks that both are read by.

It is: a group whose calls send nothing, and one that keeps its messages to send them again. It is not: attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from parallax.strategies.comm import AxisComm, named_work
from parallax.strategies.comm import Work as InFlight

CLOCKS = {"seconds": time.perf_counter, "cpu": time.thread_time, "work": time.process_time}
"""The wall's; processor seconds of the computing thread; those of the process, and so of its transfers."""


class Silent(AxisComm):
    """A group whose calls send nothing; what they fill is copied from what they would send, since kernels take longer
    for what memory happens to hold (no numbers, or tiny ones). `spent`: what that took, by clock."""

    spent: dict[str, float]

    def _fill(self, out: Tensor, tensor: Tensor) -> None:
        start = now()
        out.view(-1).copy_(tensor.view(-1))
        for name, took in since(start).items():
            self.spent[name] += took

    def shift(self, send: Tensor, recv: Tensor, distance: int = 1, tag: int = 0) -> InFlight:
        self._fill(recv, send)
        return named_work(_Done(), self, "shift")

    def all_to_all_into(self, out: Tensor, tensor: Tensor, *_: Any, **__: Any) -> InFlight:
        self._fill(out, tensor)
        return named_work(_Done(), self, "all_to_all")


class Recorded(AxisComm):
    """A group that keeps the messages of its calls, to send them again."""

    messages: list[Callable[[], InFlight]]

    def shift(self, *how: Any, **options: Any) -> InFlight:
        self.messages.append(lambda: super(Recorded, self).shift(*how, **options))
        return self.messages[-1]()

    def all_to_all_into(self, out: Tensor, tensor: Tensor, *_: Any, **__: Any) -> InFlight:
        self.messages.append(lambda: super(Recorded, self).all_to_all_into(out, tensor, async_op=True))
        work = self.messages[-1]()
        work.wait()
        return work


def now() -> dict[str, float]:
    """What every clock says."""
    return {name: clock() for name, clock in CLOCKS.items()}


def since(start: dict[str, float]) -> dict[str, float]:
    """What has passed by every clock."""
    return {name: at - start[name] for name, at in now().items()}


class _Done:
    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True
