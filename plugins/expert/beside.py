"""A block's shared expert, computed while the tokens of its routed experts are on their way.

It is: the early call of a module that the block's own code calls later with the same tokens, and the hand-over of what
it returned. It is not: a change of the block: where its code calls the shared expert first, or with other tokens,
nothing is done early.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from parallax.plugins.expert.block import find_shared
from parallax.plugins.tensor.swap import swap


class Beside:
    """The shared expert of one block.

    Nothing outlives a call of the block. One that returns without asking for an early result turns it off; one that is
    stopped does not, as torch stops a recomputation once backward has all it needs, before the block asks.

    Attributes:
        module: itself.
        ready: the tokens it was called early with, and what it returned; None when there is nothing to hand over.
        on: whether it is called early; off for good once an early result was not asked for.
    """

    def __init__(self, block: nn.Module, module: nn.Module) -> None:
        self.module = module
        self.ready: tuple[Tensor, Tensor] | None = None
        self.on = True
        cls: Any = type(module)
        outer: Any = type(block)

        def call(shared: Any, *args: Any, **kwargs: Any) -> Any:
            found = shared.beside._take(args[0]) if len(args) == 1 and not kwargs else None
            return cls.__call__(shared, *args, **kwargs) if found is None else found

        def call_block(whole: Any, *args: Any, **kwargs: Any) -> Any:
            beside: Beside = whole.beside
            try:
                out = outer.__call__(whole, *args, **kwargs)
                beside.on = beside.on and beside.ready is None
                return out
            finally:
                beside.ready = None

        swap(module, __call__=call)
        swap(block, __call__=call_block)
        for one in (module, block):
            one.__dict__["beside"] = self  # where a copy of the model finds its own
        self._compute = cls.__call__

    def start(self, hidden: Tensor) -> None:
        """Call it with `hidden` [tokens, h] now."""
        self.on = self.on and self.ready is None
        self.ready = (hidden, self._compute(self.module, hidden)) if self.on else None

    def _take(self, hidden: Any) -> Tensor | None:
        """What it has returned for the same tokens, in the shape of `hidden`."""
        if self.ready is None or not isinstance(hidden, Tensor):
            return None
        (tokens, out), self.ready = self.ready, None
        same = hidden.data_ptr() == tokens.data_ptr() and hidden.numel() == tokens.numel()
        if not same or hidden.shape[-1] != tokens.shape[-1] or hidden._version != tokens._version:
            self.on = False
            return None
        return out.view(*hidden.shape[:-1], out.shape[-1])


def find_beside(block: nn.Module, experts: str) -> Beside | None:
    """The shared expert of `find_shared`, ready to be called early."""
    shared = find_shared(block, experts)
    return None if shared is None or not _takes_tokens_alone(shared) else Beside(block, shared)


def _takes_tokens_alone(module: nn.Module) -> bool:
    """Whether it can be called with tokens only; Inkling's shared experts also take what the router makes."""
    found = inspect.signature(module.forward).parameters.values()
    return sum(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found) <= 1
