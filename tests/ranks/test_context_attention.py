"""Attention over a sequence on several ranks equals attention of the whole sequence in one process: output and all
gradients, for every method, mask and layout; and it sends what the formulas say.

The reference is a softmax over the whole score matrix in fp64 (`tests/attention_reference.py`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parallax.plugins import registry
from parallax.plugins.context import local
from parallax.plugins.context.base import AttentionMethod, AttentionSpec, ContextGroups, SequenceShards
from parallax.plugins.context.tiles import Blocking
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.context_cases import MASKS, Case, Shape, expected, make
from tests.procs import run_ranks

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}
METHODS = ("ring", "ulysses", "all_gather")


def _mesh(rank: int, size: int, inner: int) -> Mesh:
    return Mesh.build(Layout(context_parallel_size=size, context_inner_size=inner).resolve(size), rank)


def _call(
    method: AttentionMethod, spec: AttentionSpec, shards: SequenceShards, whole: dict[str, Tensor], rank: int
) -> dict[str, Tensor]:
    """This rank's output and gradients, by name as in `expected`."""
    mine = {name: shards.take(whole[name], rank, 2).clone() for name in ("q", "k", "v", "grad")}
    leaves = [mine[name].requires_grad_() for name in ("q", "k", "v")]
    if "sinks" in whole:
        leaves.append(whole["sinks"].clone().requires_grad_())
        spec = replace(spec, sinks=leaves[-1])
    ledger = method.groups.cp.ledger
    with ledger.during("forward"):
        out = method(leaves[0], leaves[1], leaves[2], spec, shards)
    with ledger.during("backward"):
        grads = torch.autograd.grad(out, leaves, mine["grad"])
    return {"out": out.detach(), **dict(zip(["q", "k", "v", "sinks"], grads, strict=False))}


def _compare(case: Case, method: AttentionMethod, size: int, rank: int) -> None:
    spec, shards, whole = make(case, size)
    want = expected(spec, shards, whole)
    method.check(spec, case.shape.heads, case.shape.kv_heads, size, method.groups.inner.size)
    got = _call(method, spec, shards, whole, rank)
    if "sinks" in got:  # a rank has what its own queries and heads give
        method.groups.cp.all_reduce(got["sinks"])
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        right = want[name] if name == "sinks" else shards.take(want[name], rank, 2)
        assert tensor.dtype == case.dtype
        limit = TOLERANCE[case.dtype]
        torch.testing.assert_close(
            tensor.double(), right, rtol=limit, atol=limit, msg=lambda m, n=name: f"{method.name}, {case}, {n}: {m}"
        )


def _compare_all(rank: int, size: int, names: tuple[str, ...], cases: list[Case], inner: int = 1) -> int:
    groups, done = ContextGroups.of(_mesh(rank, size, inner)), 0
    methods = [registry.load("parallax.attention", name)(groups) for name in names]
    for blocking in (Blocking(8, 16), local.BLOCKING["cpu"]):
        local.BLOCKING["cpu"] = blocking
        for case in cases:
            for method in methods:
                _compare(case, method, size, rank)
                done += 1
    return done


def _cases() -> list[Case]:
    """Every mask in both orders and both dtypes, and every mask with grouped heads and a value dim of its own."""
    cases = []
    for mask in MASKS:
        cases += [Case(mask), Case(mask, order="contiguous"), Case(mask, dtype=torch.float32)]
        cases += [Case(mask, Shape(heads=8, kv_heads=2, tokens=41)), Case(mask, Shape(kv_heads=1, dim=12, value_dim=5))]
    shapes = [
        Shape(batch=1), Shape(tokens=1), Shape(tokens=3), Shape(batch=1, tokens=17, dim=4, value_dim=9),
        Shape(heads=12, kv_heads=6, tokens=33),
    ]  # fmt: skip
    return cases + [Case(mask, shape, order) for mask in ("causal", "full", "sinks window", "documents")
                    for shape in shapes for order in ("zigzag", "contiguous")]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
def test_one_dimensional_methods_equal_one_process(size: int) -> None:
    cases = _cases()
    assert run_ranks(size, _compare_all, METHODS, cases, timeout=180) == [2 * len(cases) * len(METHODS)] * size


def test_the_hybrid_equals_one_process() -> None:
    cases = _cases()
    assert run_ranks(4, _compare_all, ("hybrid",), cases, 2, timeout=120) == [2 * len(cases)] * 4
