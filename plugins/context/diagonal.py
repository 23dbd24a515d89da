"""The backward of a causal tile in pieces, for a kernel that computes blocks at the diagonal whole.

It is: the tile as rectangles below its diagonal and small causal blocks on it, added up. torch's flash kernel for the
CPU goes through a tile in blocks of up to 256 x 512 scores, so that under a causal mask every row costs 256 scores more
than it has: an eighth of the work at 4096 rows, a quarter at 2048. In pieces it is 32. It is not: the forward, where
merging partial results takes as long as is saved.

    rows   0 |\\                 \\  causal blocks of SMALL rows, all in one call
           1 |A\\                A  their rectangles, of twice the size at each level, each level in one call
           2 |BB\\               B
           3 |BBA\\
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SMALL, UNIT = 64, 512
"""Rows of a causal block; rows from which rectangles are calls of their own, as large as the kernel has blocks for."""

Grads = tuple[Tensor, Tensor, Tensor]
Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""Gradient of the output, queries, output, log-sum-exp: [batch, heads, rows, ...]."""
Call = Callable[[Rows, tuple[Tensor, Tensor], bool], Grads]
"""(rows, (keys, values), causal) -> gradients of queries, keys and values."""


def worth(q: Tensor) -> bool:
    """Whether a causal tile of queries `q` gains: enough rows, and gradients that may be rounded once per piece."""
    return q.shape[2] >= UNIT and q.dtype in (torch.float32, torch.float64)


def in_pieces(call: Call, rows: Rows, keys: tuple[Tensor, Tensor]) -> Grads:
    """What `call(rows, keys, True)` gives, for as many rows as keys."""
    length = rows[0].shape[2]
    end = length - length % UNIT
    sums = _blocks(call, *_cut(rows, keys, slice(end), slice(end)))
    if end < length:
        dq, dk, dv = (torch.nn.functional.pad(x, (0, 0, 0, length - end)) for x in sums)
        sums = dq, dk, dv
        _add(call, rows, keys, sums, slice(end, length), slice(end, length), True)
        _add(call, rows, keys, sums, slice(end, length), slice(end), False)
    _below(call, rows, keys, sums, 0, end)
    return sums


def _cut(rows: Rows, keys: tuple[Tensor, Tensor], r: slice, c: slice) -> tuple[Rows, tuple[Tensor, Tensor]]:
    (grad, q, out, lse), (k, v) = rows, keys
    return (grad[:, :, r], q[:, :, r], out[:, :, r], lse[:, :, r]), (k[:, :, c], v[:, :, c])


def _add(
    call: Call, rows: Rows, keys: tuple[Tensor, Tensor], sums: Grads, r: slice, c: slice, causal: bool
) -> None:
    dq, dk, dv = call(*_cut(rows, keys, r, c), causal)
    sums[0][:, :, r] += dq
    sums[1][:, :, c] += dk
    sums[2][:, :, c] += dv


def _below(call: Call, rows: Rows, keys: tuple[Tensor, Tensor], sums: Grads, start: int, stop: int) -> None:
    """Add everything below the diagonal blocks of `UNIT` rows: the lower left quarter, and those of both halves."""
    if stop - start <= UNIT:
        return
    middle = start + (stop - start) // UNIT // 2 * UNIT
    _add(call, rows, keys, sums, slice(middle, stop), slice(start, middle), False)
    _below(call, rows, keys, sums, start, middle)
    _below(call, rows, keys, sums, middle, stop)


def _blocks(call: Call, rows: Rows, keys: tuple[Tensor, Tensor]) -> Grads:
    """The diagonal blocks of `UNIT` rows: their parts of the same size are further samples of one call."""
    (grad, q, out, lse), (k, v) = rows, keys
    count = q.shape[2] // SMALL

    def every(x: Tensor, size: int, at: int, step: int) -> Tensor:
        """Rows [at, at + size) of every `step`, as samples."""
        return x.unflatten(2, (-1, step))[:, :, :, at : at + size].transpose(1, 2).flatten(0, 1)

    def parts(size: int, upper: int, step: int) -> tuple[Rows, tuple[Tensor, Tensor]]:
        grads, queries, outs, lses = (every(x, size, upper, step) for x in (grad, q, out, lse))
        return (grads, queries, outs, lses), (every(k, size, 0, step), every(v, size, 0, step))

    dq, dk, dv = (
        x.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3) for x in call(*parts(SMALL, 0, SMALL), True)
    )
    size = SMALL
    while size < UNIT:
        for total, at, x in zip((dq, dk, dv), (size, 0, 0), call(*parts(size, size, 2 * size), False), strict=True):
            blocks = total.unflatten(2, (-1, 2 * size))[:, :, :, at : at + size].transpose(1, 2)
            blocks += x.unflatten(0, blocks.shape[:2])
        size *= 2
    return dq, dk, dv
