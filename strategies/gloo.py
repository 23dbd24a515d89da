"""A reduce-scatter for gloo, whose own is a whole all-reduce of which every rank keeps its part.

It is: each rank sends every other its part, and sums what it has received in rank order: the bytes of a reduce-scatter,
(n-1)/n of the tensor, in one step. It is not: counted or named (`comm.py`), nor for other backends, which have one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_gloo(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Whether a collective of `group` on `tensor` is gloo's."""
    return group is not None and tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"


class Scattering:
    """A reduce-scatter in flight; `out` is filled when it has been waited for."""

    def __init__(self, out: Tensor, parts: Tensor, group: dist.ProcessGroup | None) -> None:
        """`parts` is [ranks, *], `out` one of them, both flat memory."""
        self._out, self._received = out, torch.empty_like(parts)
        self._work: Any = dist.all_to_all_single(self._received, parts, group=group, async_op=True)

    def is_completed(self) -> bool:
        """Whether everything has arrived."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            with torch._C.DisableTorchFunction():  # as in `comm.py`
                torch.sum(self._received, 0, dtype=self._out.dtype, out=self._out)
