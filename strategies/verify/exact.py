"""fp64 all the way: what models upcast "to fp32" stays in fp64.

It is: a torch function mode for verification and tests. It is not: for training.

Models written for half precision compute norms, router scores and losses in fp32. In an fp64 run that is a downcast,
whose rounding (6e-8) hides everything smaller. Inside this mode it does not happen, in the parallel run and in the
one-process run alike. torch's grouped product, by which transformers computes experts, takes no fp64 at all: inside,
it is one product a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallax.strategies.function_modes import BACKWARDS, backward_inside


class KeepDouble(TorchFunctionMode):
    """`.float()`, `.to(torch.float32)`, `.type(...)` and `dtype=torch.float32` leave an fp64 tensor as it is, and
    `grouped_mm` multiplies it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in BACKWARDS:
            return backward_inside(self, func, *args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float:
                return first
            if func is torch._grouped_mm and kwargs.get("bias") is None:
                return _products(args[0], args[1], kwargs["offs"])
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _products(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Rows [n, i], group g of them up to row `offs[g]`, by weights [groups, i, o]; zeros for rows of no group."""
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    sizes.append(len(rows) - sum(sizes))
    *groups, rest = rows.split(sizes)
    found = [x @ weight for x, weight in zip(groups, weights, strict=True)]
    return torch.cat([*found, rest.new_zeros(len(rest), weights.shape[-1])])
