"""Linear layers and embeddings that add their weights' gradients to `param.grad` at once (`accumulation.py`).

It is: products and look-ups as autograd functions, and the classes that plain layers of a model are given while a data
engine trains it. It is not: for layers with a forward of their own, which may call `linear`.

Where nothing may be added (see `Accumulation`), where gradients of weights are postponed (`plugins/pipeline/
backward.py` finds products as they are) and inside torch's compiler and function transforms, the plain function runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode, _get_current_function_mode_stack

from parallax.strategies.accumulation import MARK, accumulation_of, weight_gradient
from parallax.strategies.products import is_faster, linear_product, product

WIDE = (torch.float32, torch.float64)
"""Dtypes in which rows of a table may be added up one by one."""


def is_autocast(x: Tensor) -> bool:
    """Whether products with `x` run under autocast now (which leaves fp64 alone)."""
    kind = x.device.type
    return (
        x.dtype is not torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    )


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype a product with `x` runs in under the current autocast state."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast(x) else x.dtype


def products_are_watched() -> bool:
    """Whether a mode looks for products, as the pipeline's does to postpone weight gradients (`watches_products`).

    It must find them as they are; there is no gradient of a weight then that could be added, or that a collective could
    overlap with.
    """
    if _get_current_function_mode() is None:
        return False
    return any(getattr(mode, "watches_products", False) for mode in _get_current_function_mode_stack())


class _Product(Function):
    """x W^T + b, or x W + b when `transposed`, for an `x` that has been cast and a weight that has not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # a frozen weight needs no input
        ctx.weight, ctx.transposed = weight, transposed  # what is saved may come back as a copy
        ctx.shape = x.shape
        if x.dtype is not weight.dtype and is_autocast(x):
            # Cast here: autocast would keep its copy, which has no history, for whoever reads the weight next.
            weight = weight.detach().to(x.dtype)
        return linear_product(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, used = ctx.saved_tensors
        shape, transposed = ctx.shape, ctx.transposed
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        if len(shape) > 2:
            grad = grad.reshape(-1, grad.shape[-1])
            x = None if x is None else x.reshape(-1, shape[-1])
        of_x = of_weight = None
        if for_x:
            if used.dtype is not grad.dtype:
                used = used.to(grad.dtype)
            of_x = product(grad, used.t() if transposed else used).view(shape)
        if for_weight:
            of_weight = weight_gradient(ctx.weight, *((x.t(), grad) if transposed else (grad.t(), x)))
        return of_x, of_weight, grad.sum(0) if for_bias else None, None


_product = super(Function, _Product).apply
"""`_Product.apply` without its checks for function transforms, inside of which it is not called."""


class _Rows(Function):
    """Rows of a table."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,), weight, padding = ctx.saved_tensors, ctx.weight, ctx.padding
        into = accumulation_of(weight)
        if into is None or not into.is_open:
            return None, torch.ops.aten.embedding_backward(grad, ids, weight.shape[0], padding, False, False), None
        if padding >= 0:
            grad = grad.masked_fill((ids == padding).unsqueeze(-1), 0)
        into.add_rows(weight, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, None, None


def _adds(weight: Tensor) -> bool:
    """Whether a gradient of `weight` may be added, as far as the forward can tell."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and weight.requires_grad
        and accumulation_of(weight) is not None
        and not torch._C._are_functorch_transforms_active()
    )


def _transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W + b, saving the parameter: a saved transpose would hold on to what ZeRO-3 has gathered."""
    if bias is None:
        return torch.matmul(x, weight)
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """x W^T + b, or x W + b when `transposed` (W is stored [in, out]); `weight` is the parameter itself."""
    cast_first = torch._C._is_any_autocast_enabled()
    pays = _adds(weight) or (not cast_first and type(weight) is nn.Parameter and is_faster(x))
    if type(x) is not Tensor or x.dim() < 2 or not pays or products_are_watched():
        return _transposed_linear(x, weight, bias) if transposed else F.linear(x, weight, bias)
    if cast_first:
        x = x.to(autocast_dtype(x))
    return cast(Tensor, _product(x, weight, bias, transposed))


class Accumulating(nn.Module):
    """Mixin in front of a layer's class, which it calls `plain`: a copy of the layer, or a saved one, is of that."""

    plain: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        how: Any = super().__reduce_ex__(protocol)
        return nn.Module.__new__, (self.plain,), *how[2:]


class AccumulatingLinear(Accumulating):
    """`nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        own: Any = self._parameters  # faster than attributes
        return linear(input, own["weight"], own["bias"])


class AccumulatingConv1D(Accumulating):
    """transformers' `Conv1D`, a linear layer whose weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self._parameters
        return linear(x, own["weight"], own["bias"], transposed=True)


class AccumulatingEmbedding(Accumulating):
    """`nn.Embedding` with a dense gradient."""

    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        weight = self.get_parameter("weight")
        if not _adds(weight):
            return cast(Tensor, super().forward(input))
        return cast(Tensor, _Rows.apply(input, weight, -1 if self.padding_idx is None else self.padding_idx))


def accumulate_in(module: nn.Module) -> list[Accumulating]:
    """Change the class of layers of `module` with parameters of an `Accumulation`; what was changed."""
    changed = []
    for layer in module.modules():
        mixin: Any = _mixin(layer)
        if mixin is not None and hasattr(layer._parameters["weight"], MARK):
            kind: Any = type(layer)
            layer.__class__ = _class_on(mixin, kind)
            changed.append(cast(Accumulating, layer))
    return changed


def restore(layers: Iterable[Accumulating]) -> None:
    """Give `layers` their class back."""
    for layer in layers:
        plain: Any = layer.plain
        layer.__class__ = plain


def _mixin(layer: nn.Module) -> type[Accumulating] | None:
    """What stands for the forward of `layer`; None where that is not known."""
    forward = type(layer).forward
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
    if forward is nn.Linear.forward:
        return AccumulatingLinear
    if forward is conv1d.forward:
        return AccumulatingConv1D
    if forward is nn.Embedding.forward:
        plain = layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        return AccumulatingEmbedding if plain and layer.weight.dtype in WIDE else None
    return None


@cache
def _class_on(mixin: type, plain: type) -> type:
    return type(plain.__name__, (mixin, plain), {"plain": plain, "__doc__": plain.__doc__})
