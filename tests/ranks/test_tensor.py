"""Tensor parallelism on real ranks: the same loss and gradients as one process, and the textbook's messages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallax.plugins.tensor import TensorParallel
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.procs import RankError, run_ranks
from tests.tensor_models import BATCH, HIDDEN, SEQ, VOCAB, build, loss_of, token_ids

FP64 = 8
LAYERS = 2


def _cut(
    model: nn.Module, rank: int, world: int, sequence: bool | None = False, chunks: int = 1
) -> tuple[TensorParallel, Mesh]:
    layout = Layout(tensor_parallel_size=world, sequence_parallel=sequence).resolve(world)
    mesh, plugin = Mesh.build(layout, rank), TensorParallel(chunks=chunks)
    plugin.check(layout, model)
    plugin.apply(model, mesh=mesh, layout=layout)
    mesh.ledger.reset()
    return plugin, mesh


def _step(model: nn.Module, plugin: TensorParallel, mesh: Mesh, ids: Tensor) -> Tensor:
    with mesh.ledger.during("forward"):
        loss = loss_of(model, ids)
    with mesh.ledger.during("backward"):
        loss.backward()
    with mesh.ledger.during("step"):
        plugin.finalize_grads(model, mesh=mesh)
    return loss.detach()


def _whole_grads(model: nn.Module, plugin: TensorParallel, mesh: Mesh) -> dict[str, Tensor]:
    """Every gradient put together from the parts of all ranks; what no rank wrote stays nan."""
    mine = {fqn: (plugin.param_shard(fqn), p.grad) for fqn, p in model.named_parameters()}
    out: dict[str, Tensor] = {}
    for part in mesh["tp"].gather_objects(mine):
        for fqn, (shard, grad) in part.items():
            assert grad is not None and tuple(grad.shape) == shard.local_shape, fqn
            whole = out.setdefault(fqn, torch.full(shard.shape, float("nan"), dtype=grad.dtype))
            if shard.dim is None and not torch.isnan(whole).any():
                torch.testing.assert_close(grad, whole, rtol=0, atol=1e-12)  # replicas agree
            shard.put(whole, grad)
    return out


def _parity(rank: int, world: int, names: list[str]) -> dict[str, dict[tuple[str, str, str], Any]]:
    counts = {}
    for name in names:
        reference, model, ids = build(name), build(name), token_ids()
        expected = loss_of(reference, ids)
        expected.backward()
        plugin, mesh = _cut(model, rank, world)
        loss = _step(model, plugin, mesh, ids)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        traffic = {key: t for key, t in mesh.ledger.counts.items() if t.bytes}
        grads = _whole_grads(model, plugin, mesh)
        wanted = dict(reference.named_parameters())
        assert grads.keys() == wanted.keys()
        for fqn, grad in grads.items():
            torch.testing.assert_close(grad, wanted[fqn].grad, rtol=1e-10, atol=1e-10, msg=lambda m, f=fqn: f"{f}: {m}")
        for fqn, param in model.named_parameters():
            shard = plugin.param_shard(fqn)
            assert shard is not None
            if shard.pad and shard.dim is not None:
                at = param.shape[shard.dim] - shard.pad
                assert not param.grad.narrow(shard.dim, at, shard.pad).any(), f"padding of {fqn} has a gradient"
        counts[name] = {key: (t.calls, t.bytes) for key, t in traffic.items()}
    return counts


def _textbook(world: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Per layer two all-reduces of b s h each way, one more for the embedding and the head, and no logits.

    Each of the two losses of `loss_of` sends a maximum, then two sums per token: transformers' for b s tokens in fp32,
    ours for b (s - 1) in fp64.
    """
    activation = BATCH * SEQ * HIDDEN * FP64
    losses = 3 * (BATCH * SEQ * 4 + BATCH * (SEQ - 1) * FP64)
    return {
        ("tp", "all_reduce", "forward"): (2 * LAYERS + 1 + 2 * 2, (2 * LAYERS + 1) * activation + losses),
        ("tp", "all_reduce", "backward"): (2 * LAYERS + 1, (2 * LAYERS + 1) * activation),
    }


def test_two_ranks_equal_one_process_and_send_what_the_textbook_says() -> None:
    names = ["llama-bias", "llama-tied-eager", "gpt2", "plain", "qwen3", "gemma2-eager"]
    for counts in run_ranks(2, _parity, names):
        for name in names[:3]:
            assert counts[name] == _textbook(2), name
        qk_norm = LAYERS * 2 * 4 * FP64  # q_norm and k_norm of one head_dim each, summed in one call
        assert counts["qwen3"] == _textbook(2) | {("tp", "all_reduce", "step"): (1, qk_norm)}


def test_four_ranks_equal_one_process_and_send_what_the_textbook_says() -> None:
    names = ["llama-tied", "llama-eager", "gpt2", "plain"]
    for counts in run_ranks(4, _parity, names):
        for name in names[:3]:
            assert counts[name] == _textbook(4), name


def _recompute(rank: int, world: int) -> tuple[dict[str, Any], float, list[str]]:
    reference, model, ids = build("llama"), build("llama"), token_ids()
    loss_of(reference, ids).backward()
    plugin, mesh = _cut(model, rank, world)
    for layer in model.model.layers:
        layer.forward = _checkpointed(layer.forward)
    _step(model, plugin, mesh, ids)
    wanted, grads = dict(reference.named_parameters()), _whole_grads(model, plugin, mesh)
    worst = max(float((g - wanted[fqn].grad).abs().max()) for fqn, g in grads.items())
    kept = [fqn for fqn, m in model.named_modules() if getattr(getattr(m, "entry", None), "_output", None) is not None]
    return (
        {phase: mesh.ledger.counts["tp", "all_reduce", phase].calls for phase in ("forward", "backward")},
        worst,
        kept,
    )


