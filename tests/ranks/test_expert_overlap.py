"""What is computed while tokens are on their way to experts: the order of events on two ranks, and equal results."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallax.plugins.expert.beside import find_beside
from parallax.plugins.expert.layers import become_experts
from parallax.strategies.comm import AxisComm, Ledger
from tests.parity.moe_models import PlainExperts, deepseek_v3
from tests.procs import run_ranks

HIDDEN, EXPERTS, TOKENS = 32, 8, 7
FORWARD = ["counts", "begin", "shared", "begin", "wait", "experts", "begin", "wait", "experts", "begin", "wait", "wait"]
BACKWARD = ["begin", "begin", "wait", "experts", "begin", "wait", "experts", "begin", "wait", "shared", "wait"]
"""Of two chunks: a chunk leaves before the one before it is computed, in both directions."""


class Waiting:
    def __init__(self, work: Any, events: list[str]) -> None:
        self._work, self._events = work, events

    def wait(self) -> None:
        self._events.append("wait")
        self._work.wait()


class Watched(AxisComm):
    """Notes when an exchange begins and when it is waited for."""

    events: list[str]

    def all_to_all_into(self, out: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = super().all_to_all_into(out, tensor, *args, **kwargs)
        self.events.append("counts" if work is None else "begin")
        return None if work is None else Waiting(work, self.events)


def block() -> Any:
    torch.manual_seed(3)
    model: Any = deepseek_v3().double()
    moe = model.model.layers[2].mlp
    torch.nn.init.normal_(moe.experts.gate_up_proj, std=0.2)
    torch.nn.init.normal_(moe.experts.down_proj, std=0.2)
    return moe


def note(module: nn.Module, name: str, events: list[str]) -> None:
    """When it is called, and when its backward begins."""

    def noted(_: Any, args: Any, out: Tensor) -> None:
        events.append(name)
        out.register_hook(lambda grad: events.append(name))

    module.register_forward_hook(noted)


def step(moe: Any, rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    x.requires_grad_()
    out = moe(x)
    (out * out.detach().cos()).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, {n: p.grad for n, p in moe.named_parameters() if p.grad is not None}


def in_flight(moe: Any, rank: int, compute: Any) -> dict[str, Tensor]:
    """Gradients of three micro-batches, the third of which begins when the first is over and the second is not."""
    moe.zero_grad()
    x = torch.randn(3, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    outs = [compute(moe, part[None].requires_grad_()) for part in x[:2]]
    outs[0].square().sum().backward()
    outs.append(compute(moe, x[2:].requires_grad_()))
    for out in outs[1:]:
        out.square().sum().backward()
    return {n: p.grad for n, p in moe.named_parameters() if p.grad is not None}

def run(rank: int, world: int) -> Any:
    events: list[str] = []
    comm = Watched("ep", range(world), rank, dist.group.WORLD, Ledger())
    comm.events = events
    moe = block()
    here = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    for name in ("gate_up_proj", "down_proj"):
        setattr(moe.experts, name, nn.Parameter(getattr(moe.experts, name)[here].detach().clone()))
    note(moe.shared_experts, "shared", events)
    beside = find_beside(moe, "experts")
    assert beside is not None
    become_experts(moe.experts, comm, None, EXPERTS, chunks=2, beside=beside)
    inner = moe.experts._expert_outputs

    def outputs(rows: Tensor, experts: Tensor) -> Tensor:
        events.append("experts")
        out: Tensor = inner(rows, experts)
        out.register_hook(lambda grad: events.append("experts"))
        return out

    moe.experts._expert_outputs = outputs
    out, grad, grads = step(moe, rank)
    del moe.experts._expert_outputs
    again = step(copy.deepcopy(moe), rank)  # a copy hands over what its own shared expert has computed
    grads = {n: g.clone() for n, g in grads.items()}
    recomputed = in_flight(moe, rank, partial(checkpoint, use_reentrant=False))
    return events, (out, grad, grads), again[0], recomputed, beside.on, beside.ready


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(2, run, timeout=60)


def test_a_chunk_travels_while_another_and_the_shared_expert_are_computed(ranks: Any) -> None:
    for events, *_ in ranks:
        assert events[: len(FORWARD)] == FORWARD
        assert events[len(FORWARD) : len(FORWARD + BACKWARD)] == BACKWARD


def test_results_are_those_of_one_process(ranks: Any) -> None:
    moe = block()
    wanted = [step(moe, rank) for rank in range(2)]  # gradients of parameters add up
    for rank, (_, (out, grad, grads), again, _, on, _) in enumerate(ranks):
        assert on
        torch.testing.assert_close(out, wanted[rank][0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(again, wanted[rank][0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(grad, wanted[rank][1], rtol=1e-9, atol=1e-12)
        for name in ("experts.gate_up_proj", "experts.down_proj"):
            mine = wanted[1][2][name].chunk(2)[rank]
            torch.testing.assert_close(grads[name], mine, rtol=1e-9, atol=1e-12)
    for name in (n for n in wanted[1][2] if "shared" in n or "gate.weight" in n):
        torch.testing.assert_close(ranks[0][1][2][name] + ranks[1][1][2][name], wanted[1][2][name])


def test_a_recomputation_that_torch_stops_leaves_nothing_behind(ranks: Any) -> None:
    """Its backward needs nothing after the experts, so the block never asks for what was computed early."""
    moe = block()
    wanted = [{n: g.clone() for n, g in in_flight(moe, rank, nn.Module.__call__).items()} for rank in range(2)]
    for *_, on, ready in ranks:
        assert on and ready is None
    for rank, (*_, got, _, _) in enumerate(ranks):
        for name in ("experts.gate_up_proj", "experts.down_proj"):
            mine = (wanted[0][name] + wanted[1][name]).chunk(2)[rank]
            torch.testing.assert_close(got[name], mine, rtol=1e-9, atol=1e-12)
        for name in (n for n in wanted[0] if "shared" in n or "gate.weight" in n):
            torch.testing.assert_close(got[name], wanted[rank][name], rtol=1e-9, atol=1e-12)


class SharedFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared_expert, self.experts = nn.Linear(HIDDEN, HIDDEN), PlainExperts(HIDDEN, 8, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared_expert(x) + self.experts(x, torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1))


class OtherTokens(SharedFirst):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x, torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1))
        return out + self.shared_expert(2 * x)


def test_a_shared_expert_that_comes_first_is_left_alone() -> None:
    assert find_beside(SharedFirst(), "experts") is None
    assert find_beside(OtherTokens(), "experts") is not None


def test_an_early_result_is_not_handed_over_for_other_tokens() -> None:
    moe = OtherTokens()
    x = torch.randn(3, HIDDEN)
    want = moe(x)
    beside = find_beside(moe, "experts")
    assert beside is not None
    beside.start(x)
    torch.testing.assert_close(moe(x), want)
    assert not beside.on and beside.ready is None
    beside.start(x)
    assert beside.ready is None
