"""Attention over a sequence on several ranks equals attention of the whole sequence in one process: output and all
gradients, for every method, mask and layout; and it sends what the formulas say.

The reference is a softmax over the whole score matrix in fp64 (`tests/attention_reference.py`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import gcd
from typing import Any

import pytest
import torch
from torch import Tensor

from parallax.plugins import registry
from parallax.plugins.context import local, runs
from parallax.plugins.context.base import AttentionMethod, AttentionSpec, ContextGroups, SequenceShards
from parallax.plugins.context.tiles import Blocking
from parallax.plugins.context.traffic import AttentionShape, traffic
from parallax.strategies.comm import AxisComm, Traffic
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.context_cases import MASKS, Case, Shape, expected, make
from tests.live_memory import LiveMemory
from tests.procs import run_ranks

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}
BLOCKINGS = (Blocking(8, 16), local.BLOCKING["cpu"])
MESSAGES = {BLOCKINGS[0]: runs.MESSAGE["cpu"], BLOCKINGS[1]: 1}
"""Fewest bytes of a message: all heads go round at once, or in as many runs as there are kv heads."""
METHODS = ("ring", "ulysses", "all_gather")


def _mesh(rank: int, size: int, inner: int) -> Mesh:
    return Mesh.build(Layout(context_parallel_size=size, context_inner_size=inner).resolve(size), rank)


def _call(
    method: AttentionMethod, spec: AttentionSpec, shards: SequenceShards, whole: dict[str, Tensor], rank: int
) -> dict[str, Tensor]:
    """This rank's output and gradients, by name as in `expected`; strides are those of projections, [b, s, h, d]."""
    mine = {name: shards.take(whole[name], rank, 2).transpose(1, 2).contiguous() for name in ("q", "k", "v", "grad")}
    mine = {name: part.transpose(1, 2) for name, part in mine.items()}
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


def _compare(case: Case, methods: list[AttentionMethod], size: int, rank: int) -> int:
    """Number of comparisons made: every method that takes the case, with masks in small blocks and in one,
    heads together and in runs."""
    spec, shards, whole = make(case, size)
    want, done = expected(spec, shards, whole), 0
    for method in methods:
        exchanging = {"ulysses": size, "hybrid": method.groups.inner.size}.get(method.name, 1)
        heads, kv_heads = case.shape.heads, case.shape.kv_heads
        if heads % exchanging:
            with pytest.raises(ValueError, match=f"{method.name!r} deals {heads} query heads to {exchanging} ranks"):
                method.check(spec, heads, kv_heads, size, method.groups.inner.size)
            continue
        method.check(spec, heads, kv_heads, size, method.groups.inner.size)
        for blocking in BLOCKINGS:
            local.BLOCKING["cpu"], runs.MESSAGE["cpu"] = blocking, MESSAGES[blocking]
            got = _call(method, spec, shards, whole, rank)
            if "sinks" in got:  # a rank has what its own queries and heads give
                method.groups.cp.all_reduce(got["sinks"])
            assert got.keys() == want.keys()
            for name, tensor in got.items():
                right = want[name] if name == "sinks" else shards.take(want[name], rank, 2)
                _assert_close(tensor, right, case, f"{method.name}, {case}, {blocking}, {name}")
            done += 1
    return done


def _assert_close(tensor: Tensor, right: Tensor, case: Case, label: str) -> None:
    limit = TOLERANCE[case.dtype]
    assert tensor.dtype == case.dtype
    torch.testing.assert_close(tensor.double(), right, rtol=limit, atol=limit, msg=lambda text: f"{label}: {text}")


def _compare_all(rank: int, size: int, names: tuple[str, ...], cases: list[Case], inner: int = 1) -> int:
    groups = ContextGroups.of(_mesh(rank, size, inner))
    methods = [registry.load("parallax.attention", name)(groups) for name in names]
    return sum(_compare(case, methods, size, rank) for case in cases)


def _cases() -> list[Case]:
    """Every mask in both orders and dtypes, and every mask with grouped heads and a value dim of its own."""
    half = ("causal", "full", "documents window sinks", "softcap window")
    cases = [Case(mask, dtype=torch.bfloat16) for mask in half]
    for mask in MASKS:
        cases += [Case(mask), Case(mask, order="contiguous"), Case(mask, dtype=torch.float32)]
        cases += [Case(mask, Shape(heads=8, kv_heads=2, tokens=41)), Case(mask, Shape(kv_heads=1, dim=12, value_dim=5))]
    shapes = [
        Shape(batch=1), Shape(tokens=1), Shape(tokens=3), Shape(batch=1, tokens=17, dim=4, value_dim=9),
        Shape(heads=12, kv_heads=6, tokens=33), Shape(heads=1, kv_heads=1, tokens=9, batch=1),
    ]  # fmt: skip
    return cases + [Case(mask, shape, order) for mask in ("causal", "full", "sinks window", "documents")
                    for shape in shapes for order in ("zigzag", "contiguous")]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
