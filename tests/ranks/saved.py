"""Activations, counted: what autograd holds at once, whenever it lets go of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Saved:
    """The most bytes that autograd has saved at once, without parameters; what several nodes share counts once."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._held: dict[int, tuple[int, int]] = {}
        self.peak = 0

    class Ticket:
        def __init__(self, saved: Saved, tensor: Tensor) -> None:
            self.tensor, self._saved = tensor, saved
            self._address = tensor.untyped_storage().data_ptr()
            saved._add(self._address, 1, tensor.untyped_storage().nbytes())

        def __del__(self) -> None:
            self._saved._add(self._address, -1, 0)

    def _add(self, address: int, change: int, nbytes: int) -> None:
        if address not in self._own:
            count, size = self._held.get(address, (0, nbytes))
            self._held[address] = count + change, size
            self.peak = max(self.peak, sum(size for count, size in self._held.values() if count))
            if not count + change:
                del self._held[address]

    def __enter__(self) -> Saved:
        hooks = torch.autograd.graph.saved_tensors_hooks
        self._hooks = hooks(lambda tensor: Saved.Ticket(self, tensor), lambda ticket: ticket.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
