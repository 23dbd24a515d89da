"""Gradients of weights added to `param.grad` where they are made, instead of by autograd afterwards.

It is: who may do so (`Accumulation`), and the sum itself. It is not: the layers that use it (`accumulating.py`), and it
reduces nothing.

With m micro-batches autograd writes every gradient to new memory m times and adds it to `param.grad` m times: three
more passes over all weights per micro-batch, and memory of the largest weight. A product's gradient is a product, which
BLAS can add to what is there (Megatron-LM's `gradient_accumulation_fusion`); an embedding's has as many rows as there
are tokens, which need not be spread over a table of zeros.

What autograd would do is done: nothing is added in a backward that is not the data engine's (the user's own
`torch.autograd.grad`, say), nor for a weight that somebody has put a hook on, nor in a backward that is itself to be
differentiated. Autograd then gets the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallax.strategies.products import add_product, product

MARK = "_parallax_accumulation"


class Accumulation:
    """What a data engine lets layers do with the gradients of its parameters.

    Every parameter carries it as an attribute, so that whoever computes with the parameter finds it; copies of the
    parameter do not.

    Args:
        params: those whose gradients may be added at once.
        touch: where gradients always exist (and are zero before the first), the engine's hook on each parameter, which
            is called with it after autograd has added to it; it is called here, too.
        hooks: how many hooks the engine has on each parameter besides, all of which may be left out.

    Attributes:
        repeats: whether more than one backward of the coming step adds to a gradient. Where the first makes it and is
            the only one, there is nothing to gain.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], touch: Callable[[Tensor], None] | None = None, *, hooks: int = 0
    ) -> None:
        self._params = [p for p in params if type(p) is nn.Parameter]
        self._touch = touch
        self._hooks = hooks + (touch is not None)
        self.repeats = True
        self._backward = -1
        for param in self._params:
            setattr(param, MARK, self)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # a parameter that is saved takes none along

    def release(self) -> None:
        """Leave the parameters to autograd."""
        for param in self._params:
            vars(param).pop(MARK, None)
        self._params = []

    def allows(self, param: Tensor) -> bool:
        """Whether it pays, and nobody but the engine watches what autograd does to the gradient of `param`."""
        hooks: Any = param._post_accumulate_grad_hooks
        watched = param._backward_hooks or (len(hooks) if hooks else 0) != self._hooks
        return not watched and (self.repeats or self._touch is not None)

    @contextmanager
    def during(self, loss: Tensor) -> Iterator[None]:
        """Around the engine's own backward of `loss`: only in that one is anything added."""
        if not loss.requires_grad:  # torch says so itself
            yield
            return
        hook = loss.register_hook(self._begin)
        try:
            yield
        finally:
            hook.remove()
            self._backward = -1

    def _begin(self, grad: Tensor) -> None:
        self._backward = torch._C._current_graph_task_id()

    @property
    def is_open(self) -> bool:
        """Whether the backward that runs here and now is the engine's, and not to be differentiated."""
        task = self._backward
        return task >= 0 and task == torch._C._current_graph_task_id() and not torch.is_grad_enabled()

    def begun(self, param: Tensor) -> Tensor | None:
        """The gradient of `param`, where it may be added to in place now; whoever does calls `added` afterwards."""
        grad = param.grad
        usual = grad is not None and grad.dtype is param.dtype and not grad.is_sparse
        return grad if usual and self.is_open else None

    def added(self, param: Tensor) -> None:
        """The gradient of `param` has been added to."""
        if self._touch is not None:
            self._touch(param)

    def add_product(self, param: Tensor, left: Tensor, right: Tensor) -> None:
        """Add `left` [n, t] times `right` [t, k] to the gradient of `param` [n, k], rounded as autograd would.

        Here and below autograd must be off, as it is in a backward.
        """
        grad = param.grad
        if grad is not None and grad.dtype is left.dtype and not grad.is_sparse:
            add_product(grad, left, right)
            self.added(param)
        else:
            self.add(param, product(left, right))

    def add(self, param: Tensor, gradient: Tensor) -> None:
        """Add `gradient`, which nobody else keeps, to that of `param`."""
        grad = param.grad
        if grad is None:
            param.grad = gradient.to(param.dtype)
        elif grad.is_sparse:
            param.grad = gradient.to(param.dtype).add_(grad)
        else:
            grad.add_(gradient)
        self.added(param)

    def add_rows(self, param: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Add each of `rows` [t, k] to row `ids` [t] of the gradient of `param` [n, k]."""
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.index_put_((ids,), rows, accumulate=True)
        self.added(param)


def accumulation_of(param: Tensor) -> Accumulation | None:
    """Who lets gradients of `param` be added at once; None where autograd has to do it."""
    found: Accumulation | None = getattr(param, MARK, None)
    return found if found is not None and found.allows(param) else None


def weight_gradient(param: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
    """For a backward: `left` [n, t] times `right` [t, k], the gradient of `param` [n, k]; None where it was added."""
    into = accumulation_of(param)
    if into is None or not into.is_open:
        return product(left, right).to(param.dtype)
    into.add_product(param, left, right)
    return None
