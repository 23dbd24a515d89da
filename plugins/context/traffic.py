"""What each attention method sends, as closed formulas.

It is: calls and payload bytes of one attention call by (axis, kind, phase), in the ledger's terms, which
`strategies.comm.wire_bytes` turns into bytes on the wire. It is not: a measurement; tests compare both.

With b batch, s the padded length, c ranks, h and g query and kv heads, d and e key and value dim, w bytes per element,
a bytes per element of sums (4, or 8 for fp64), n steps of the ring, KV = b (s/c) g (d + e):

| method | forward | backward |
|---|---|---|
| ring | n-1 sends of KV w | n-1 sends of KV w and n-1 of KV a |
| all_gather | one all-gather of c KV w | the same, and a reduce-scatter of c KV a |
| ulysses | all-to-all of b (s/c) (h d + g' (d + e)) w and of b (s/c) h e w | the same |
| hybrid | ulysses over the inner group, ring over the outer with h/u and g'/u heads and u s/c tokens | |

A ring sends its bytes in as many runs of heads as `runs.count` says, an exchange in as many as `ulysses.runs` says,
with so many times the calls. g' is g times the replication over the exchanging group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallax.plugins.context.base import AttentionSpec, SequenceShards
from parallax.plugins.context.exchange import replication
from parallax.plugins.context.ring import steps_of
from parallax.plugins.context.runs import count
from parallax.plugins.context.ulysses import runs
from parallax.strategies.comm import Traffic, wire_bytes

METHODS = ("ring", "ulysses", "all_gather", "hybrid")
"""Those there are formulas for."""
Calls = dict[tuple[str, str, str], Traffic]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention call on one rank (after tensor parallelism).

    Attributes:
        batch, heads, kv_heads, dim, value_dim: as in `AttentionMethod.__call__`.
        element: bytes per element of q, k and v.
        device, threads: see `runs.count`; they decide into how many messages bytes are cut.
    """

    batch: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    element: int = 4
    device: str = "cpu"
    threads: int = 1

    @property
    def sum_element(self) -> int:
        return max(4, self.element)


def traffic(name: str, shape: AttentionShape, spec: AttentionSpec, shards: SequenceShards, inner: int = 1) -> Calls:
    """Calls and payload bytes of one forward and backward of method `name` on one rank.

    Args:
        name: "ring", "ulysses", "all_gather" or "hybrid".
        inner: ranks of the inner group, for "hybrid".
    """
    if name == "ring":
        return _ring("cp", shape, spec, shards)
    if name == "all_gather":
        return _all_gather(shape, shards)
    if name == "ulysses":
        return _exchange("cp", shape, shards, shards.size)
    if name != "hybrid":
        raise ValueError(f"no formula for attention {name!r}")
    kv_heads, number = shape.kv_heads * replication(shape.kv_heads, inner) // inner, _runs(shape, shards, inner)
    part = replace(shape, heads=shape.heads // inner // number, kv_heads=kv_heads // number)
    ring = _ring("cp_outer", part, spec, shards.grouped(inner))
    times = {key: Traffic(number * t.calls, number * t.bytes) for key, t in ring.items()}
    return _exchange("cp_inner", shape, shards, inner) | times


def sent(calls: Calls, phase: str) -> int:
    """Payload bytes that one rank sends in `phase`."""
    return sum(t.bytes for (_, kind, when), t in calls.items() if when == phase and kind != "recv")


def wire(calls: Calls, sizes: dict[str, int]) -> float:
    """Bytes on the wire of one rank for `calls`; `sizes` has the ranks of each axis."""
    return sum(wire_bytes(kind, t.bytes, sizes[axis]) for (axis, kind, _), t in calls.items())


def _keys(shape: AttentionShape, shards: SequenceShards) -> int:
    """Elements of one rank's keys and values."""
    return shape.batch * shards.local_length * shape.kv_heads * (shape.dim + shape.value_dim)


def _ring(axis: str, shape: AttentionShape, spec: AttentionSpec, shards: SequenceShards) -> Calls:
    hops, keys = steps_of(spec, shards) - 1, _keys(shape, shards)
    if not hops:
        return {}
    heads = shape.batch * shape.heads
    number = count(keys * shape.element, heads, shape.kv_heads, shape.device, shape.threads)
    forward = Traffic(number * hops, hops * keys * shape.element)
    backward = Traffic(number * 2 * hops, hops * keys * (shape.element + shape.sum_element))
    return {
        (axis, kind, phase): t
        for kind in ("send", "recv")
        for phase, t in (("forward", forward), ("backward", backward))
    }


def _all_gather(shape: AttentionShape, shards: SequenceShards) -> Calls:
    if shards.size == 1:
        return {}
    keys = shards.size * _keys(shape, shards)
    gathered = Traffic(1, keys * shape.element)
    return {
        ("cp", "all_gather", "forward"): gathered,
        ("cp", "all_gather", "backward"): gathered,
        ("cp", "reduce_scatter", "backward"): Traffic(1, keys * shape.sum_element),
    }


def _runs(shape: AttentionShape, shards: SequenceShards, size: int) -> int:
    queries = shape.batch * shards.local_length * shape.heads * shape.dim
    nbytes = (queries + _keys(shape, shards)) * shape.element
    return runs(nbytes, (shape.batch, shape.heads), shape.kv_heads, size, shape.device, shape.threads)


def _exchange(axis: str, shape: AttentionShape, shards: SequenceShards, size: int) -> Calls:
    if size == 1:
        return {}
    kv_heads = shape.kv_heads * replication(shape.kv_heads, size)
    there = shape.heads * shape.dim + kv_heads * (shape.dim + shape.value_dim)
    back = shape.heads * shape.value_dim
    nbytes = shape.batch * shards.local_length * (there + back) * shape.element
    both = Traffic(2 * _runs(shape, shards, size), nbytes)
    return {(axis, "all_to_all", "forward"): both, (axis, "all_to_all", "backward"): both}
