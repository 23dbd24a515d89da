"""Where calls of the user's code turn to the whole sequence.

It is: the list of torch functions that mean something else on a sequence that is cut, and the mode that hands them to
whoever knows (`functional.py`, `sizes.py`, `indexing.py`, `losses.py`, `tracked.py`) while a step runs. It is not: what
they do there. Models of Hugging Face run outside of it (`hf.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallax.plugins.context import functional, indexing, losses, multi_head, sizes, tracked
from parallax.plugins.context.sequence import CutSequence
from parallax.strategies.function_modes import BACKWARDS, backward_inside

Handler = Callable[..., Any]
"""(sequence, function, *args, **kwargs of the call) -> its result."""

HANDLERS: Mapping[Any, Handler] = {
    F.scaled_dot_product_attention: functional.torch_attention,
    functional.scaled_dot_product_attention: functional.our_attention,
    F.multi_head_attention_forward: multi_head.multi_head_attention,
    F.softmax: functional.softmax,
    torch.softmax: functional.softmax,
    Tensor.softmax: functional.softmax,
    Tensor.size: sizes.read,
    Tensor.shape.__get__: sizes.read,  # type: ignore[attr-defined]
    torch.arange: indexing.arange,
    Tensor.__getitem__: indexing.getitem,
    F.cross_entropy: losses.cross_entropy,
    F.nll_loss: losses.nll_loss,
    torch.sum: tracked.counted,
    Tensor.sum: tracked.counted,
    torch.count_nonzero: tracked.counted,
    Tensor.count_nonzero: tracked.counted,
}


class Routed(TorchFunctionMode):
    """While it is entered, the calls in `handlers` go to their handlers.

    What a handler itself calls is not routed: torch leaves a mode while its handler runs. A backward must not leave it:
    recomputed layers call again what is routed.
    """

    def __init__(self, sequence: CutSequence, handlers: Mapping[Any, Handler] = HANDLERS) -> None:
        super().__init__()
        self._sequence, self._handlers = sequence, handlers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in BACKWARDS:
            return backward_inside(self, func, *args, **(kwargs or {}))
        handler = self._handlers.get(func)
        if handler is None or self._sequence.inside or _in_backward():
            return func(*args, **(kwargs or {}))
        return handler(self._sequence, func, *args, **(kwargs or {}))


def _in_backward() -> bool:
    """Whether a backward runs itself, rather than a forward or what is recomputed for a backward."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


@contextmanager
def paused(sequence: CutSequence) -> Iterator[None]:
    """Within, calls are not routed; where ours is the innermost mode it is left, so that they cost nothing more."""
    mode = torch.overrides._get_current_function_mode()
    ours = mode if isinstance(mode, Routed) else None
    with sequence.handling():
        if ours is not None:
            ours.__exit__(None, None, None)
        try:
            yield
        finally:
            if ours is not None:
                ours.__enter__()


@contextmanager
def numbering(sequence: CutSequence) -> Iterator[None]:
    """Within, also where calls are not routed, `arange` over the tokens here gives their positions."""
    before, sequence.inside = sequence.inside, False
    try:
        with Routed(sequence, {torch.arange: indexing.numbered}):
            yield
    finally:
        sequence.inside = before
