"""The collectives of tensor parallelism over features, as autograd functions.

It is: the conjugate pair f and g of Megatron-LM (Shoeybi et al. 2019, section 3), and the gather and split of the last
dim. It is not: f as column layers use it, which is part of their products (`entry.py`, `overlap.py`), modules
(`layers.py`), or anything over tokens (`sequence_functions.py`).

|  | forward | backward |
|---|---|---|
| `copy_to_region` (f) | identity | all-reduce |
| `reduce_from_region` (g) | all-reduce | identity |
| `gather_last_dim` | all-gather | slice |
| `split_last_dim` | slice | all-gather |
| `gather_halves` | all-gather | reduce-scatter |

A cut attention or MLP is a *region*: f at its entry, g at its exit, the work between on this rank's slice.
Under autocast f casts first, so that both all-reduces of a region carry the autocast dtype.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from parallax.strategies.comm import AxisComm


class _CopyToRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: AxisComm) -> Tensor:
        ctx.comm = comm
        return x.detach()  # an alias; x itself would make the output a view that keeps x alive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()  # fresh from the layers' backward: only they read f's output
        ctx.comm.all_reduce(grad)
        return grad, None


class _ReduceFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: AxisComm) -> Tensor:
        out = x.detach()  # reduced in place: x is fresh from a product, and neither read nor saved by anyone
        comm.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherLastDim(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: AxisComm, width: int) -> Tensor:
        ctx.start, ctx.rows, ctx.width = comm.index * x.shape[-1], x.shape[-1], width
        parts = comm.all_gather(x.unsqueeze(0), dim=0)
        return _join(parts, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        start, stop = min(ctx.start, ctx.width), min(ctx.start + ctx.rows, ctx.width)
        mine = grad[..., start:stop]
        if stop - start < ctx.rows:  # padded columns take no part in the output
            mine = torch.nn.functional.pad(mine, (0, ctx.rows - (stop - start)))
        return mine.contiguous(), None, None


def _join(parts: Tensor, width: int) -> Tensor:
    """Concatenate along the last dim and drop what lies beyond `width`, in one copy."""
    rows = parts.shape[-1]
    kept = [part[..., : max(0, min(rows, width - i * rows))] for i, part in enumerate(parts.unbind(0))]
    return torch.cat(kept, dim=-1)


class _SplitLastDim(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: AxisComm) -> Tensor:
        ctx.comm = comm
        return x.chunk(comm.size, dim=-1)[comm.index].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_gather(grad, dim=-1), None


class _GatherHalves(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: AxisComm, width: int) -> Tensor:
        ctx.comm, ctx.width = comm, width
        front, halves = x.split([x.shape[-1] - 2 * width, 2 * width], dim=-1)
        parts = x.new_empty(comm.size, *x.shape[:-1], 2, width)
        comm.all_gather_into(parts, halves)
        return torch.cat([front, parts.movedim(0, -2).flatten(-3)], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        comm, width = ctx.comm, ctx.width
        behind = 2 * comm.size * width
        front, halves = grad.split([grad.shape[-1] - behind, behind], dim=-1)
        mine = grad.new_empty(*grad.shape[:-1], 2 * width)
        comm.reduce_scatter_into(mine, halves.unflatten(-1, (2, comm.size, width)).movedim(-2, 0).contiguous())
        return torch.cat([front, mine], dim=-1), None, None


def copy_to_region(x: Tensor, comm: AxisComm) -> Tensor:
    """f: `x` as it is; its gradient is summed over `comm`. Only layers of the region may read the result."""
    return cast(Tensor, _CopyToRegion.apply(x, comm))


def reduce_from_region(x: Tensor, comm: AxisComm) -> Tensor:
    """g: the sum of `x` over `comm`, in place; its gradient passes."""
    return cast(Tensor, _ReduceFromRegion.apply(x, comm))


def gather_last_dim(x: Tensor, comm: AxisComm, width: int) -> Tensor:
    """Every rank's [..., n] concatenated and cut to [..., width]; the gradient is this rank's slice."""
    return cast(Tensor, _GatherLastDim.apply(x, comm, width))


def split_last_dim(x: Tensor, comm: AxisComm) -> Tensor:
    """This rank's [..., n / size] of a whole [..., n]; the gradient is gathered, whole on every rank."""
    return cast(Tensor, _SplitLastDim.apply(x, comm))


def gather_halves(x: Tensor, comm: AxisComm, width: int) -> Tensor:
    """The last 2 `width` features of x [..., n], the key's and the value's, with those of every rank of `comm`.

    [..., n - 2 width + 2 size width]: what stands before them, the whole key, the whole value. Each rank's gradient of
    the whole is that of its own queries; they are summed.
    """
    return cast(Tensor, _GatherHalves.apply(x, comm, width))
