"""Attention dropout over a cut sequence: what is dropped has the right share, differs between ranks, heads and calls,
is the same in forward and backward, and the rest is exact.

What a call drops is read off its output for values that are a unit matrix: the weights themselves. With the same state
of torch's generator it drops the same of other values, whose output and gradients then have a reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallax.plugins import registry
from parallax.plugins.context import local
from parallax.plugins.context.base import AttentionSpec, ContextGroups, SequenceShards
from parallax.plugins.context.tiles import Blocking
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.procs import run_ranks

METHODS = ("ring", "ulysses", "all_gather")
HEADS, TOKENS, DIM, P = 4, 64, 8, 0.25
UNSEEN = float("-inf")


def whole_tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(9)
    shape = (1, HEADS, TOKENS, DIM)
    return {n: torch.randn(shape, generator=draw, dtype=torch.float64) for n in ("q", "k", "v", "grad")}


def weights_of(q: Tensor, k: Tensor) -> Tensor:
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return (q @ k.mT * DIM**-0.5).masked_fill(later, UNSEEN).softmax(-1)


def drop(rank: int, size: int) -> dict[str, Any]:
    local.BLOCKING["cpu"] = Blocking(16, 16)
    groups = ContextGroups.of(Mesh.build(Layout(context_parallel_size=size).resolve(size), rank))
    shards, whole, spec = SequenceShards.of(TOKENS, size), whole_tensors(), AttentionSpec(dropout_p=P)
    mine = {name: shards.take(x, rank, 2).contiguous() for name, x in whole.items()}
    unit = shards.take(torch.eye(TOKENS, dtype=torch.float64).expand(1, HEADS, -1, -1), rank, 2).contiguous()
    found: dict[str, Any] = {}
    for name in METHODS:
        attend = registry.load("parallax.attention", name)(groups)
        torch.manual_seed(3)  # the same on every rank, which must not drop alike all the same
        kept = attend(mine["q"], mine["k"], unit, spec, shards)
        again = attend(mine["q"], mine["k"], unit, spec, shards)
        torch.manual_seed(3)
        leaves = [mine[n].clone().requires_grad_() for n in ("q", "k", "v")]
        out = attend(*leaves, spec, shards)
        grads = torch.autograd.grad(out, leaves, mine["grad"])
        found[name] = (kept, bool(torch.equal(kept, again)), [out.detach(), *grads])
    return found


def test_dropout_over_a_cut_sequence() -> None:
    size, shards = 2, SequenceShards.of(TOKENS, 2)
    ranks, whole = run_ranks(size, drop, timeout=60), whole_tensors()
    weights = weights_of(whole["q"], whole["k"])
    seen = weights > 0
    for name in METHODS:
        assert not any(rank[name][1] for rank in ranks), "another call drops something else"
        kept = shards.join([rank[name][0] for rank in ranks], 2)
        keep = (kept / weights).masked_fill(~seen, 0)
        dropped = keep[seen] < 1e-9
        torch.testing.assert_close(keep[seen][~dropped], torch.full_like(keep[seen][~dropped], 1 / (1 - P)))
        number = int(seen.sum())
        assert abs(int(dropped.sum()) - P * number) < 4 * (P * (1 - P) * number) ** 0.5
        blocks = [keep[0, h, at : at + 16, :16] for h in range(HEADS) for at in range(16, TOKENS, 16)]
        assert len({tuple(block.flatten().tolist()) for block in blocks}) == len(blocks), "each drops by itself"
        leaves = {n: whole[n].clone().requires_grad_() for n in ("q", "k", "v")}
        out = (weights_of(leaves["q"], leaves["k"]) * keep) @ leaves["v"]
        wanted = [out.detach(), *torch.autograd.grad(out, list(leaves.values()), whole["grad"])]
        for at, right in enumerate(wanted):
            got = shards.join([rank[name][2][at] for rank in ranks], 2)
            torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
