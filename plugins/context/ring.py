"""Ring attention: keys and values go round, every rank keeps its queries.

It is: Liu et al. 2023 (*Ring Attention with Blockwise Transformers*), with the zigzag order where the shards have it.
It is not: kernels and merging, or attention of a rank alone (`local.py`).

Forward, rank r of c: at step i the block of rank r - i is at hand; it is sent on to r + 1 while it is computed with,
and the next comes in from r - 1. Two buffers take turns. Blocks that nobody sees are not fetched: with a window and
contiguous shards the ring stops early, after the same number of steps on every rank.

Backward: keys and values go round again, and their gradients follow one step behind: the gradient of a block begins
with the rank after its own, arrives with what the ranks before have added, is added to, and is sent on; from the last
step it goes home directly, where the rank's own share has stayed. Gradients travel in fp32 (fp64 for fp64), so that
they are rounded once.

Heads go round in runs (`runs.py`), so that what is under way stays small beside q, k and v.

Saved for backward: q, k and v as they came, the output, the log-sum-exp. Keys and values are packed for the first send
and dropped after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from parallax.plugins.context.base import AttentionMethod, AttentionSpec, SequenceShards
from parallax.plugins.context.buffers import Pair, Scratch, Sums
from parallax.plugins.context.local import Gradients, Row, attention_alone, exact, tiles_of
from parallax.plugins.context.runs import Whole, count, cut
from parallax.plugins.context.tiles import Visible, sees
from parallax.strategies.comm import AxisComm, Work

_KEYS, _GRADS = 0, 1  # tags: both are under way at the same time


def steps_of(spec: AttentionSpec, shards: SequenceShards) -> int:
    """Steps of the ring: 1 plus the largest distance from a rank back to one whose keys it sees. Documents aside."""
    visible = Visible(spec.causal, spec.window)

    def seen(rank: int, distance: int) -> bool:
        other = (rank - distance) % shards.size
        return sees(shards.ranges(rank), shards.ranges(other), shards.tokens, visible)

    far = [d for d in range(1, shards.size) if any(seen(rank, d) for rank in range(shards.size))]
    return 1 + max(far, default=0)


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spec: AttentionSpec, shards: SequenceShards,
        comm: AxisComm, number: int,
    ) -> Tensor:  # fmt: skip
        whole = Whole(q.shape[1])
        for mine, theirs in _runs(q, k, number):
            row = Row(q[:, mine], spec.of_heads(mine.start, mine.stop))
            _see_all(row, k[:, theirs], v[:, theirs], shards, comm)
            whole.put(mine, *row.finish(None if sinks is None else sinks[mine], v.shape[-1]))
        out, lse = whole.held
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.rest = spec, shards, comm, number
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        spec, shards, comm, number = ctx.rest
        queries, keys, dsinks = Whole(q.shape[1]), Whole(k.shape[1]), []
        for mine, theirs in _runs(q, k, number):
            spec_of_run = spec.of_heads(mine.start, mine.stop)
            gradients = Gradients(grad[:, mine], q[:, mine], out[:, mine], lse[:, mine], spec_of_run)
            keys.put(theirs, *_go_round(gradients, k[:, theirs], v[:, theirs], shards, comm))
            queries.put(mine, gradients.dq)
            if ctx.needs_input_grad[3]:
                dsinks.append(gradients.dsinks(sinks[mine]))
        return *queries.held, *keys.held, torch.cat(dsinks) if dsinks else None, None, None, None, None


def _runs(q: Tensor, k: Tensor, number: int) -> Iterator[tuple[slice, slice]]:
    """The heads of the queries, and those of the keys and values they look at, of one run after another."""
    return zip(cut(q.shape[1], number), cut(k.shape[1], number), strict=True)


def _see_all(row: Row, k: Tensor, v: Tensor, shards: SequenceShards, comm: AxisComm) -> None:
    """Take keys and values round, and let `row` see all of them."""
    here, steps = Pair.pack(k, v), steps_of(row.spec, shards)
    queries, scratch = shards.ranges(comm.index), Scratch(here)
    for step in range(steps):
        coming, work = here, None
        if step + 1 < steps:
            coming = scratch(f"keys {step % 2}")
            work = comm.shift(here.flat, coming.flat, tag=_KEYS)
        keys = shards.ranges((comm.index - step) % comm.size)
        row.see(here.k, here.v, tiles_of(row.q, row.spec, queries, keys, shards.tokens))
        _wait(work)
        here = coming


def _go_round(
    gradients: Gradients, k: Tensor, v: Tensor, shards: SequenceShards, comm: AxisComm
) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's keys and values."""
    spec, q, queries = gradients.spec, gradients.q, shards.ranges(comm.index)
    steps = steps_of(spec, shards)
    here, dtype = Pair.pack(k, v), exact(q)
    scratch, home = Scratch(here), Sums(k, v, dtype)
    message, incoming = here, None
    for step in range(steps):
        last = step + 1 == steps
        coming, work = here, None
        if not last:
            coming = scratch(f"keys {step % 2}")
            work = comm.shift(here.flat, coming.flat, tag=_KEYS)
        if step == 1:
            message = scratch("grads 0", dtype)
        sums = _Arriving(k, v, message, dtype, incoming) if step else home
        keys = shards.ranges((comm.index - step) % comm.size)
        gradients.see(here.k, here.v, tiles_of(q, spec, queries, keys, shards.tokens), sums.add)
        sums.total()
        if step:  # onward with what the next rank computes with next; after the last step home, `step` ranks back
            free = here if last and dtype == q.dtype else scratch(f"grads {step % 2}", dtype)
            incoming = comm.shift(message.flat, free.flat, distance=-step if last else 1, tag=_GRADS)
            message = free
        _wait(work)
        here = coming
    if incoming is not None:
        incoming.wait()
        home.add(slice(None), message.k, message.v)
    dk, dv = home.total()
    return dk.to(q.dtype), dv.to(q.dtype)


class _Arriving(Sums):
    """Sums that may still be coming in: waited for when the first tile of the block has been computed."""

    def __init__(self, k: Tensor, v: Tensor, message: Pair, dtype: torch.dtype, incoming: Work | None) -> None:
        super().__init__(k, v, dtype, message, begun=incoming is not None)
        self._incoming = incoming

    def add(self, columns: slice, dk: Tensor, dv: Tensor) -> None:
        self._arrive()
        super().add(columns, dk, dv)

    def total(self) -> tuple[Tensor, Tensor]:
        self._arrive()
        return super().total()

    def _arrive(self) -> None:
        _wait(self._incoming)
        self._incoming = None


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, shards: SequenceShards, comm: AxisComm, threads: int = 1
) -> Tensor:
    """Attention of `q` over the sequence cut over `comm` as `shards` says; see `AttentionMethod.attend`.

    `threads`: see `ContextGroups`.
    """
    if comm.size == 1:
        return attention_alone(q, k, v, spec, shards)
    nbytes = (k.numel() + v.numel()) * k.element_size()
    number = count(nbytes, q.shape[0] * q.shape[1], k.shape[1], q.device.type, threads)
    return cast(Tensor, _Ring.apply(q, k, v, spec.sinks, spec, shards, comm, number))


class RingAttention(AttentionMethod):
    """Any number of heads, keys and values of a neighbour at a time: memory and wire grow with s / c and kv heads."""

    name = "ring"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, shards: SequenceShards) -> Tensor:
        return ring_attention(q, k, v, spec, shards, self.groups.cp, self.groups.threads)
