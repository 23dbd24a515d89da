"""What the context axis sends in one step: attention of every layer, the loss, and what the step returns.

It is: the formulas of `traffic.py` for each attention call one process saw, and the few numbers that make a loss of
parts one of whole sequences. It is not: a count.

Per micro-batch, on the ranks of the last stage: two fp64 numbers for each cross-entropy and each number the step
returns or logs, and the labels of all ranks (int64) where they are shifted by one.
"""

from __future__ import annotations

from parallax.plugins import registry
from parallax.plugins.context.base import AttentionSpec
from parallax.plugins.context.choose import Machine, choose
from parallax.plugins.context.methods import CPU
from parallax.plugins.context.shards import SequenceShards
from parallax.plugins.context.traffic import METHODS, AttentionShape, Calls, traffic
from parallax.strategies.theory import Attention, Case, Expected

PAIR = 16
"""Bytes of two fp64 numbers: a sum, and what it is divided by."""


def add_traffic(case: Case, out: Expected) -> None:
    """Add what this rank sends over "cp" and its inner and outer groups."""
    layout, trace, times = case.layout, case.trace, case.microbatches
    shards = SequenceShards.of(trace.tokens, layout.context_parallel_size, layout.context_sharding)
    names = {module: fqn for fqn, module in case.model.named_modules()}
    for attention in trace.attentions:
        if case.here(name := names[attention.module]):
            calls = _calls(case, attention, shards)
            out.add_all(calls, times)
            forward = {key: t for key, t in calls.items() if key[2] == "forward"}
            out.add_all({(axis, kind, "backward"): t for (axis, kind, _), t in forward.items()}, case.again(name))
    if case.ends_here:
        for loss in trace.losses:
            if loss.mean:
                out.add("cp", "all_reduce", "forward", PAIR, times)
        out.add("cp", "all_reduce", "forward", PAIR, times * trace.numbers)
        for nbytes in trace.shifted:
            out.add("cp", "all_gather", "forward", nbytes * shards.size, times)


def _calls(case: Case, attention: Attention, shards: SequenceShards) -> Calls:
    """Of one attention call, with the heads that tensor parallelism leaves here."""
    tp, inner = case.mesh.size("tp"), case.layout.context_inner_size
    shape = AttentionShape(
        attention.batch,
        attention.heads // tp,
        max(1, attention.kv_heads // tp),
        attention.dim,
        attention.value_dim,
        attention.element,
    )
    spec, name = AttentionSpec(causal=attention.causal), case.layout.context_method
    if name == "auto":
        known = {method: registry.load("parallax.attention", method) for method in METHODS}
        name = choose(known, shape, spec, shards, inner, Machine(shards.size, **CPU)).name
    if name not in METHODS:
        raise NotImplementedError(f"attention {name!r} states no formula of what it sends")
    return traffic(name, shape, spec, shards, inner)
