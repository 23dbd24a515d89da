"""FSDP's two collectives on the mesh's groups, so that they are counted and their failures say who waited for whom.

It is: torch's interface for one's own all-gather and reduce-scatter, over an `AxisComm`. It is not: a choice of when
they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallax.strategies.comm import AxisComm


class _Counted:
    def __init__(self, comm: AxisComm) -> None:
        self._comm = comm

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_Counted):
    """Gathers the shares of a unit's weights."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self._comm.all_gather_into(output_tensor, input_tensor, async_op=async_op)


class CountedReduceScatter(_Counted):
    """Sums a unit's gradients; every rank receives its share."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        if op != torch.distributed.ReduceOp.SUM:
            raise RuntimeError(f"gradients are summed and divided by us, but FSDP asks for {op}")
        return self._comm.reduce_scatter_into(output_tensor, input_tensor, async_op=async_op)
