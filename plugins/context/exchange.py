"""The all-to-all between sequence shards and head shards, as autograd functions.

It is: DeepSpeed-Ulysses' exchange (Jacobs et al. 2023): before it every rank of the group has all heads of its part of
the sequence, after it all of the group's sequence for its part of the heads, positions ascending; and the way back.
It is not: attention.

Query heads are dealt out in runs. A rank needs the key and value heads of its query heads: with fewer of them than
ranks they are sent to several (`replication`), and their gradients summed on the way back. Queries, keys and values are
one message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from parallax.plugins.context.base import SequenceShards
from parallax.strategies.comm import AxisComm


def replication(kv_heads: int, size: int) -> int:
    """How often every key and value head must be there for `size` ranks to get equally many, each its own queries'.

    With h query heads, a multiple of both `size` and `kv_heads`, this many copies also divide the queries of one head.
    """
    return size // gcd(kv_heads, size)


class Exchange:
    """One direction's geometry: which rows of the group's sequence each of its ranks holds.

    Args:
        comm: the group that exchanges.
        shards: the cut over the whole axis; the group is `comm.size` neighbours of it.
        group: how many groups come before this one.
    """

    def __init__(self, comm: AxisComm, shards: SequenceShards, group: int) -> None:
        self.comm = comm
        start: dict[int, int] = {}  # global position of the first row of a range -> row in the group's sequence
        at = 0
        ranks = [shards.ranges(group * comm.size + i) for i in range(comm.size)]
        for begin, end in sorted(piece for ranges in ranks for piece in ranges):
            start[begin] = at
            at += end - begin
        self.rows, self.local_rows = at, at // comm.size
        self.pieces = [[(start[begin], end - begin) for begin, end in ranges] for ranges in ranks]

    def merge(self, parts: Tensor) -> Tensor:
        """[size, batch, heads, local, dim], one part of the sequence per rank, as [batch, heads, rows, dim]."""
        out = parts.new_empty((*parts.shape[1:3], self.rows, parts.shape[-1]))
        for part, pieces in zip(parts, self.pieces, strict=True):
            at = 0
            for row, length in pieces:
                out[:, :, row : row + length] = part[:, :, at : at + length]
                at += length
        return out

    def split(self, whole: Tensor, parts: Tensor) -> None:
        """The inverse of `merge`, into `parts`."""
        for part, pieces in zip(parts, self.pieces, strict=True):
            at = 0
            for row, length in pieces:
                part[:, :, at : at + length] = whole[:, :, row : row + length]
                at += length


def _views(flat: Tensor, shapes: list[tuple[int, ...]], size: int) -> list[Tensor]:
    """[size, n] as views of [size, *shape] behind each other."""
    widths = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(size, *shape) for part, shape in zip(flat.split(widths, 1), shapes, strict=True)]


def _swap(
    tensors: Sequence[Tensor], shapes: list[tuple[int, ...]], put: Callable[[Tensor, Tensor], object], comm: AxisComm
) -> list[Tensor]:
    """What the group's ranks sent here; `put(tensor, view)` fills a view [size, *shape] of what is sent to them."""
    numel = sum(x.numel() for x in tensors)
    sent, got = (tensors[0].new_empty(comm.size, numel // comm.size) for _ in range(2))
    for x, view in zip(tensors, _views(sent, shapes, comm.size), strict=True):
        put(x, view)
    comm.all_to_all_into(got, sent)
    return _views(got, shapes, comm.size)


def _to_heads(tensors: Sequence[Tensor], exchange: Exchange) -> list[Tensor]:
    """Sequence shards to head shards; every tensor's heads are a multiple of the group's size."""
    comm = exchange.comm
    shapes = [(x.shape[0], x.shape[1] // comm.size, *x.shape[2:]) for x in tensors]

    def put(x: Tensor, view: Tensor) -> None:
        view.copy_(x.unflatten(1, (comm.size, -1)).transpose(0, 1))

    return [exchange.merge(view) for view in _swap(tensors, shapes, put, comm)]


def _to_sequence(tensors: Sequence[Tensor], exchange: Exchange) -> list[Tensor]:
    """Head shards to sequence shards: the inverse of `_to_heads`, as views [batch, size, heads, local, dim]."""
    shapes = [(*x.shape[:2], exchange.local_rows, x.shape[-1]) for x in tensors]
    return [view.transpose(0, 1) for view in _swap(tensors, shapes, exchange.split, exchange.comm)]


class _ToHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange
    ) -> tuple[Tensor, Tensor, Tensor]:
        copies = replication(k.shape[1], exchange.comm.size)
        ctx.rest = exchange, copies
        if copies > 1:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        return cast(tuple[Tensor, Tensor, Tensor], tuple(_to_heads([q, k, v], exchange)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        exchange, copies = ctx.rest
        parts = _to_sequence([dq, dk, dv], exchange)
        dq, dk, dv = (x.clone(memory_format=torch.contiguous_format).flatten(1, 2) for x in parts)  # each freed alone
        if copies > 1:
            dk, dv = dk.unflatten(1, (-1, copies)).sum(2), dv.unflatten(1, (-1, copies)).sum(2)
        return dq, dk, dv, None


class _ToSequence(Function):
    """Into `whole` [batch, local, heads, dim], in place: its heads `at`, one run after another."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, out: Tensor, exchange: Exchange, at: slice) -> Tensor:
        ctx.rest = exchange, at
        ctx.mark_dirty(whole)
        part = _to_sequence([out], exchange)[0]
        whole[:, :, at].unflatten(2, part.shape[1:3]).copy_(part.permute(0, 3, 1, 2, 4))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, at = ctx.rest
        return grad, _to_heads([grad[:, :, at].transpose(1, 2)], exchange)[0], None, None


def to_heads(q: Tensor, k: Tensor, v: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
    """q [batch, heads, local, dim] -> [batch, heads / size, rows, dim]; k and v likewise, with heads replicated."""
    return cast(tuple[Tensor, Tensor, Tensor], _ToHeads.apply(q, k, v, exchange))


def to_sequence(whole: Tensor, out: Tensor, exchange: Exchange, at: slice) -> Tensor:
    """`whole` [batch, local, heads, dim], in place, with `out` [batch, heads / size, rows, dim] as its heads `at`."""
    return cast(Tensor, _ToSequence.apply(whole, out, exchange, at))
