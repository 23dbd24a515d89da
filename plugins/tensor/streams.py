"""Random numbers on the tensor axis: different where ranks hold different things, the same where they hold copies.

It is: the switch between two streams of the default generators, and back. It is not: a generator of its own: dropout
in unchanged code draws from the default one.

Ranks of one tensor group share the state of their generators (`strategies/assemble.py` seeds them so), which is right
for replicated activations. Where a rank works on its own heads, columns or tokens, the masks must differ. On entering
such a part one number is drawn from the shared stream and, mixed with the rank's index, seeds the generators; on
leaving, the shared stream goes on. So the local numbers are a function of the shared state at the entry alone: a part
that is recomputed under `torch.utils.checkpoint`, which restores that state, draws the same ones, and no state of ours
needs to be saved. A part that draws nothing leaves the shared stream as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallax.plugins.tensor.swap import swap

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads small indices over all bits


class Streams:
    """The shared and the local stream of one rank.

    Args:
        index: the rank's place on the tensor axis.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._saved: list[tuple[torch.Generator, Tensor, Tensor, Tensor]] = []  # before, after the draw, as seeded

    def __deepcopy__(self, memo: dict[int, Any]) -> Streams:
        return self  # the generators are one for the whole process

    @property
    def is_local(self) -> bool:
        return bool(self._saved)

    def enter(self) -> None:
        """Go on with this rank's own numbers. Nothing happens when they are drawn already."""
        if self._saved:
            return
        generators = _generators()
        before = [g.get_state() for g in generators]
        drawn = int(torch.randint(1 << 62, ()))  # on the CPU: no device is waited for
        after = [g.get_state() for g in generators]
        seed = (drawn + (self._index + 1) * _GOLDEN) % (1 << 63)
        for generator in generators:
            generator.manual_seed(seed)
        seeded = [g.get_state() for g in generators]
        self._saved = list(zip(generators, before, after, seeded, strict=True))

    def leave(self) -> None:
        """Go on with the numbers all ranks of the axis share. Nothing happens when they are drawn already."""
        saved, self._saved = self._saved, []
        used = any(not torch.equal(generator.get_state(), seeded) for generator, _, _, seeded in saved)
        for generator, before, after, _ in saved:
            generator.set_state(after if used else before)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Own numbers inside, also within a part that shares them."""
        was_local = self.is_local
        self.enter()
        try:
            yield
        finally:
            if not was_local:
                self.leave()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Shared numbers inside, and at the end whatever was drawn before."""
        was_local = self.is_local
        self.leave()
        try:
            yield
        finally:
            self.leave()
            if was_local:
                self.enter()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around a module that enters and leaves by itself: whatever happens inside, it ends as it began."""
        was_local = self.is_local
        try:
            yield
        finally:
            if not was_local:
                self.leave()


def guard(module: nn.Module, streams: Streams) -> None:
    """Let `module`, which holds column and row layers, end with the numbers it began with, also when it fails."""
    cls: Any = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with streams.whole():
            return cls.forward(self, *args, **kwargs)

    swap(module, forward=forward)


def _generators() -> list[torch.Generator]:
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found
