"""The attention method that "auto" stands for: the one with the shortest predicted time.

It is: a small model of one attention call, forward and backward, from its scores, its bytes (`traffic.py`) and five
numbers about the machine. It is not: a measurement; it ranks methods and nothing depends on its seconds.

Compute is that of the busiest rank. The ring's transfers run beside it and count only as far as they are longer; the
transfers of the others come before or after it. Every call costs a latency.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallax.plugins.context.base import AttentionMethod, AttentionSpec, SequenceShards
from parallax.plugins.context.shards import Ranges
from parallax.plugins.context.tiles import Visible
from parallax.plugins.context.traffic import AttentionShape, traffic
from parallax.strategies.comm import wire_bytes

RINGS = ("ring", "hybrid")


@dataclass(frozen=True)
class Machine:
    """What the prediction needs to know of the ranks of one context group. The defaults are of a GPU of 2023.

    Attributes:
        domain: neighbouring ranks that a fast link joins (one node); None: all of them.
        inside, across: bytes a second of one rank inside a domain and between domains, one way.
        latency: seconds of one call.
        flops: floating-point operations a second of one rank in an attention kernel.
    """

    domain: int | None = None
    inside: float = 300e9
    across: float = 25e9
    latency: float = 20e-6
    flops: float = 300e12


@dataclass(frozen=True)
class Choice:
    """Attributes:
    name: of the method.
    seconds: predicted, of every method that can do it.
    refused: why the others cannot: name -> message.
    """

    name: str
    seconds: Mapping[str, float]
    refused: Mapping[str, str]


def choose(
    methods: Mapping[str, type[AttentionMethod]],
    shape: AttentionShape,
    spec: AttentionSpec,
    shards: SequenceShards,
    inner: int = 1,
    machine: Machine | None = None,
) -> Choice:
    """The fastest of `methods` that does what `spec` asks; of equals the first.

    Args:
        methods: name -> class, of those `traffic` has formulas for.
        shape: sizes of one call.
        spec: documents are not looked at.
        shards: the cut.
        inner: ranks of the inner group of the layout.
        machine: None for the defaults.

    Raises:
        ValueError: none can, with the reason of each.
    """
    seconds, refused = {}, {}
    for name, method in methods.items():
        try:
            method.check(spec, shape.heads, shape.kv_heads, shards.size, inner)
        except ValueError as error:
            refused[name] = str(error)
        else:
            seconds[name] = predict(name, shape, spec, shards, inner, machine or Machine())
    if not seconds:
        raise ValueError("no attention method can do this: " + "; ".join(f"{n}: {why}" for n, why in refused.items()))
    return Choice(min(seconds, key=lambda name: seconds[name]), seconds, refused)


def predict(
    name: str, shape: AttentionShape, spec: AttentionSpec, shards: SequenceShards, inner: int, machine: Machine
) -> float:
    """Seconds of one forward and backward of method `name`."""
    exchanging = {"ulysses": shards.size, "hybrid": inner}.get(name, 1)
    cut = shards.grouped(exchanging)
    busiest = max(pairs(cut.ranges(rank), cut.whole, shards.tokens, spec) for rank in range(cut.size))
    heads = shape.heads // exchanging
    compute = 7 * shape.batch * heads * busiest * (shape.dim + shape.value_dim) / machine.flops  # 2 products, then 5
    domain = machine.domain or shards.size
    sizes = {"cp": shards.size, "cp_inner": inner, "cp_outer": shards.size // inner}
    waiting = beside = 0.0
    for (axis, kind, _), calls in traffic(name, shape, spec, shards, inner).items():
        fast = domain >= (inner if axis == "cp_inner" else shards.size)
        took = wire_bytes(kind, calls.bytes, sizes[axis]) / (machine.inside if fast else machine.across)
        if name in RINGS and kind in ("send", "recv"):
            beside += took
        else:
            waiting += took
        waiting += calls.calls * machine.latency * (kind != "recv")
    return waiting + max(compute, beside)


def pairs(queries: Ranges, keys: Ranges, tokens: int, spec: AttentionSpec) -> int:
    """Scores that queries at `queries` have with keys at `keys`: pairs in which the query sees the key.

    Documents aside. The work of a rank, of which zigzag gives every rank the same.
    """
    visible = Visible(spec.causal, spec.window)
    return sum(
        _pairs(q, k, visible)
        for q in ((a, min(b, tokens)) for a, b in queries)
        for k in ((a, min(b, tokens)) for a, b in keys)
    )


def _pairs(q: tuple[int, int], k: tuple[int, int], visible: Visible) -> int:
    """By differences: pairs with query - key below a bound, counted in closed form."""
    if q[0] >= q[1] or k[0] >= k[1]:
        return 0
    window = visible.window
    farthest = (q[1] - k[0]) if window is None else window  # exclusive bound of query - key
    nearest = 0 if visible.causal else (q[0] - k[1]) if window is None else 1 - window  # inclusive
    return max(0, _below(q, k, farthest) - _below(q, k, nearest))


def _below(q: tuple[int, int], k: tuple[int, int], bound: int) -> int:
    """Pairs with query - key < bound."""

    def triangle(n: int) -> int:  # pairs i, j >= 0 with i + j < n
        return n * (n + 1) // 2 if n > 0 else 0

    n = bound - q[0] + k[1] - 1  # i = query - q[0], j = k[1] - 1 - key
    rows, columns = q[1] - q[0], k[1] - k[0]
    return triangle(n) - triangle(n - rows) - triangle(n - columns) + triangle(n - rows - columns)
