"""Ulysses, and the 2-D hybrid of Ulysses and ring.

It is: heads for sequence inside a group, then a ring across groups, then back (Fang & Zhao 2024, *USP*). With one group
it is DeepSpeed-Ulysses. It is not: the exchange (`exchange.py`) or the ring (`ring.py`).

The hybrid's rank g * inner + i exchanges with its run of `inner` neighbours; together they hold what rank g of a ring
of size / inner ranks holds, in zigzag or contiguous order (`SequenceShards.grouped`).

Heads go there and back in runs (`runs.py`), so that what is on its way stays small.
"""

from __future__ import annotations

from torch import Size, Tensor

from parallax.plugins.context.base import AttentionMethod, AttentionSpec, ContextGroups, SequenceShards, check_spec
from parallax.plugins.context.exchange import Exchange, replication, to_heads, to_sequence
from parallax.plugins.context.ring import ring_attention
from parallax.plugins.context.runs import count, cut
from parallax.strategies.comm import AxisComm


def runs(nbytes: int, heads: Size | tuple[int, int], kv_heads: int, size: int, device: str, threads: int) -> int:
    """Into how many runs heads are cut: each has the same share of every rank's query heads and of its kv heads.

    Args:
        nbytes: of this rank's queries, keys and values.
        heads: samples, and query heads of each.
        kv_heads: of a sample, before they are replicated.
        size: ranks that exchange.
        device, threads: see `count`.
    """
    here = kv_heads * replication(kv_heads, size) // size
    return count(nbytes, heads[0] * heads[1] // size, here, device, threads)


class HybridAttention(AttentionMethod):
    """Ulysses inside the inner group, ring across: the all-to-all stays in a fast domain, the ring is short."""

    name = "hybrid"

    def __init__(self, groups: ContextGroups) -> None:
        super().__init__(groups)
        self._exchanges: dict[SequenceShards, Exchange] = {}

    @classmethod
    def check(cls, spec: AttentionSpec, heads: int, kv_heads: int, size: int, inner: int = 1) -> None:
        check_spec(spec, heads, kv_heads)
        if not 1 < inner < size or size % inner:
            valid = ", ".join(str(n) for n in range(2, size) if size % n == 0) or "none: use ring or ulysses"
            raise ValueError(
                f"attention 'hybrid' on {size} context ranks needs context_inner_size to be a divisor between 1 and "
                f"{size}, it is {inner}; possible: {valid}"
            )
        _check_heads(cls.name, heads, inner, "context_inner_size")

    def parts(self) -> tuple[AxisComm, AxisComm]:
        """The group that exchanges heads, and the ring."""
        return self.groups.inner, self.groups.outer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, shards: SequenceShards) -> Tensor:
        inner, ring = self.parts()
        if shards not in self._exchanges:
            self._exchanges = {shards: Exchange(inner, shards, ring.index)}
        exchange, heads = self._exchanges[shards], q.shape[1]
        nbytes = (q.numel() + k.numel() + v.numel()) * q.element_size()
        number = runs(nbytes, q.shape[:2], k.shape[1], inner.size, q.device.type, self.groups.threads)
        taken = (x.split(x.shape[1] // number, 1) if number > 1 else (x,) for x in (q, k, v))
        whole, each = q.new_empty(q.shape[0], q.shape[2], heads, v.shape[3]), heads // number // inner.size
        for at, queries, keys, values in zip(cut(heads, number), *taken, strict=True):
            start = at.start + inner.index * each
            out = ring_attention(
                *to_heads(queries, keys, values, exchange), spec.of_heads(start, start + each),
                shards.grouped(inner.size), ring, self.groups.threads,
            )  # fmt: skip
            whole = to_sequence(whole, out, exchange, at)
        return whole.transpose(1, 2)


class UlyssesAttention(HybridAttention):
    """The whole sequence for a part of the heads: two all-to-alls each way, whatever the sequence length."""

    name = "ulysses"

    @classmethod
    def check(cls, spec: AttentionSpec, heads: int, kv_heads: int, size: int, inner: int = 1) -> None:
        check_spec(spec, heads, kv_heads)
        _check_heads(cls.name, heads, size, "context_parallel_size")

    def parts(self) -> tuple[AxisComm, AxisComm]:
        alone = self.groups.cp.rank
        return self.groups.cp, AxisComm("cp", (alone,), alone, None, self.groups.cp.ledger)


def _check_heads(name: str, heads: int, size: int, label: str) -> None:
    if heads % size:
        valid = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"attention {name!r} deals {heads} query heads to {size} ranks, which does not come out even; "
            f"use attention 'ring', or {label} {valid}"
        )
