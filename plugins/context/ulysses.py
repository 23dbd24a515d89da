"""Ulysses, and the 2-D hybrid of Ulysses and ring.

It is: heads for sequence inside a group, then a ring across groups, then back (Fang & Zhao 2024, *USP*). With one group
it is DeepSpeed-Ulysses. It is not: the exchange (`exchange.py`) or the ring (`ring.py`).

The hybrid's rank g * inner + i exchanges with its run of `inner` neighbours; together they hold what rank g of a ring
of size / inner ranks holds, in zigzag or contiguous order (`SequenceShards.grouped`).
"""

from __future__ import annotations

from torch import Tensor

from parallax.plugins.context.base import AttentionMethod, AttentionSpec, ContextGroups, SequenceShards, check_spec
from parallax.plugins.context.exchange import Exchange, to_heads, to_sequence
from parallax.plugins.context.ring import ring_attention
from parallax.strategies.comm import AxisComm


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
        exchange, mine = self._exchanges[shards], q.shape[1] // inner.size
        q, k, v = to_heads(q, k, v, exchange)
        spec = spec.of_heads(inner.index * mine, (inner.index + 1) * mine)
        out = ring_attention(q, k, v, spec, shards.grouped(inner.size), ring, self.groups.threads)
        return to_sequence(out, exchange)


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