def _checkpointed(forward: Any) -> Any:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def test_recomputed_layers_give_the_same_gradients_and_repeat_only_the_forward() -> None:
    for calls, worst, kept in run_ranks(2, _recompute):
        assert worst < 1e-10
        assert calls["forward"] == 2 * LAYERS + 1 + 2 * 2  # two losses
        # backward repeats a layer's forward up to the last tensor it needs: the reduction after the MLP is not
        assert calls["backward"] == (2 * LAYERS + 1) + LAYERS
        assert kept == []


def _autocast(rank: int, world: int) -> tuple[float, float, dict[tuple[str, str, str], int], str]:
    reference, model, ids = build("llama").float(), build("llama").float(), token_ids()
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_of(reference, ids)
    expected.backward()
    plugin, mesh = _cut(model, rank, world)
    with mesh.ledger.during("forward"), torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, ids)
    with mesh.ledger.during("backward"):
        loss.backward()
    traffic = {key: t.bytes for key, t in mesh.ledger.counts.items()}
    wanted, grads = dict(reference.named_parameters()), _whole_grads(model, plugin, mesh)
    far = max(
        float((g - wanted[fqn].grad).norm() / wanted[fqn].grad.norm().clamp_min(1e-6)) for fqn, g in grads.items()
    )
    return abs(float(loss - expected)), far, traffic, str(model.model.norm.weight.grad.dtype)


def test_under_bf16_autocast_messages_are_bf16_and_gradients_close() -> None:
    activation = BATCH * SEQ * HIDDEN
    for loss_error, grad_error, traffic, dtype in run_ranks(2, _autocast):
        assert loss_error < 2e-2  # eps of bf16 is 7.8e-3; the loss is about 5
        assert grad_error < 5e-2
        assert dtype == "torch.float32"
        assert traffic["tp", "all_reduce", "backward"] == (2 * LAYERS + 1) * activation * 2
        loss = BATCH * SEQ * 3 * 4 + BATCH * (SEQ - 1) * (2 + 2 * 4)  # transformers' in fp32, ours from bf16 logits
        assert traffic["tp", "all_reduce", "forward"] == 2 * LAYERS * activation * 2 + activation * 4 + loss


def _odd_uses(rank: int, world: int) -> None:
    """The entry of a region must stay right when layers are used in ways it does not expect."""
    torch.manual_seed(0)
    reference = nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, 8), "o": nn.Linear(8, 8)}).double()
    reference["q"].weight.requires_grad_(False)  # so that q does not save its input, which is changed below
    model = copy.deepcopy(reference)
    model.tp_plan = {"q": "colwise", "k": "colwise", "o": "rowwise"}

    def run(net: nn.ModuleDict, start: Tensor) -> Tensor:
        x = start * 1.0
        with torch.no_grad():
            net["o"](net["q"](x))  # the same tensor without gradients first
        y = net["q"](x) * net["q"](x) + net["k"](x)  # one layer twice
        z = start.sin()
        y = y + net["k"](x * 2.0) * net["q"](z)  # different inputs
        z.mul_(3.0)  # changed in place between two layers
        return net["o"](y + net["k"](z)).square().sum() + x.sum()

    results = []
    plugin, mesh = _cut(model, rank, world)
    for net in (reference, model):
        start = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8).requires_grad_()
        loss = run(net, start)
        loss.backward()
        results.append((loss.detach(), start.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)
    clone = copy.deepcopy(model)
    assert clone["q"].entry is clone["k"].entry and clone["q"].entry is not model["q"].entry
    ids = torch.tensor([[3, VOCAB]])
    gpt2 = build("gpt2")
    _cut(gpt2, rank, world)
    with pytest.raises(IndexError):
        gpt2(input_ids=ids)


def test_the_shared_entry_survives_unexpected_uses() -> None:
    run_ranks(2, _odd_uses)


def _drifting(rank: int, world: int) -> None:
    model = build("plain")
    del model.tp_plan["blocks.*.attn.q_norm"]
    plugin, mesh = _cut(model, rank, world)
    _step(model, plugin, mesh, token_ids())


def test_a_parameter_with_a_partial_gradient_that_the_plan_forgot_is_named() -> None:
    with pytest.raises(RankError) as failed:
        run_ranks(2, _drifting)
    texts = {message for kind, message, _ in failed.value.errors.values() if kind == "ValueError"}
    assert len(texts) == 1 and len(failed.value.errors) == 2
    named = texts.pop().split("'tp': ")[1].split(". If")[0].split(", ")
    assert set(named) == {f"blocks.{i}.attn.q_norm.{p}" for i in (0, 1) for p in ("weight", "bias")}


def _different_dropout(rank: int, world: int) -> None:
    model = build("gpt2")
    model.transformer.drop.p = 0.5
    plugin, mesh = _cut(model, rank, world)
    torch.manual_seed(rank)
    _step(model, plugin, mesh, token_ids())


def test_different_random_numbers_in_one_tensor_group_are_noticed() -> None:
    with pytest.raises(RankError, match="drew different random numbers"):
        run_ranks(2, _different_dropout)


def _uneven(rank: int, world: int) -> None:
    _cut(build("gpt2"), rank, world)


def test_every_rank_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(RankError, match="num_attention_heads=4 .*valid sizes for this model: 1, 2, 4") as failed:
        run_ranks(3, _uneven)
    assert {kind for kind, _, _ in failed.value.errors.values()} == {"ValueError"}
    assert len({message for _, message, _ in failed.value.errors.values()}) == 1 and len(failed.value.errors) == 3