def test_one_dimensional_methods_equal_one_process(size: int) -> None:
    cases = _cases()
    one_head = sum(case.shape.heads == 1 for case in cases)
    done = len(BLOCKINGS) * (len(cases) * len(METHODS) - one_head)  # which Ulysses refuses
    assert run_ranks(size, _compare_all, METHODS, cases, timeout=180) == [done] * size


def test_the_hybrid_equals_one_process() -> None:
    cases = _cases()
    done = len(BLOCKINGS) * sum(case.shape.heads > 1 for case in cases)
    assert run_ranks(4, _compare_all, ("hybrid",), cases, 2, timeout=120) == [done] * 4


# What is sent

SENT = [
    Case("causal"), Case("causal", order="contiguous"), Case("full", dtype=torch.float32),
    Case("causal", Shape(heads=8, kv_heads=2, tokens=41, dim=12, value_dim=5), dtype=torch.bfloat16),
    Case("window", order="contiguous"), Case("window"), Case("documents"), Case("sinks", Shape(heads=12, kv_heads=6)),
]  # fmt: skip


def _count(rank: int, size: int, names: tuple[str, ...], inner: int = 1) -> tuple[dict[Any, Any], dict[Any, Any]]:
    groups, counted = ContextGroups.of(_mesh(rank, size, inner)), {}
    for name in names:
        method = registry.load("parallax.attention", name)(groups)
        for least in set(MESSAGES.values()):
            runs.MESSAGE["cpu"] = least
            for number, case in enumerate(SENT):
                spec, shards, whole = make(case, size)
                groups.cp.ledger.reset()
                _call(method, spec, shards, whole, rank)
                counted[name, least, number] = dict(groups.cp.ledger.counts)
    cases = [case for case in product(("ring", "ulysses"), set(MESSAGES.values()), HELD) if case[2][0] % size == 0]
    return counted, {(name, least, heads): _held(groups, name, least, *heads) for name, least, heads in cases}


HELD = ((4, 4), (12, 1), (12, 6), (36, 36))
"""Query heads, kv heads."""
LENGTH, DIM = 384, 64


class _Counted(AxisComm):
    """Exchanges nothing but memory: gloo's threads let go of tensors some time after they have said that they are done,
    which would be counted or not by chance."""

    def all_to_all_into(self, out: Tensor, tensor: Tensor, *_: Any, **__: Any) -> None:
        out.copy_(tensor)


