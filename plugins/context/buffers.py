"""Memory for messages that is kept from call to call.

It is: named scratch tensors, one per name, size and dtype, and the packing of keys and values into one message. It is
not: memory for anything that outlives a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallax.plugins.context.base import AttentionMethod, ContextGroups


class Buffers:
    """Scratch memory of one attention method, whose layers take turns."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}

    def flat(self, name: str, numel: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[numel] on the device of `like`, in its dtype or `dtype`: the same memory whenever asked for by this name."""
        key = (name, numel, dtype or like.dtype, like.device)
        if key not in self._kept:
            for old in [k for k in self._kept if k[0] == name]:
                del self._kept[old]  # lengths change rarely; what was for another is let go
            self._kept[key] = like.new_empty(numel, dtype=key[2])
        return self._kept[key]


class BufferedMethod(AttentionMethod):
    """A method whose calls share scratch memory."""

    def __init__(self, groups: ContextGroups) -> None:
        super().__init__(groups)
        self._buffers = Buffers()


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
