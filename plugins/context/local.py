"""Attention of this rank's queries against key blocks that come one after another.

It is: the online softmax over blocks, forward and backward: `Row` gathers output and log-sum-exp in fp32 (fp64 for
fp64), `Gradients` the gradients. Every method is this plus its way of bringing the blocks; with one block, and nobody
to bring more, it is `attention_alone`. It is not: communication.

Merging (Milakov & Gimelshein 2018; Rabe & Staats 2021): with output o and log-sum-exp l of the keys so far and o', l'
of further keys, l := log(e^l + e^l') and o := o + sigmoid(l' - l) (o' - o), with l before it changes. A nan of the
model stays one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from parallax.plugins.context import kernels
from parallax.plugins.context.base import AttentionSpec, SequenceShards
from parallax.plugins.context.buffers import Sums
from parallax.plugins.context.scores import scoring_of
from parallax.plugins.context.shards import Ranges
from parallax.plugins.context.tiles import Blocking, Tile, Visible, plan

BLOCKING = {"cpu": Blocking(256, 2048)}
GPU_BLOCKING = Blocking(1024, 4096)
INF = float("inf")


def tiles_of(q: Tensor, spec: AttentionSpec, queries: Ranges, keys: Ranges, tokens: int) -> tuple[Tile, ...]:
    """The tiles of `q` at positions `queries` against keys at positions `keys`."""
    visible = Visible(spec.causal, spec.window)
    biased = spec.window is not None or spec.documents is not None or spec.alibi_slopes is not None
    fused = kernels.choose(q, False, spec.softcap, spec.dropout_p > 0) is not kernels.PLAIN
    blocking = None if fused and not biased else BLOCKING.get(q.device.type, GPU_BLOCKING)
    return plan(queries, keys, tokens, visible, spec.documents, blocking)


def exact(x: Tensor) -> torch.dtype:
    """The dtype sums are kept in."""
    return torch.promote_types(x.dtype, torch.float32)


class Row:
    """Output and log-sum-exp of the queries `q` over the keys seen so far."""

    def __init__(self, q: Tensor, spec: AttentionSpec) -> None:
        self.q, self.spec = q, spec
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def see(self, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> None:
        """Add the keys `k` and values `v`, as far as `tiles` says."""
        for tile in tiles:
            rows, columns = slice(*tile.q), slice(*tile.k)
            out, lse = kernels.forward(
                self.q[:, :, rows], k[:, :, columns], v[:, :, columns], scoring_of(tile, self.spec, self.q)
            )
            self._add(out, lse, rows)

    def _add(self, out: Tensor, lse: Tensor, rows: slice) -> None:
        if self._out is None or self._lse is None:
            if out.shape[2] == self.q.shape[2]:
                self._out, self._lse = out.to(exact(out)), lse
                return
            self._start(out.shape[-1])
            assert self._out is not None and self._lse is not None
        so_far = self._lse[:, :, rows]
        share = torch.sigmoid((lse - so_far).masked_fill_(lse == -INF, -INF))  # -inf - -inf is nan
        self._out[:, :, rows].lerp_(out.to(self._out.dtype), share.unsqueeze(-1))
        torch.logaddexp(so_far, lse, out=so_far)

    def _start(self, value_dim: int) -> None:
        shape, dtype = self.q.shape[:3], exact(self.q)
        self._out = self.q.new_zeros((*shape, value_dim), dtype=dtype)
        self._lse = self.q.new_full(shape, -INF, dtype=dtype)

    def finish(self, sinks: Tensor | None, value_dim: int) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp for `Gradients`: with the sinks, and 0 in rows that see no key.

        A sink is one more key with value 0: it takes its share of the weights and gives nothing.
        """
        if self._out is None or self._lse is None:
            self._start(value_dim)
        out, lse = self._out, self._lse
        assert out is not None and lse is not None
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
            out, lse = out * torch.exp(lse - whole).unsqueeze(-1), whole
        return out.to(self.q.dtype), lse.masked_fill(lse == -INF, 0)


class Gradients:
    """Gradient of the queries over the keys seen so far; those of keys and values are handed on.

    Args:
        grad: gradient of the output.
        q: the queries.
        out, lse: what `Row.finish` gave.
        spec: as in the forward.
    """

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec) -> None:
        self.grad, self.q, self.out, self.lse, self.spec = grad, q, out, lse, spec
        self._dq: Tensor | None = None

    def see(
        self, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], add: Callable[[slice, Tensor, Tensor], None]
    ) -> None:
        """Go through the keys `k` and values `v`; `add(columns, dk, dv)` takes their gradients, tile by tile."""
        for tile in tiles:
            rows, columns = slice(*tile.q), slice(*tile.k)
            dq, dk, dv = kernels.backward(
                self.grad[:, :, rows], self.q[:, :, rows], k[:, :, columns], v[:, :, columns], self.out[:, :, rows],
                self.lse[:, :, rows], scoring_of(tile, self.spec, self.q),
            )  # fmt: skip
            add(columns, dk, dv)
            self._add(dq, rows)

    def _add(self, dq: Tensor, rows: slice) -> None:
        if self._dq is None:
            if dq.shape[2] == self.q.shape[2]:
                self._dq = dq.to(exact(dq))
                return
            self._dq = self.q.new_zeros(self.q.shape, dtype=exact(self.q))
        self._dq[:, :, rows] += dq

    @property
    def dq(self) -> Tensor:
        return torch.zeros_like(self.q) if self._dq is None else self._dq.to(self.q.dtype)

    def dsinks(self, sinks: Tensor) -> Tensor:
        """The gradient of the sinks from this rank's queries: the weight of the sink times (0 - grad . out)."""
        inner = (self.grad.to(exact(self.q)) * self.out).sum(-1)
        weights = torch.exp(sinks.to(inner.dtype).view(1, -1, 1) - self.lse)
        return -(weights * inner).sum((0, 2)).to(sinks.dtype)


class _Alone(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spec: AttentionSpec, shards: SequenceShards
    ) -> Tensor:
        row = Row(q, spec)
        row.see(k, v, tiles_of(q, spec, shards.whole, shards.whole, shards.tokens))
        out, lse = row.finish(sinks, v.shape[-1])
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.rest = spec, shards
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        spec, shards = ctx.rest
        gradients, sums = Gradients(grad, q, out, lse, spec), Sums(k, v, exact(q))
        gradients.see(k, v, tiles_of(q, spec, shards.whole, shards.whole, shards.tokens), sums.add)
        dk, dv = sums.total()
        dsinks = gradients.dsinks(sinks) if ctx.needs_input_grad[3] else None
        return gradients.dq, dk.to(q.dtype), dv.to(q.dtype), dsinks, None, None


def attention_alone(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, shards: SequenceShards) -> Tensor:
    """Attention of a whole sequence on one rank: `shards` has size 1."""
    return cast(Tensor, _Alone.apply(q, k, v, spec.sinks, spec, shards))
