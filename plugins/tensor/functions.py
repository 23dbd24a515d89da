"""The collectives of tensor parallelism as autograd functions, and the shared entry of a region.

It is: the conjugate pair f and g of Megatron-LM (Shoeybi et al. 2019, section 3), the gather and split of the
last dim, and `SharedInput`, which makes the layers that read one tensor pay for one all-reduce. It is not:
modules (`layers.py`).

|  | forward | backward |
|---|---|---|
| `copy_to_region` (f) | identity | all-reduce |
| `reduce_from_region` (g) | all-reduce | identity |
| `gather_last_dim` | all-gather | slice |
| `split_last_dim` | slice | all-gather |

A cut attention or MLP is a *region*: f at its entry, g at its exit, the work between on this rank's slice.
Under autocast f casts first, so that both all-reduces of a region carry the autocast dtype.
"""

from __future__ import annotations

import weakref
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


def copy_to_region(x: Tensor, comm: AxisComm) -> Tensor:
    """f: `x` as it is; its gradient is summed over `comm`. Only layers of the region may read the result."""
    return cast(Tensor, _CopyToRegion.apply(_autocast(x), comm))


def reduce_from_region(x: Tensor, comm: AxisComm) -> Tensor:
    """g: the sum of `x` over `comm`, in place; its gradient passes."""
    return cast(Tensor, _ReduceFromRegion.apply(x, comm))


def gather_last_dim(x: Tensor, comm: AxisComm, width: int) -> Tensor:
    """Every rank's [..., n] concatenated and cut to [..., width]; the gradient is this rank's slice."""
    return cast(Tensor, _GatherLastDim.apply(x, comm, width))


def split_last_dim(x: Tensor, comm: AxisComm) -> Tensor:
    """This rank's [..., n / size] of a whole [..., n]; the gradient is gathered, whole on every rank."""
    return cast(Tensor, _SplitLastDim.apply(x, comm))


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype a product with `x` runs in under the current autocast state."""
    kind = x.device.type
    if x.dtype is torch.float32 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _autocast(x: Tensor) -> Tensor:
    return x.to(_autocast_dtype(x))


class SharedInput:
    """f applied once for the column layers of one block that read the same tensor.

    Query, key and value (or gate and up) receive one and the same tensor object. The first of them applies f
    and leaves the result here; the others pick it up, so autograd adds their gradients *before* the one
    all-reduce. A result is handed out only for the same tensor object, unchanged in place since, in the same
    autocast state, and once per layer; anything else (cross-attention, a block called twice, a recomputation)
    gets its own f, which is always right and costs one more all-reduce. The result is dropped when
    every layer has had it or when the input dies, whichever is first. Without gradients nothing is kept.

    Args:
        comm: the axis of the region.
        members: how many layers share this entry.
    """

    def __init__(self, comm: AxisComm, members: int) -> None:
        self.comm = comm
        self.members = members
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        return SharedInput(self.comm, self.members)  # a process group is shared, a half-used result is not

    def _forget(self, dead: object = None) -> None:
        if dead is None or dead is self._input:
            self._input: weakref.ref[Tensor] | None = None
            self._output: Tensor | None = None
            self._state: tuple[int, torch.dtype] | None = None
            self._served: set[int] = set()

    def enter(self, x: Tensor, member: int) -> Tensor:
        """`x` for layer number `member` of the block, inside the region."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        state = (x._version, _autocast_dtype(x))
        out = self._output
        same = self._input is not None and self._input() is x and self._state == state
        if out is None or not same or member in self._served:
            out = copy_to_region(x, self.comm)
            self._input, self._output, self._state = weakref.ref(x, self._forget), out, state
            self._served = set()
        self._served.add(member)
        if len(self._served) == self.members:
            self._forget()
        return out
