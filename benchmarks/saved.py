"""How much a step's forwards keep for their backwards, counted in tensors: the same on every machine and side.

It is: the most bytes autograd held at once, without weights, in one process. It is not: what an allocator or a
process took, nor gradients, communication buffers, or what code keeps outside of autograd (the postponed weight
gradients of zero-bubble schedules).
"""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class _Kept:
    """One tensor that autograd keeps, for as long as it does."""

    def __init__(self, of: SavedActivations, tensor: Tensor) -> None:
        self.of, self.tensor = of, tensor
        of.add(tensor, 1)

    def __del__(self) -> None:
        self.of.add(self.tensor, -1)


class SavedActivations(saved_tensors_hooks):
    """While it is entered, `peak` is the most bytes of saved tensors' storages, each counted once."""

    def __init__(self) -> None:
        super().__init__(self._keep, lambda kept: kept.tensor if isinstance(kept, _Kept) else kept)
        parameters = (found for found in gc.get_objects() if isinstance(found, nn.Parameter))
        self._weights = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._uses: dict[int, int] = {}
        self._now = self.peak = 0

    def _keep(self, tensor: Tensor) -> Any:
        return tensor if tensor.untyped_storage()._cdata in self._weights else _Kept(self, tensor)

    def add(self, tensor: Tensor, uses: int) -> None:
        """`tensor` is kept by one more function, or one fewer."""
        storage = tensor.untyped_storage()
        before = self._uses.get(storage._cdata, 0)
        after = self._uses[storage._cdata] = before + uses
        self._now += ((after > 0) - (before > 0)) * storage.nbytes()
        self.peak = max(self.peak, self._now)
