"""Operations on vocabulary-parallel logits one element at a time, and their conversions.

It is: handlers (`logits_table.py`). It is not: anything that changes a shape or looks across the vocabulary.

Other tensors in an operation are whole and the same on every rank. Where they meet the piece they enter the cut region
as a layer's input does, so their gradients are summed over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallax.plugins.tensor.functions import copy_to_region
from parallax.plugins.tensor.logits import NotHandled, VocabParallelLogits, rebase, unwrap, wrap
from parallax.plugins.tensor.logits_table import handles, like
from parallax.plugins.tensor.metadata import METADATA, methods

Logits = VocabParallelLogits


@handles(*METADATA)
def _itself(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


_UNARY = methods(
    "float", "double", "half", "bfloat16", "type_as", "contiguous", "clone", "tanh", "neg", "__neg__", "exp", "relu",
    "sigmoid", "abs", "square", "clamp", "clip", "isnan", "isinf", "isfinite",
)  # fmt: skip
_BINARY = methods(
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "maximum", "minimum", "masked_fill",
    "where", "rsub", "eq", "ne", "lt", "le", "gt", "ge", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
    "__rmul__", "__truediv__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
)  # fmt: skip
_IN_PLACE = methods("add_", "sub_", "mul_", "div_", "tanh_", "masked_fill_", "clamp_", "__iadd__", "__isub__",
                     "__imul__", "__itruediv__")  # fmt: skip


@handles(*_UNARY, *_BINARY, torch.where)
def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Logits))
    if "out" in kwargs or not _fits(first, (*args, *kwargs.values())):
        return NotHandled
    args, kwargs = [_operand(x, first) for x in args], {k: _operand(x, first) for k, x in kwargs.items()}  # type: ignore
    return like(first, func(*args, **kwargs))


@handles(*_IN_PLACE)
def _elementwise_in_place(func: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(target, Logits) or not _fits(target, (*args, *kwargs.values())):
        return NotHandled
    piece = unwrap(target)
    func(piece, *(_operand(x, target) for x in args), **{k: _operand(x, target) for k, x in kwargs.items()})
    return rebase(target, piece)


def _fits(like: Logits, values: tuple[Any, ...]) -> bool:
    """Whether each value has the vocabulary where `like` has it, or broadcasts over it."""
    others = [x for x in values if isinstance(x, Logits)]
    return all(x.cut == like.cut and x.vocab_dim == like.vocab_dim for x in others)


def _operand(x: Any, like: Logits) -> Any:
    """What of `x` meets the piece: its own piece, or this rank's part where it spans the vocabulary."""
    if isinstance(x, Logits):
        return unwrap(x)
    if not isinstance(x, Tensor):
        return x
    if x.requires_grad:
        x = copy_to_region(x, like.cut.comm)
    at = x.dim() + like.vocab_dim
    return like.cut.take(x, at) if at >= 0 and x.shape[at] == like.cut.width != 1 else x


@handles(Tensor.to)
def _to(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    other = args[0] if args and isinstance(args[0], Tensor) else None
    if not isinstance(x, Logits) or isinstance(other, Logits):
        return NotHandled
    device = kwargs.get("device", None if other is None else other.device)
    device = next((a for a in args if isinstance(a, (str, int, torch.device))), device)
    if device is not None and torch.empty((), device=device).device != x.piece.device:
        return NotHandled  # the ranks meet on the device of their piece
    piece = unwrap(x)
    moved = func(piece, *args, **kwargs)
    return x if moved is piece else like(x, moved)


@handles(*methods("detach"), Tensor.data.__get__)  # type: ignore[attr-defined]
def _detach(func: Any, x: Logits, *args: Any) -> Any:
    return wrap(x.piece, x.cut, x.vocab_dim)


@handles(*methods("zeros_like", "ones_like", "empty_like"))
def _like_plain(func: Any, x: Logits, **kwargs: Any) -> Any:
    return getattr(torch, func.__name__.removesuffix("_like"))(
        tuple(x.shape), **{"dtype": x.dtype, "device": x.device, **kwargs}
    )
