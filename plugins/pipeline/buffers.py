"""Memory of messages, used again when nobody refers to it any more.

It is: receive buffers by shape and dtype, and how many refer to a tensor's memory. It is not: messages (`transfer.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Shape = tuple[tuple[int, ...], torch.dtype]


def holders(tensor: Tensor) -> int:
    """Number of references to a tensor's memory: tensors that share it, and whatever holds such tensors in C++."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


ALONE = holders(torch.empty(1))
"""What `holders` is for a tensor whose memory nothing else refers to."""


class Buffers:
    """Receive buffers by shape and dtype; a buffer comes back when its micro-batch is done with it.

    Attributes:
        made: how many have been made.
    """

    def __init__(self, device: torch.device) -> None:
        self.made = 0
        self._device = device
        self._free: dict[Shape, list[Tensor]] = {}
        self._used: set[Shape] = set()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer with any content; who gives it on gives aliases of it (`detach`), never the buffer itself."""
        self._used.add((shape, dtype))
        if free := self._free.get((shape, dtype)):
            return free.pop()
        self.made += 1
        return torch.empty(shape, dtype=dtype, device=self._device)

    def give(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Take back the buffers nobody else refers to any more; returns the others.

        Much may refer to what was received: a stage passes it on, autograd makes a gradient of it, a weight's gradient
        that is postponed needs it, the user or a hook keeps it. All of these hold aliases, which share its memory.
        """
        used = []
        for tensor in tensors:
            if holders(tensor) > ALONE:
                used.append(tensor)
            else:
                self._free.setdefault((tuple(tensor.shape), tensor.dtype), []).append(tensor)
        return used

    def trim(self) -> None:
        """Let go of buffers of shapes not taken since the last call, so that many different shapes do not pile up."""
        self._free = {shape: free for shape, free in self._free.items() if shape in self._used}
        self._used.clear()
