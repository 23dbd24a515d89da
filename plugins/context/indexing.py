"""Positions and shifts in the user's code.

It is: what `torch.arange(tokens)`, `table[:tokens]`, `x[:, :-1]` and `x[:, 1:]` mean on a sequence that is cut: the
positions that are here, the rows of these positions, and the shift by one over the whole sequence. It is not: general
indexing; what takes some positions of a cut sequence and is not one of these is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallax.plugins.context import sizes
from parallax.plugins.context.sequence import CutSequence
from parallax.plugins.context.tracked import as_target
from parallax.strategies.batch import IGNORE_INDEX

_ALL = slice(None)


def arange(sequence: CutSequence, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """`arange` over as many numbers as there are tokens here: their positions in the whole sequence.

    Raises:
        ValueError: it may as well count something of the model; see `sizes.check`.
    """
    return numbered(sequence, func, *args, checked=True, **kwargs)


def numbered(sequence: CutSequence, func: Any, *args: Any, checked: bool = False, **kwargs: Any) -> Tensor:
    """The same for code that counts nothing but tokens."""
    start, end, step = {1: (0, *args, 1), 2: (*args, 1), 3: args}.get(len(args), (None, None, None))
    start, end, step = kwargs.get("start", start or 0), kwargs.get("end", end), kwargs.get("step", step or 1)
    numbers = all(isinstance(n, int) for n in (start, end, step))
    if not numbers or (start, end, step) != (0, sequence.local, 1) or kwargs.get("out") is not None:
        return func(*args, **kwargs)
    if checked:
        sizes.check(sequence, end, f"torch.arange({end})")
    device = kwargs.get("device")
    positions = sequence.positions(torch.get_default_device() if device is None else device)
    positions = positions.to(kwargs.get("dtype") or torch.int64, copy=True)
    return positions.requires_grad_() if kwargs.get("requires_grad") else positions


def getitem(sequence: CutSequence, func: Any, tensor: Tensor, index: Any) -> Any:
    """`tensor[index]`; see the module."""
    entries = _entries(tensor, index)
    if entries is None:
        return func(tensor, index)
    n = sequence.local
    cut = tensor.dim() in (2, 3) and tuple(tensor.shape[:2]) == (sequence.rows, n)
    if cut and not _is_all(entries[1], n):
        rest = [entry for dim, entry in enumerate(entries) if dim != 1]
        return _part(sequence, tensor, entries[1], whole=all(e == _ALL for e in rest))
    shape = tensor.shape
    dims = [dim for dim, entry in enumerate(entries) if shape[dim] > n and _bounds(entry, shape[dim]) == (0, n, 1)]
    if dims and _is_table(sequence, tensor, dims):
        for dim in dims:
            stop = entries[dim].stop
            sizes.check(sequence, stop, f"[:{stop}] of a tensor of shape {tuple(shape)}")
            tensor = _rows(sequence, tensor, dim)
            entries[dim] = _ALL
        index = tuple(entries)
    return func(tensor, index)


def _entries(tensor: Tensor, index: Any) -> list[Any] | None:
    """One int or slice for each dim of `tensor`; None for any other index."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(e, (int, slice)) or e is Ellipsis for e in entries) or entries.count(Ellipsis) > 1:
        return None
    missing = tensor.dim() - len(entries) + entries.count(Ellipsis)
    at = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    return entries[:at] + [_ALL] * missing + entries[at + 1 :]


def _bounds(entry: Any, size: int) -> tuple[int, int, int] | None:
    if isinstance(entry, slice) and all(n is None or isinstance(n, int) for n in (entry.start, entry.stop, entry.step)):
        return entry.indices(size)
    return None


def _is_all(entry: Any, size: int) -> bool:
    return _bounds(entry, size) == (0, size, 1)


def _is_table(sequence: CutSequence, tensor: Tensor, dims: list[int]) -> bool:
    """Whether `dims` of `tensor` are positions: it belongs to the model, or no other dim can be the tokens."""
    if sequence.belongs_to_model(tensor):
        return True
    others = [size for dim, size in enumerate(tensor.shape) if dim not in dims]
    return sequence.local not in others and sequence.rows * sequence.local not in others


def _rows(sequence: CutSequence, table: Tensor, dim: int) -> Tensor:
    tokens = sequence.cut.tokens
    if table.shape[dim] < tokens:
        raise ValueError(
            f"a table of shape {tuple(table.shape)} has {table.shape[dim]} positions, but the sequences have {tokens} "
            f"tokens, cut over {sequence.comm.size} context ranks"
        )
    return table.index_select(dim, sequence.positions(table.device))


def _part(sequence: CutSequence, tensor: Tensor, entry: Any, *, whole: bool) -> Tensor:
    """`tensor[:, entry]` of tokens [batch, local, ...]: the two halves of a shift by one.

    `x[:, :-1]` stays as it is and `x[:, 1:]` is what stands one position further; the last token of the sequence, which
    both would leave out, gets a label that is ignored, or a mask of 0.
    """
    n = sequence.local
    shift = _bounds(entry, n)
    if whole and shift == (0, n - 1, 1) and n > 1:
        sequence.shortened |= not tensor.is_floating_point()
        return tensor
    if whole and shift == (1, n, 1) and tensor.dim() == 2 and not tensor.requires_grad:
        sequence.shifted = True
        return as_target(sequence, sequence.next_token(tensor, _fill(sequence, tensor)))
    raise ValueError(
        f"the code takes [:, {_text(entry)}] of a tensor of shape {tuple(tensor.shape)}, but dim 1 holds only the {n} "
        f"tokens of a sequence that are on this context rank; of a cut sequence only logits[:, :-1] with labels[:, 1:] "
        f"are followed (what predicts the next token). Pool or pick tokens with context_parallel_size=1"
    )


def _fill(sequence: CutSequence, tensor: Tensor) -> float | Tensor:
    """What comes after the last token: an ignored label, or 0 in a mask."""
    if tensor.dtype == torch.bool or tensor.is_floating_point() or any(tensor is m for m in sequence.masks):
        return 0
    if any(tensor is t for t in sequence.tokens):
        return IGNORE_INDEX
    # Made by the user's code: numbers that are only 0 and 1 are a mask.
    bounds = torch.stack([tensor.amin(), tensor.amax().neg()])
    sequence.comm.all_reduce(bounds, torch.distributed.ReduceOp.MIN)
    return torch.where((bounds[0] >= 0) & (bounds[1] >= -1), 0, IGNORE_INDEX)


def _text(entry: Any) -> str:
    if not isinstance(entry, slice):
        return str(entry)
    parts = [entry.start, entry.stop] + ([entry.step] if entry.step is not None else [])
    return ":".join("" if p is None else str(p) for p in parts)
