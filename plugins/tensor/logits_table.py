"""The table from torch functions to what does them on this rank's piece of vocabulary-parallel logits.

It is: how a handler gets into the table. It is not: the handlers (`logits_elements.py`, `logits_shapes.py`,
`logits_vocabulary.py`).

A handler gets the call as it was made and returns its result, or `NotHandled` when this form of it needs the whole
logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from parallax.plugins.tensor.logits import Handler, VocabParallelLogits, wrap


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Put the decorated handler in for each of `functions`."""

    def register(handler: Handler) -> Handler:
        VocabParallelLogits.handlers.update(dict.fromkeys(functions, handler))
        return handler

    return register


def like(x: VocabParallelLogits, piece: Tensor) -> Tensor:
    """Logits with another piece, cut as `x` is."""
    return wrap(piece, x.cut, x.vocab_dim)
