"""A router whose scores are computed in fp32 while the rest of the model runs in half precision.

It is: the arithmetic of the router's own forward in fp32: autocast off, tokens and weights widened where they meet. It
is not: the search for it (`block.py`), which experts are chosen or how their weights are normalised, which stays the
model's, or a change of how its parameters are kept.

Scores of two experts often differ by less than bf16 tells apart, so that rounding decides where a token goes (Fedus et
al. 2021, "Switch Transformers", section 2.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallax.plugins.tensor.swap import swap

_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.addmm, torch.einsum}
)


class _WideProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            args, kwargs = tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4
    return value.float() if narrow else value


def in_fp32(router: nn.Module) -> None:
    """Let `router` compute in fp32 whatever it is given; fp32 and fp64 stay as they are."""
    plain = type(router).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}
        with torch.autocast(_device_type(args), enabled=False), _WideProducts():
            return plain(self, *args, **kwargs)

    swap(router, forward=forward)


def _device_type(args: Iterable[Any]) -> str:
    return next((value.device.type for value in args if isinstance(value, Tensor)), "cpu")
