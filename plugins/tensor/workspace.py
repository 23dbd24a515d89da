"""Buffers that collectives read or fill for a moment, kept from one layer to the next.

It is: memory by purpose, as large as the largest request so far. It is not: for anything that outlives the autograd
node that took it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor


class Workspace:
    """One buffer for each purpose, dtype and device."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        return Workspace()

    def take(self, purpose: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of `shape` in the dtype and on the device of `like`, contents undefined, until the next such call."""
        key, size = (purpose, like.dtype, like.device), prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return buffer[:size].view(shape)
