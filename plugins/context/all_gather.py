"""Attention with all keys and values gathered on every rank.

It is: the simplest exact method (Llama 3 technical report, section 3.3.2): one all-gather of keys and values, one
reduce-scatter of their gradients; each rank computes its own queries. Keys and values are gathered again in backward
rather than kept. It is not: sparing of memory for them: while a layer computes they are there for the whole sequence,
which is little only where there are few key and value heads.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from parallax.plugins.context.base import AttentionMethod, AttentionSpec, SequenceShards
from parallax.plugins.context.buffers import Pair, Sums
from parallax.plugins.context.local import Gradients, Row, exact, tiles_of
from parallax.strategies.comm import AxisComm


def _gather(own: Pair, comm: AxisComm) -> list[Pair]:
    """Everyone's keys and values, by rank."""
    numel = own.flat.numel()
    whole = own.flat.new_empty(comm.size, numel)
    comm.all_gather_into(whole, own.flat)
    return [own.like(part) for part in whole]


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spec: AttentionSpec, shards: SequenceShards,
        comm: AxisComm,
    ) -> Tensor:  # fmt: skip
        own, row, queries = Pair.pack(k, v), Row(q, spec), shards.ranges(comm.index)
        for rank, part in enumerate(_gather(own, comm)):
            row.see(part.k, part.v, tiles_of(q, spec, queries, shards.ranges(rank), shards.tokens))
        out, lse = row.finish(sinks, v.shape[-1])
        ctx.save_for_backward(q, own.flat, out, lse, sinks)
        ctx.shapes, ctx.rest = (k.shape, v.shape), (spec, shards, comm)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, flat, out, lse, sinks = ctx.saved_tensors
        spec, shards, comm = ctx.rest
        own, queries, gradients = Pair(flat, *ctx.shapes), shards.ranges(comm.index), Gradients(grad, q, out, lse, spec)
        dtype, numel = exact(q), flat.numel()
        sums = flat.new_empty(comm.size, numel, dtype=dtype)
        for rank, part in enumerate(_gather(own, comm)):
            tiles = tiles_of(q, spec, queries, shards.ranges(rank), shards.tokens)
            block = Sums(own.k, own.v, dtype, own.like(sums[rank]))
            gradients.see(part.k, part.v, tiles, block.add)
            block.total()
        mine = own.like(flat.new_empty(numel, dtype=dtype))
        comm.reduce_scatter_into(mine.flat, sums)
        dsinks = gradients.dsinks(sinks) if ctx.needs_input_grad[3] else None
        return gradients.dq, mine.k.to(q.dtype), mine.v.to(q.dtype), dsinks, None, None, None


class AllGatherAttention(AttentionMethod):
    """Any number of heads, one collective each way, no overlap with compute."""

    name = "all_gather"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, shards: SequenceShards) -> Tensor:
        return cast(Tensor, _AllGather.apply(q, k, v, spec.sinks, spec, shards, self.groups.cp))
