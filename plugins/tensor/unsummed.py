"""What a vocabulary-parallel embedding returns before the ranks' parts are summed, where its sum may wait.

It is: a tensor subclass that looks like the sum and carries this rank's summand. On sequence shards the entry of the
layers scatters it while summing: half of what an all-reduce sends (Korthikanti et al. 2022, section 4.2.2). Whatever
else reads it (positions that are added, a norm, a dropout) sums it first, once. It is not: any part of the layers.

Sizes, dtypes and devices are answered without summing, so that masks and rotary tables cost nothing; and what hooks
hand on in its place (`detach` in a function of theirs, as DeepSpeed's ZeRO-3 does) still waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils import _pytree as pytree

from parallax.plugins.tensor.functions import reduce_from_region
from parallax.plugins.tensor.metadata import METADATA
from parallax.strategies.comm import AxisComm


@dataclass(eq=False)
class Summand:
    """What all aliases of one such tensor share.

    Attributes:
        part: this rank's summand, without history; after the sum, the sum.
        comm: the axis.
        is_summed: whether the sum has been made.
    """

    part: Tensor
    comm: AxisComm
    is_summed: bool = False


class Unsummed(Tensor):
    """[..., h], the sum over ranks of `own.part`."""

    own: Summand
    _sum: Tensor | None

    @staticmethod
    def make(own: Summand) -> Unsummed:
        like = own.part
        out: Any = Tensor._make_wrapper_subclass(
            Unsummed, like.shape, dtype=like.dtype, device=like.device, requires_grad=False
        )
        out.own, out._sum = own, None
        return cast(Unsummed, out)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Unsummed(shape={tuple(self.shape)}, dtype={self.dtype}, over {self.own.comm})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA or (func is Tensor.requires_grad_ and args[0].requires_grad):
                return func(*args, **kwargs)
            if func is Tensor.detach:
                return Unsummed.make(args[0].own)
            return func(*pytree.tree_map(summed, args), **pytree.tree_map(summed, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What autograd itself does, below `__torch_function__`."""
        return func(*pytree.tree_map(_values, args), **pytree.tree_map(_values, kwargs or {}))


class _Wrap(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: AxisComm) -> Tensor:
        return Unsummed.make(Summand(part.detach(), comm))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Unwrap(Function):
    @staticmethod
    def forward(ctx: Any, x: Unsummed) -> Tensor:
        return x.own.part.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def unsummed(part: Tensor, comm: AxisComm) -> Tensor:
    """The sum over ranks of `part`, which the caller has made and nobody else reads, when it is needed."""
    return cast(Tensor, _Wrap.apply(part, comm))


def summand(x: Tensor) -> Tensor | None:
    """This rank's part of `x`, in its graph, if the sum has not been made; else None."""
    if not isinstance(x, Unsummed) or x.own.is_summed:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return cast(Tensor, _Unwrap.apply(x))


def summed(x: Any) -> Any:
    """`x` with the parts of all ranks. Collective the first time."""
    if not isinstance(x, Unsummed):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        if not torch.is_grad_enabled():
            return _values(x)
        if x._sum is None:  # kept: what is changed in place is this tensor
            part = _Unwrap.apply(x)
            x._sum = part if x.own.is_summed else reduce_from_region(part, x.own.comm)
            x.own.is_summed = True
        return x._sum


def _values(x: Any) -> Any:
    """The summed values, without history."""
    if not isinstance(x, Unsummed):
        return x
    if not x.own.is_summed:
        x.own.comm.all_reduce(x.own.part)
        x.own.is_summed = True
    return x.own.part