def _held(groups: ContextGroups, name: str, least: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """Most bytes alive in a method's forward and in both it and its backward, of causal attention in fp32."""
    shards, runs.MESSAGE["cpu"] = SequenceShards.of(LENGTH, groups.cp.size), least
    comm = _Counted("cp", groups.cp.ranks, groups.cp.rank, groups.cp.group, groups.cp.ledger)
    method, rows = registry.load("parallax.attention", name)(ContextGroups(comm, comm, comm)), shards.local_length
    q, k, v, grad = (torch.randn(1, rows, n, DIM).transpose(1, 2) for n in (heads, kv_heads, kv_heads, heads))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with LiveMemory() as alive:
        out = method(*(x.view_as(x) for x in leaves), AttentionSpec(), shards)
        forward = alive.peak
        torch.autograd.grad(out, leaves, grad)
    return forward, alive.peak


@pytest.mark.parametrize(("size", "inner", "names"), [(2, 1, METHODS), (4, 2, (*METHODS, "hybrid"))])
def test_counted_bytes_are_the_formulas(
    size: int, inner: int, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for counted, held in run_ranks(size, _count, names, inner):
        for (name, least, (heads, kv_heads)), peaks in held.items():
            bounds = {"ring": _ring_holds, "ulysses": _ulysses_holds}[name](heads, kv_heads, least == 1, size)
            for peak, (least_held, most_held) in zip(peaks, bounds, strict=True):
                assert least_held <= peak <= most_held, (name, least, heads, kv_heads)
        assert len(counted) == len(names) * len(SENT) * 2
        for (name, least, number), counts in counted.items():
            monkeypatch.setitem(runs.MESSAGE, "cpu", least)
            case = SENT[number]
            spec, shards, whole = make(case, size)
            s = case.shape
            shape = AttentionShape(s.batch, s.heads, s.kv_heads, s.dim, s.value_dim, whole["q"].element_size())
            assert counts == traffic(name, shape, spec, shards, inner), (name, least, case)


Bounds = tuple[tuple[float, float], tuple[float, float]]
"""Least and most bytes of a forward, and of it and its backward."""


def _sizes(heads: int, kv_heads: int, size: int) -> tuple[int, int, int]:
    """Bytes of a rank's queries, of its keys and values, and of the log-sum-exp."""
    rows = 4 * LENGTH // size
    return rows * DIM * heads, rows * DIM * 2 * kv_heads, rows * heads


def _ring_holds(heads: int, kv_heads: int, in_runs: bool, size: int) -> Bounds:
    """One process holds q, k, v and the output, in backward their gradients too. A ring of n holds two blocks of the
    keys and values of a run of heads more, in backward min(2, n - 1) and as many of their gradients; where there are
    several runs, what is not yet put together; and what a kernel returns for one tile. With 36 runs all of it is 5%."""
    q, kv, lse = _sizes(heads, kv_heads, size)
    number = kv_heads if in_runs else 1
    alone = 2 * q + kv + lse, 4 * q + 2 * kv + lse
    more = 2 * kv / number, min(2, size - 1) * 2 * kv / number
    apart = q / number * (number > 1), (q + kv) / number * (number > 1)
    tile = (q + 4 * lse) / number, (max(q + kv / 2, q / 2 + kv) + 3 * lse) / number
    most = [sum(parts) for parts in zip(alone, more, apart, tile, strict=True)]
    if number == 36:
        most = [min(bound, 1.05 * held) for bound, held in zip(most, alone, strict=True)]
    return (alone[0] + more[0], most[0]), (alone[1] + more[1], most[1])


def _ulysses_holds(heads: int, kv_heads: int, in_runs: bool, size: int) -> Bounds:
    """Beside what one process holds, q, k, v and the output once more, until a run of heads has gone back; and of one
    run what is on its way: what is sent, what comes, copies of heads for several ranks, what is made of it. At the end
    the gradients of queries, or of keys, of all runs are joined."""
    q, kv, lse = _sizes(heads, kv_heads, size)
    number = kv_heads // gcd(kv_heads, size) if in_runs else 1
    moved = kv * size // gcd(kv_heads, size)
    there, end = 4 * q + kv + moved + lse, 4 * q + 2 * kv
    copies = moved * (moved > kv)
    forward = there, there + (max(2 * q, 2 * moved + copies) + lse) / number
    back = there + q + (2 * q + 2 * moved + copies + lse) / number, end + (2 * q + 3 * moved + copies - kv) / number
    joined = end + max(q, kv / 2) * (number > 1) + (q + moved) / number
    return forward, (there + q, max(*back, joined))


def test_the_formulas_are_the_textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers worked out by hand: b 2, s 48 on 4 ranks (12 each), 4 heads, 2 kv heads, d 8, fp64."""
    shards, spec, shape = SequenceShards.of(48, 4), AttentionSpec(), AttentionShape(2, 4, 2, 8, 8, 8)
    keys = 2 * 12 * 2 * (8 + 8) * 8
    ring = traffic("ring", shape, spec, shards)
    assert ring["cp", "send", "forward"] == Traffic(3, 3 * keys)
    assert ring["cp", "send", "backward"] == Traffic(6, 3 * keys + 3 * keys)
    with monkeypatch.context() as patch:  # the same bytes, one head after the other
        patch.setitem(runs.MESSAGE, "cpu", keys // 2)
        assert traffic("ring", shape, spec, shards)["cp", "send", "forward"] == Traffic(2 * 3, 3 * keys)
        patch.setitem(runs.MESSAGE, "cpu", keys // 2 + 1)
        assert traffic("ring", shape, spec, shards) == ring
    gathered = traffic("all_gather", shape, spec, shards)
    assert gathered["cp", "all_gather", "forward"] == Traffic(1, 4 * keys)
    assert gathered["cp", "reduce_scatter", "backward"] == Traffic(1, 4 * keys)
    # two kv heads for four ranks: each is sent twice, as four are
    tokens = 2 * 12 * 4 * 8 * 8
    assert traffic("ulysses", shape, spec, shards)["cp", "all_to_all", "forward"] == Traffic(2, 4 * tokens)
    # a window of 7 with 12 tokens a rank reaches the neighbour alone, if neighbours hold neighbouring tokens
    near = traffic("ring", shape, AttentionSpec(window=7), SequenceShards.of(48, 4, "contiguous"))
    assert near["cp", "send", "forward"] == Traffic(1, keys)
    assert near["cp", "send", "backward"] == Traffic(2, keys + keys)
