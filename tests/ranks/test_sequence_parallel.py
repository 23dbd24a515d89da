"""Sequence parallelism on real ranks: the same loss and gradients as one process, and the textbook's messages."""

from __future__ import annotations

from typing import Any

import torch

from tests.procs import run_ranks
from tests.ranks.test_tensor import _cut, _step, _whole_grads
from tests.tensor_models import build, loss_of, token_ids


def _parity(rank: int, world: int, names: list[str]) -> Any:
    counts = {}
    for name in names:
        reference, model, ids = build(name), build(name), token_ids()
        expected = loss_of(reference, ids)
        expected.backward()
        plugin, mesh = _cut(model, rank, world, sequence=True)
        loss = _step(model, plugin, mesh, ids)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        grads = _whole_grads(model, plugin, mesh)
        wanted = dict(reference.named_parameters())
        assert grads.keys() == wanted.keys()
        for fqn, grad in grads.items():
            torch.testing.assert_close(grad, wanted[fqn].grad, rtol=1e-10, atol=1e-10, msg=lambda m, f=fqn: f"{f}: {m}")
        counts[name] = {key: (t.calls, t.bytes) for key, t in mesh.ledger.counts.items() if t.bytes}
    return counts


def test_two() -> None:
    run_ranks(2, _parity, ["llama-bias", "llama-tied-eager", "gpt2", "qwen3", "olmo2"])


def test_four() -> None:
    run_ranks(4, _parity, ["llama", "gpt2"])
