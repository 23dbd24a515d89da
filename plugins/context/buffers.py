"""Keys and values as one message, and memory for blocks on their way.

It is: the packing, and scratch memory that lives as long as a call: kept between layers it would be idle while the most
is needed elsewhere, and torch's allocators give the same blocks again. It is not: communication.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Pair:
    """Keys and values, or their gradients, as two views of one flat tensor: one message."""

    def __init__(self, flat: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> None:
        self.flat, cut = flat, k_shape.numel()
        self.k, self.v = flat[:cut].view(k_shape), flat[cut:].view(v_shape)

    @classmethod
    def pack(cls, k: Tensor, v: Tensor) -> Pair:
        """A new pair with the contents of `k` and `v`."""
        pair = cls(k.new_empty(k.numel() + v.numel()), k.shape, v.shape)
        pair.k.copy_(k)
        pair.v.copy_(v)
        return pair

    def like(self, flat: Tensor) -> Pair:
        """The same shapes over other memory."""
        return Pair(flat, self.k.shape, self.v.shape)

    def add(self, columns: slice, dk: Tensor, dv: Tensor) -> None:
        self.k[:, :, columns] += dk
        self.v[:, :, columns] += dv


class Scratch:
    """Memory for further pairs like `own` within one call, by name."""

    def __init__(self, own: Pair) -> None:
        self._own = own
        self._made: dict[str, Pair] = {}

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Pair:
        """The pair of this name, with whatever it holds; in the dtype of `own`, or `dtype`."""
        if name not in self._made:
            self._made[name] = self._own.like(torch.empty_like(self._own.flat, dtype=dtype))
        return self._made[name]
