"""The backward of one stage and micro-batch, whole or in two halves, through any data engine.

It is: the scalar that starts a backward at given gradients, and the postponement of weight gradients (Qi et al. 2023,
*Zero Bubble Pipeline Parallelism*, section 2: I computes the gradient of the input, W later that of the weights). It is
not: the decision when a half runs (the schedule's) or where gradients go (the data engine's).

How the halves come apart, for modules as they are: while a stage whose backward is split runs forward, products of an
activation with a weight (`nn.Linear`, transformers' `Conv1D`, tensor-parallel layers, adapters, `x @ self.weight`) are
recorded by a function whose backward computes the gradient of the activation and puts the pair (activation, gradient of
the output) aside; W turns the pairs into gradients of weights. Weights used in another way (norms, embeddings,
convolutions, grouped products of experts) get their gradients in I: all is exact, and what is not a product is
merely not postponed. I frees the graph; between I and W nothing is held but the pairs. A recomputed forward
(activation checkpointing) runs inside I and puts its pairs aside there, so that W recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallax.strategies.accumulating import autocast_dtype
from parallax.strategies.accumulation import accumulation_of
from parallax.strategies.function_modes import backward_inside
from parallax.strategies.products import linear_product, product


class Seed(Function):
    """A scalar whose backward hands given gradients to given outputs, at no arithmetic cost.

    DeepSpeed's engine takes only scalars; `(output * grad).sum()` would be the same at the price of two passes. Made
    right after the forward it keeps the graph alive, but not the outputs' memory.
    """

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *outputs: Tensor) -> Tensor:
        """`grads` is filled, one for each output, before the backward, which empties it."""
        ctx.grads = grads
        return torch.zeros((), dtype=torch.float32, device=outputs[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> Any:
        grads = tuple(ctx.grads)
        ctx.grads.clear()
        return None, *grads


@dataclass(frozen=True, slots=True)
class _Weight:
    """The weight of a product y = x W^T + b, or x W + b when `transposed` (W is stored [in, out])."""

    weight: Tensor
    bias: Tensor | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class _Pair:
    """What a weight's gradient is made of: its product's input [..., in] and the gradient of its output [..., out]."""

    of: _Weight
    x: Tensor
    grad: Tensor

    def factors(self) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the gradient of the weight."""
        x, grad = self.x.reshape(-1, self.x.shape[-1]), self.grad.reshape(-1, self.grad.shape[-1])
        return (x.t(), grad) if self.of.transposed else (grad.t(), x)

    def of_bias(self) -> Tensor | None:
        """The gradient of the bias."""
        bias = self.of.bias
        return self.grad.flatten(0, -2).sum(0).to(bias.dtype) if bias is not None and bias.requires_grad else None

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Gradients of weight and bias, as autograd would have computed them."""
        left, right = self.factors()
        return product(left, right).to(self.of.weight.dtype), self.of_bias()

    def add(self) -> bool:
        """Add both to what is there, where that is allowed: for all that has a gradient, or nothing is done."""
        weight, bias = self.of.weight, self.of.bias
        here = accumulation_of(weight)
        there = accumulation_of(bias) if bias is not None and bias.requires_grad else here
        if here is None or there is None:
            return False
        with torch.no_grad():
            here.add_product(weight, *self.factors())
            if bias is not None and (total := self.of_bias()) is not None:
                there.add(bias, total)
        return True


class _Product(Function):
    """A product whose backward computes the gradient of x and puts what the weight needs aside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, into: list[_Pair], of: _Weight) -> Tensor:
        dtype = autocast_dtype(x)
        seen, weight = x.to(dtype), of.weight.detach().to(dtype)
        bias = None if of.bias is None else of.bias.detach().to(dtype)
        ctx.save_for_backward(seen, weight)
        ctx.into, ctx.of, ctx.dtype = into, of, x.dtype
        return linear_product(seen, weight.t() if of.transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.into.append(_Pair(ctx.of, x, grad))
        of_x = product(grad.reshape(-1, grad.shape[-1]), weight.t() if ctx.of.transposed else weight)
        return of_x.view(x.shape).to(ctx.dtype), None, None


class _Late(Function):
    """A scalar whose backward is the gradient of one pair's weight."""

    @staticmethod
    def forward(ctx: Any, pair: _Pair, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.pair = pair
        return torch.zeros((), dtype=torch.float32, device=weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[None, Tensor, Tensor | None]:
        pair, ctx.pair = ctx.pair, None
        return None, *pair.gradients()


class Postponed(TorchFunctionMode):
    """The weight gradients of one stage and micro-batch: entered around its forward and its I, finished by its W.

    It sees every torch function called inside, for 0.8 microseconds each.
    """

    watches_products = True
    """Column layers of the tensor axis then leave theirs as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._pairs: list[_Pair] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:  # torch leaves the mode around what the mode calls, but recomputation needs it
            return backward_inside(self, func, *args, **(kwargs or {}))
        read = _READ.get(func)
        if read is not None and torch.is_grad_enabled():
            found = read(*args, **(kwargs or {}))
            if found is not None and found[0].requires_grad:
                return _Product.apply(found[0], self._pairs, found[1])
        return func(*args, **(kwargs or {}))

    def storages(self) -> dict[int, int]:
        """Address -> bytes of what is held for W."""
        parts = (t.untyped_storage() for pair in self._pairs for t in (pair.x, pair.grad))
        return {part.data_ptr(): part.nbytes() for part in parts}

    def finish(self, backward: Callable[[Tensor], None]) -> None:
        """W: give the weights their gradients, at once or through `backward`, a data engine's, one after the other."""
        scalars = []
        while self._pairs:
            pair = self._pairs.pop()
            if not pair.add():
                scalars.append(_Late.apply(pair, pair.of.weight, pair.of.bias))
            del pair  # its function lets go of it as soon as it is used
        if scalars:
            backward(torch.stack(scalars).sum())


Found = tuple[Tensor, _Weight] | None


def _found(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Found:
    """None where the weight is no trained parameter, as it is or transposed (`F.linear(x, w.t())`)."""
    if type(x) is not Tensor or weight.dim() != 2 or not weight.requires_grad:
        return None
    base = weight
    if not weight.is_leaf:
        plain = weight._base
        if plain is None or weight.grad_fn is None or weight.grad_fn.name() != "TBackward0" or not plain.is_leaf:
            return None
        base, transposed = plain, not transposed
    if not isinstance(base, nn.Parameter) or (bias is not None and not (bias.is_leaf and bias.dim() == 1)):
        return None
    return x, _Weight(base, bias, transposed)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Found:
    return _found(input, weight, bias, transposed=False)


def _matmul(x: Tensor, *second: Tensor, **named: Tensor) -> Found:
    weight = (*second, *named.values())[0]
    return _found(x, weight, None, transposed=True) if isinstance(weight, nn.Parameter) and x.dim() > 1 else None


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **scales: float) -> Found:
    return None if scales or input.dim() != 1 else _found(mat1, mat2, input, transposed=True)


_READ: Mapping[Any, Callable[..., Found]] = MappingProxyType(
    {
        F.linear: _linear,
        torch.addmm: _addmm,
        **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    }
)
"""Products, and how their arguments are read."""
