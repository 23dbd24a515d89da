"""The state of torch's random numbers, taken and given back, so that a recomputed stage draws what it drew before.

It is: the generators of the CPU and of one GPU. It is not: any seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """A moment of the generators a stage draws from."""

    device: torch.device
    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), cuda)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, random numbers continue from this moment; afterwards as if nothing had been drawn."""
        with torch.random.fork_rng(devices=[] if self.cuda is None else [self.device]):
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            yield
