"""Operations that select or rearrange tokens of vocabulary-parallel logits.

It is: handlers (`logits_table.py`) for those that leave the vocabulary in one piece. It is not: arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallax.plugins.tensor.logits import NotHandled, VocabParallelLogits, unwrap, wrap
from parallax.plugins.tensor.logits_table import handles, like
from parallax.plugins.tensor.metadata import methods

Logits = VocabParallelLogits


@handles(Tensor.__getitem__)
def _index(func: Any, x: Any, index: Any) -> Any:
    if not isinstance(x, Logits) or x.vocab_dim != -1:
        return NotHandled
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(p, Logits) for p in parts):
        return NotHandled
    used = sum(_consumed(p) for p in parts)
    dots = next((i for i, p in enumerate(parts) if p is Ellipsis), None)
    reaches = used == x.dim() if dots is None else sum(_consumed(p) for p in parts[dots + 1 :]) > 0
    if reaches and parts[-1] != slice(None):  # the index names the vocabulary itself
        return NotHandled
    return like(x, unwrap(x)[index])


def _consumed(part: Any) -> int:
    """How many dims one part of an index stands for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


@handles(Tensor.view, Tensor.reshape, torch.reshape)
def _view(func: Any, x: Any, *shape: Any, **kwargs: Any) -> Any:
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else list(shape)
    if kwargs or x.vocab_dim != -1 or not sizes or not all(isinstance(n, int) for n in sizes):
        return NotHandled
    if -1 in sizes:
        rest = 1
        for n in sizes:
            rest *= n if n != -1 else 1
        if rest == 0:
            return NotHandled
        sizes[sizes.index(-1)] = x.numel() // rest
    if sizes[-1] != x.cut.width:
        return NotHandled
    return like(x, func(unwrap(x), (*sizes[:-1], x.cut.rows)))


@handles(*methods("flatten"))
def _flatten(func: Any, x: Logits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.vocab_dim != -1 or end_dim in (-1, x.dim() - 1) and start_dim not in (-1, x.dim() - 1):
        return NotHandled
    return like(x, unwrap(x).flatten(start_dim, end_dim))


@handles(*methods("unsqueeze", "squeeze", "narrow", "select", "index_select", "repeat_interleave"))
def _leading_dim(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    dim = kwargs.get("dim", args[1 if func.__name__ == "repeat_interleave" and len(args) > 1 else 0] if args else None)
    if not isinstance(x, Logits) or not isinstance(dim, int) or x.vocab_dim != -1:
        return NotHandled
    inserts = func.__name__ == "unsqueeze"
    if dim % (x.dim() + inserts) >= x.dim() - 1 + inserts:
        return NotHandled
    return like(x, func(unwrap(x), *args, **kwargs))


@handles(*methods("split", "chunk", "unbind", "tensor_split"), Tensor.__iter__)
def _pieces(func: Any, x: Logits, *args: Any, **kwargs: Any) -> Any:
    named = func.__name__ in ("unbind", "__iter__")
    dim = kwargs.get("dim", (args[0] if args else 0) if named else (args[1] if len(args) > 1 else 0))
    if x.vocab_dim != -1 or dim % x.dim() == x.dim() - 1:
        return NotHandled
    parts = [like(x, part) for part in func(unwrap(x), *args, **kwargs)]
    return iter(parts) if func is Tensor.__iter__ else tuple(parts)


@handles(torch.cat, torch.stack)
def _joined(func: Any, parts: Any, dim: int = 0, **kwargs: Any) -> Any:
    parts = list(parts)
    first = next(x for x in parts if isinstance(x, Logits))
    ndim = first.dim() + (func is torch.stack)
    alike = all(isinstance(x, Logits) and x.cut == first.cut and x.vocab_dim == -1 for x in parts)
    if kwargs or not alike or dim % ndim == ndim - 1:
        return NotHandled
    return like(first, func([unwrap(x) for x in parts], dim))


@handles(*methods("transpose", "swapaxes", "movedim", "permute"))
def _transposed(func: Any, x: Logits, *args: Any, **kwargs: Any) -> Any:
    marks = torch.empty([2 if i == x.dim() + x.vocab_dim else 1 for i in range(x.dim())], device="meta")
    where = list(func(marks, *args, **kwargs).shape).index(2)
    return wrap(func(unwrap(x), *args, **kwargs), x.cut, where - x.dim())


@handles(Tensor.mT.__get__)  # type: ignore[attr-defined]
def _mt(func: Any, x: Logits) -> Any:
    return _transposed(Tensor.transpose, x, -2, -1)
