"""LoRA by PEFT around a model that is cut: the same loss, adapter gradients and weights as one process.

Needs PEFT, an optional part of the tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.plugins.tensor import TensorParallel
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.procs import RankError, run_ranks
from tests.ranks.model_parity import cut, loss_of, require_close, whole_grads
from tests.small_models import BATCH, SEQ, SIZES, build_small, randomise, token_ids

peft = pytest.importorskip("peft")

RANK, FP64, LAYERS = 4, 8, SIZES["num_hidden_layers"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "all linears": ("llama", {}, {"target_modules": LINEARS}),
    "shared key-value heads": ("qwen2", {"num_key_value_heads": 1}, {"target_modules": ["k_proj", "v_proj", "o_proj"]}),
    "the head, and a trained embedding": (
        "llama",
        {},
        {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
    ),
    "Conv1D, fused": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "packed, one head shared": (
        "phi3", {"num_key_value_heads": 1}, {"target_modules": ["qkv_proj", "o_proj"]},
    ),
    "packed": ("phi3", {}, {"target_modules": ["qkv_proj", "gate_up_proj"], "lora_bias": True}),
}


def _adapted(case: str) -> nn.Module:
    name, changes, options = CASES[case]
    model = peft.get_peft_model(build_small(name, **changes), peft.LoraConfig(r=RANK, lora_alpha=8, **options))
    return randomise(model)


def _train(model: nn.Module, plugins: list[Any], mesh: Mesh | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two steps of SGD; the losses and the gradients of the last step, as they are on this rank."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, token_ids())
        losses.append(loss.detach())
        loss.backward()
        for plugin in plugins:
            plugin.finalize_grads(model, mesh=mesh)
        optimizer.step()
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _parity(rank: int, world: int, case: str, sequence_parallel: bool | None = False) -> int:
    """Raise unless both are equal. Returns the bytes of the all-reduces."""
    reference, model = _adapted(case), _adapted(case)
    frozen = {n for n, p in reference.named_parameters() if not p.requires_grad}
    wanted, gradients = _train(reference, [], None)
    layout = Layout(tensor_parallel_size=world, sequence_parallel=sequence_parallel).resolve(world)
    mesh = Mesh.build(layout, rank)
    plugins = cut(model, mesh)
    mesh.ledger.reset()
    losses, _ = _train(model, plugins, mesh)
    sent = mesh.ledger.total("tp", "all_reduce").bytes
    for found, right in zip(losses, wanted, strict=True):
        require_close(found, right, "loss")
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == frozen
    assert all(p.grad is None for n, p in model.named_parameters() if n in frozen), "a frozen weight has a gradient"
    found_grads = whole_grads(model, plugins, mesh)
    assert found_grads.keys() == gradients.keys()
    for name, grad in found_grads.items():
        assert bool(gradients[name].any()), f"the test's gradient of {name} is zero"
        require_close(grad, gradients[name], f"gradient of {name}")
    for param in model.parameters():  # after the step
        param.grad = param.detach()
    weights = whole_grads(model, plugins, mesh)
    for name, param in reference.named_parameters():
        require_close(weights[name], param.detach(), f"weight of {name}")
    return sent


def _all(rank: int, world: int) -> dict[str, int]:
    counts = {}
    for case in CASES:
        try:
            counts[case] = _parity(rank, world, case)
            _parity(rank, world, case, sequence_parallel=None)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    return counts


def test_adapters_on_two_ranks_equal_one_process_and_send_what_theory_says() -> None:
    """Beside the model's: per step A's gradients of the column layers, per micro-batch r features of each row layer."""
    hidden = SIZES["hidden_size"]
    activation, tokens = BATCH * SEQ * hidden * FP64, BATCH * SEQ
    model_forward = (2 * LAYERS + 1) * activation + 3 * BATCH * (SEQ - 1) * FP64  # and the loss's maximum and sums
    # the embedding is frozen: nothing below the first layer's adapters needs a gradient, so its first region sends none
    model_backward = 2 * LAYERS * activation
    adapters = LAYERS * (2 * tokens * RANK + 5 * RANK * hidden) * FP64
    for counts in run_ranks(2, _all, timeout=120):
        assert counts["all linears"] == 2 * (model_forward + model_backward + adapters)


def _dropout(rank: int, world: int) -> tuple[int, bool]:
    """Number of dropouts in front of column layers, and whether all ranks dropped the same there."""
    name, changes, options = CASES["all linears"]
    config = peft.LoraConfig(r=RANK, lora_dropout=0.5, **options)
    model = randomise(peft.get_peft_model(build_small(name), config))
    layout = Layout(tensor_parallel_size=world, sequence_parallel=False).resolve(world)
    mesh = Mesh.build(layout, rank)
    plugins = cut(model, mesh)
    entering = [m for m in model.modules() if type(m).__name__ == "EnteringDropout"]
    masks: list[Tensor] = []
    for module in entering:
        module.register_forward_hook(lambda module, args, out: masks.append(out == 0))
    torch.manual_seed(7)
    _train(model, plugins, mesh)
    everyones = mesh["tp"].gather_objects(masks)
    assert all(0.2 < float(mask.float().mean()) < 0.8 for mask in masks)
    return len(entering), all(torch.equal(a, b) for a, b in zip(*everyones, strict=True))


def test_dropout_in_front_of_adapters_of_column_layers_is_the_same_on_all_ranks() -> None:
    assert run_ranks(2, _dropout) == [(LAYERS * 5, True)] * 2


def test_other_adapters_are_refused_by_name() -> None:
    model = peft.get_peft_model(build_small("llama"), peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ValueError, match="q_proj.*plain LoRA on linear layers is implemented"):
        TensorParallel().check(Layout(tensor_parallel_size=2).resolve(2), model)


def test_a_forgotten_sum_is_noticed() -> None:
    with pytest.raises(RankError, match="loss: off by"):
        run_ranks(2, _forgetful)


def _forgetful(rank: int, world: int) -> None:
    from parallax.plugins.tensor.gradients import GradientSums

    GradientSums.run = lambda self, grads: None  # type: ignore[method-assign]
    _parity(rank, world, "all linears")
