"""Experts of transformers' common form, one after the other over rows that are sorted by expert.

It is: the products before and after a model's own gate, for modules written for `ExpertsInterface` that are set to
grouped products, on CPUs. Rows of one expert go through both products while they are in cache, nothing is sorted or
weighted again, and of a forward only the rows and the first product are kept: the gate is computed again in backward.
It is not: the gate, which stays the model's, any other form of experts, or another device: those run the model's own
forward, whose grouped product is torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from parallax.strategies.accumulation import accumulation_of
from parallax.strategies.products import multiply, outer

_PARAMETERS = {f"{name}_proj{bias}" for name in ("gate_up", "up", "down") for bias in ("", "_bias")}


def takes(module: nn.Module) -> bool:
    """Whether `grouped` computes what the forward of `module` does: nothing but products, biases and a gate."""
    config: Any = getattr(module, "config", None)
    parameters = dict(module.named_parameters())
    return (
        getattr(config, "_experts_implementation", None) == "grouped_mm"
        and hasattr(module, "has_gate")
        and not getattr(module, "has_post_expert_norm", False)
        and parameters.keys() <= _PARAMETERS
        and all(p.device.type == "cpu" for p in parameters.values())
    )


def grouped(module: Any, rows: Tensor, counts: list[int]) -> Tensor:
    """Outputs [n, h] of experts for rows [n, h], the first `counts[0]` of them those of the first expert, and so on."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    weights = [getattr(module, first), module.down_proj]
    biases = [getattr(module, f"{first}_bias"), module.down_proj_bias] if module.has_bias else [None, None]
    gate = module._apply_gate if module.has_gate else module.act_fn
    out = _Grouped.apply(rows.to(weights[0].dtype), *weights, *biases, gate, module.is_transposed, counts)
    return cast(Tensor, out).to(rows.dtype)


class _Grouped(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        first: Tensor,
        second: Tensor,
        first_bias: Tensor | None,
        second_bias: Tensor | None,
        gate: Callable[[Tensor], Tensor],
        transposed: bool,
        counts: list[int],
    ) -> Tensor:
        into, after = (first, second) if transposed else (first.mT, second.mT)
        inner, out = rows.new_empty(len(rows), into.shape[2]), rows.new_empty(len(rows), after.shape[2])
        for e, (x, u, y) in enumerate(zip(rows.split(counts), inner.split(counts), out.split(counts), strict=True)):
            multiply(x, into[e], u)
            if first_bias is not None:
                u += first_bias[e]
            multiply(gate(u), after[e], y)
            if second_bias is not None:
                y += second_bias[e]
        ctx.save_for_backward(rows, inner, first, second, first_bias, second_bias)
        ctx.gate, ctx.transposed, ctx.counts = gate, transposed, counts
        ctx.weights = first, second  # what is saved may come back as a copy
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, *parameters = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_rows = torch.empty_like(rows) if wanted[0] else None
        of_first, of_second = (_OfWeight(p) if want else None for p, want in zip(ctx.weights, wanted[1:3], strict=True))
        of_first_bias, of_second_bias = (
            torch.empty_like(p) if want and p is not None else None
            for p, want in zip(parameters[2:], wanted[3:5], strict=True)
        )
        into, after = (p if ctx.transposed else p.mT for p in parameters[:2])
        parts = zip(rows.split(ctx.counts), inner.split(ctx.counts), grad.split(ctx.counts), strict=True)
        start = 0
        for e, (x, u, of_y) in enumerate(parts):
            with torch.enable_grad():
                u = u.detach().requires_grad_()
                activated = ctx.gate(u)
            of_activated = torch.empty_like(activated)
            multiply(of_y, after[e].t(), of_activated)
            (of_u,) = torch.autograd.grad(activated, u, of_activated)
            if of_second is not None:
                of_second.put(e, activated.detach(), of_y, ctx.transposed)
            if of_first is not None:
                of_first.put(e, x, of_u, ctx.transposed)
            if of_second_bias is not None:
                torch.sum(of_y, 0, out=of_second_bias[e])
            if of_first_bias is not None:
                torch.sum(of_u, 0, out=of_first_bias[e])
            if of_rows is not None:
                multiply(of_u, into[e].t(), of_rows[start : start + len(x)])
            start += len(x)
        of_weights = [None if of is None else of.rest() for of in (of_first, of_second)]
        return of_rows, *of_weights, of_first_bias, of_second_bias, None, None, None


class _OfWeight:
    """The gradient of a weight [experts, ...], added to the one there is where the data engine lets it be."""

    def __init__(self, weight: Tensor) -> None:
        into = accumulation_of(weight)
        begun = into.begun(weight) if into is not None else None
        self._weight, self._into = weight, into if begun is not None else None
        self._grad = torch.empty_like(weight) if begun is None else begun

    def put(self, expert: int, x: Tensor, grad: Tensor, transposed: bool) -> None:
        """That of one expert, whose weight is [in, out] when `transposed`, [out, in] otherwise."""
        outer(*((x, grad) if transposed else (grad, x)), self._grad[expert], add=self._into is not None)

    def rest(self) -> Tensor | None:
        """What is left to autograd."""
        if self._into is None:
            return self._grad
        self._into.added(self._weight)
        return None
