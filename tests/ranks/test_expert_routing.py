"""Experts on four ranks compute what a plain loop over all experts computes, however tokens are routed.

The right values come from the uncut module on all ranks' tokens, one rank after the other, in the same process: its
outputs and every gradient, in fp64. The bytes on the wire are counted against the formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parallax.plugins.expert.layers import become_experts
from parallax.strategies.comm import AxisComm, Ledger, Traffic
from tests.parity.moe_models import PlainExperts
from tests.procs import run_ranks

RANKS, EXPERTS, TOP_K, HIDDEN, WIDTH, FP64, INT64 = 4, 8, 2, 6, 5, 8, 8
HERE = EXPERTS // RANKS


class Case(NamedTuple):
    """For each rank its tokens [t, h], their choices [t, k] and the weights of these [t, k]; a capacity factor."""

    hidden: list[Tensor]
    choices: list[Tensor]
    weights: list[Tensor]
    factor: float | None = None
    chunks: int = 1

    def kept(self, rank: int) -> Tensor:
        """Choices of a rank that are within capacity, counted one by one; the others name no expert."""
        choices = self.choices[rank].clone()
        if self.factor is None:
            return choices
        room = math.ceil(self.factor * choices.numel() / EXPERTS)
        for expert in range(EXPERTS):
            takers = [(-float(self.weights[rank][at]), at) for at in map(tuple, (choices == expert).nonzero().tolist())]
            for _, at in sorted(takers)[room:]:
                choices[at] = EXPERTS
        return choices


def some(gen: torch.Generator, tokens: list[int], choose: Any) -> Case:
    hidden = [torch.randn(t, HIDDEN, generator=gen, dtype=torch.float64) for t in tokens]
    weights = [torch.rand(t, TOP_K, generator=gen, dtype=torch.float64) for t in tokens]
    return Case(hidden, [choose(t) for t in tokens], weights)


def all_cases() -> Iterator[tuple[str, Case]]:
    gen = torch.Generator().manual_seed(3)

    def anything(tokens: int) -> Tensor:
        return torch.rand(tokens, EXPERTS, generator=gen).topk(TOP_K).indices

    def masked(tokens: int) -> Tensor:  # an index of EXPERTS or more means no expert
        choices = anything(tokens)
        return choices.masked_fill(torch.rand(tokens, TOP_K, generator=gen) < 0.4, EXPERTS)

    def always(*experts: int) -> Any:
        return lambda tokens: torch.tensor(experts).expand(tokens, TOP_K).contiguous()

    for i in range(8):
        yield f"random {i}", some(gen, torch.randint(1, 12, (RANKS,), generator=gen).tolist(), anything)
    yield "all to one rank's experts", some(gen, [5, 5, 5, 5], always(2, 3))
    yield "all to one expert twice", some(gen, [4, 3, 2, 1], always(7, 7))
    yield "two experts of eight", some(gen, [6, 6, 6, 6], always(0, 7))
    yield "a rank without tokens", some(gen, [5, 0, 3, 2], anything)
    yield "one rank has all tokens", some(gen, [0, 0, 9, 0], anything)
    yield "one token in all", some(gen, [0, 1, 0, 0], anything)
    yield "no tokens", some(gen, [0, 0, 0, 0], anything)
    yield "batch of one", some(gen, [1, 1, 1, 1], anything)
    yield "ragged", some(gen, [7, 1, 4, 2], anything)
    yield "masked", some(gen, [6, 5, 4, 3], masked)
    yield "all masked", some(gen, [3, 3, 3, 3], always(EXPERTS, EXPERTS + 1))


    for name, tokens, chunks in [("even", [6, 6, 6, 6], 2), ("ragged", [7, 0, 4, 2], 3), ("few", [1, 1, 0, 1], 2)]:
        yield f"{chunks} chunks, {name}", some(gen, tokens, masked)._replace(chunks=chunks)
    for factor in (0.5, 1.0, 2.0):
        yield f"capacity {factor}", some(gen, [9, 7, 0, 1], anything)._replace(factor=factor)
    yield "capacity of equals", some(gen, [6, 6, 6, 6], always(0, 7))._replace(factor=1.0)


def whole_experts() -> PlainExperts:
    torch.manual_seed(1)
    return PlainExperts(HIDDEN, WIDTH, EXPERTS).double()


def run(experts: Any, hidden: Tensor, choices: Tensor, weights: Tensor, ledger: Ledger) -> tuple[Tensor, ...]:
    """Output and the gradients of tokens and weights; gradients of parameters are left on them."""
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    with ledger.during("forward"):
        out = experts(hidden, choices, weights)
    with ledger.during("backward"):
        (out * out.detach().cos()).sum().backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (hidden, weights)]
    return out.detach(), *grads


READS = {"tolist", "item", "cpu", "numpy", "to", "nonzero", *(f"__{n}__" for n in ("bool", "int", "float", "index"))}
"""Methods of a tensor by which the host asks for its values; "to" is here for other devices."""


class Reads(TorchFunctionMode):
    """Notes the reads of values that the code itself asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and (name != "to" or any(isinstance(a, (str, torch.device)) for a in args[1:])):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class HiddenReads(TorchDispatchMode):
    """Notes operators whose result or its size, torch says, needs the values: on a GPU the host waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_mask = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype is torch.bool for i in args[1])
        told = func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None
        needs = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if by_mask or (needs and not told and func is not torch.ops.aten.index.Tensor):
            self.found.append(str(func))
        return func(*args, **kwargs)


def reads_of(experts: Any, case: Case, rank: int) -> tuple[list[str], list[str]]:
    """Reads of values in a forward and a backward: those asked for, and those hidden in operators."""
    with Reads() as asked, HiddenReads() as hidden:
        run(experts, case.hidden[rank], case.choices[rank], case.weights[rank], Ledger())
    return asked.found, hidden.found


def parallel(rank: int, world: int) -> dict[str, Any]:
    results = {}
    for name, case in all_cases():
        ledger = Ledger()
        comm = AxisComm("ep", range(world), rank, dist.group.WORLD, ledger)
        experts: Any = whole_experts()
        for param in experts.parameters():
            param.data = param.data[rank * HERE : (rank + 1) * HERE].clone()
        become_experts(experts, comm, None, EXPERTS, case.factor, chunks=case.chunks)
        outcome = run(experts, case.hidden[rank], case.choices[rank], case.weights[rank], ledger)
        with torch.no_grad():
            evaluated = experts(case.hidden[rank], case.choices[rank], case.weights[rank])
        grads = {n: p.grad.clone() for n, p in experts.named_parameters() if p.grad is not None}
        experts._expert_outputs = lambda rows, plan: rows * 2  # the loop of these experts is not what is looked at
        results[name] = outcome, grads, evaluated, dict(ledger.counts), reads_of(experts, case, rank)
    return results


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(RANKS, parallel, timeout=60)


CASES = dict(all_cases())


@pytest.mark.parametrize("name", CASES)
def test_equals_a_loop_over_all_experts(name: str, ranks: Any) -> None:
    case, experts = CASES[name], whole_experts()
    for rank in range(RANKS):
        want = run(experts, case.hidden[rank], case.kept(rank), case.weights[rank], Ledger())
        got, _, evaluated, *_ = ranks[rank][name]
        for mine, right in zip((*got, evaluated), (*want, want[0]), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-12)
    for param, whole in experts.named_parameters():
        parts = [ranks[rank][name][1][param] for rank in range(RANKS)]
        right = torch.zeros_like(whole) if whole.grad is None else whole.grad
        torch.testing.assert_close(torch.cat(parts), right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_rows_that_travel(name: str, ranks: Any) -> None:
    """Each way one exchange of each chunk's chosen rows there and one back; forward E counts a chunk, one message."""
    case = CASES[name]
    kept = [case.kept(rank) for rank in range(RANKS)]
    sent = [int((choices < EXPERTS).sum()) for choices in kept]
    for rank in range(RANKS):
        here = [int(((c >= rank * HERE) & (c < (rank + 1) * HERE)).sum()) for c in kept]
        rows = (sent[rank] + sum(here)) * HIDDEN * FP64
        counts, numbers = ranks[rank][name][3], case.chunks * EXPERTS * INT64
        assert counts["ep", "all_to_all", "forward"] == Traffic(1 + 2 * case.chunks, rows + numbers)
        assert counts["ep", "all_to_all", "backward"] == Traffic(2 * case.chunks, rows)
    total = sum(t.bytes for r in ranks for (_, _, phase), t in r[name][3].items() if phase in ("forward", "backward"))
    assert total == 4 * sum(sent) * HIDDEN * FP64 + RANKS * case.chunks * EXPERTS * INT64


@pytest.mark.parametrize("name", CASES)
def test_the_sizes_of_the_exchange_are_the_only_values_the_host_reads(name: str, ranks: Any) -> None:
    assert all(rank[name][4] == (["tolist"], []) for rank in ranks)


def test_reads_are_seen() -> None:
    x = torch.tensor([1, 2])
    with Reads() as asked, HiddenReads() as hidden:
        _ = x.bincount(), x[x > 1], bool(x[0] > 0), torch.repeat_interleave(x, x, output_size=3), x[x - 1]
    assert asked.found == ["__bool__"]
    assert hidden.found == ["aten.bincount.default", "aten.index.Tensor", "aten._local_scalar_dense.default"]
