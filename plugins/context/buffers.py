"""Keys and values as one message, sums of their gradients, and memory for blocks on their way.

It is: the packing, the adding up, and scratch memory that lives as long as a call: kept between layers it would be idle
while the most is needed elsewhere, and torch's allocators give the same blocks again. It is not: communication.
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


class Sums:
    """Gradients of one block of keys and values, added up tile by tile in `dtype`.

    Args:
        k, v: the keys and values.
        dtype: of the sums.
        pair: memory for them, where they are to be sent; without one the first gradients become the sums.
        begun: whether `pair` already holds some.
    """

    def __init__(
        self, k: Tensor, v: Tensor, dtype: torch.dtype, pair: Pair | None = None, *, begun: bool = False
    ) -> None:
        self._like, self._dtype, self._begun = (k, v), dtype, begun
        self._held: tuple[Tensor, Tensor] | None = None if pair is None else (pair.k, pair.v)

    def add(self, columns: slice, dk: Tensor, dv: Tensor) -> None:
        """Add those of the keys and values at `columns` of the block."""
        whole = dk.shape[2] == self._like[0].shape[2]
        if self._begun or not whole:
            for total, x in zip(self.total(), (dk, dv), strict=True):
                total[:, :, columns] += x
        elif self._held is None:
            self._held = dk.to(self._dtype), dv.to(self._dtype)
        else:
            for total, x in zip(self._held, (dk, dv), strict=True):
                total.copy_(x)
        self._begun = True

    def total(self) -> tuple[Tensor, Tensor]:
        """Of keys and of values; 0 where nothing was added."""
        if self._held is None:
            k, v = self._like
            self._held = torch.empty_like(k, dtype=self._dtype), torch.empty_like(v, dtype=self._dtype)
        if not self._begun:
            for x in self._held:
                x.zero_()
            self._begun = True
        return self._held


class Scratch:
    """Memory for further pairs like `own` within one call, by name. It does not keep `own`."""

    def __init__(self, own: Pair) -> None:
        self._like, self._shapes = own.flat.new_empty(0), (own.k.shape, own.v.shape)
        self._made: dict[str, Pair] = {}

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Pair:
        """The pair of this name, with whatever it holds; in the dtype of `own`, or `dtype`."""
        if name not in self._made:
            numel = sum(shape.numel() for shape in self._shapes)
            self._made[name] = Pair(self._like.new_empty(numel, dtype=dtype), *self._shapes)
        return self._made[name]
