"""Experts computed one after the other over sorted rows equal transformers' own "eager" forward; blocked products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from parallax.plugins.expert.grouped import grouped, takes
from parallax.strategies.accumulation import Accumulation

HIDDEN, WIDTH, EXPERTS = 6, 5, 4


def experts(kind: str) -> Any:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "experts_implementation": "eager"}
    made: Any = {
        "mixtral": lambda: MixtralExperts(MixtralConfig(**sizes, intermediate_size=WIDTH, num_local_experts=EXPERTS)),
        "transposed, biases": lambda: GptOssExperts(
            GptOssConfig(**sizes, intermediate_size=WIDTH, num_local_experts=EXPERTS)
        ),
        "no gate": lambda: NemotronHExperts(
            NemotronHConfig(**sizes, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS)
        ),
    }[kind]()
    torch.manual_seed(1)
    for param in made.parameters():
        nn.init.normal_(param)
    return made.double()


def run(forward: Any, module: Any, rows: Tensor) -> list[Tensor]:
    module.zero_grad()
    rows = rows.clone().requires_grad_()
    out = forward(rows)
    (out * out.detach().cos()).sum().backward()
    found = [rows.grad, *(p.grad for p in module.parameters())]
    return [out.detach(), *(g.clone() for g in found if g is not None)]


@pytest.mark.parametrize("kind", ["mixtral", "transposed, biases", "no gate"])
@pytest.mark.parametrize("counts", [[3, 0, 2, 4], [0, 0, 0, 7], [1, 1, 1, 0]])
def test_equals_the_models_own_forward(kind: str, counts: list[int]) -> None:
    module, total = experts(kind), sum(counts)
    rows = torch.randn(total, HIDDEN, dtype=torch.float64)
    chosen = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts)).unsqueeze(1)
    want = run(lambda x: module(x, chosen, x.new_ones(total, 1)), module, rows)
    assert not takes(module)
    module.config._experts_implementation = "grouped_mm"
    assert takes(module)
    got = run(lambda x: grouped(module, x, counts), module, rows)
    assert len(got) == len(want) == 2 + len(list(module.parameters()))
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-12)


def test_no_rows_give_zero_gradients() -> None:
    module = experts("transposed, biases")
    rows = torch.empty(0, HIDDEN, dtype=torch.float64)
    out, of_rows, *of_weights = run(lambda x: grouped(module, x, [0] * EXPERTS), module, rows)
    assert out.shape == of_rows.shape == (0, HIDDEN)
    assert len(of_weights) == 4 and not any(g.any() for g in of_weights)


@pytest.mark.parametrize("kind", ["mixtral", "transposed, biases"])
def test_gradients_are_added_to_those_there_are(kind: str) -> None:
    """In a backward of the data engine: two of them give twice the gradient of one, in the same memory."""
    module, rows, touched = experts(kind), torch.randn(6, HIDDEN, dtype=torch.float64), list[Tensor]()
    want = run(lambda x: grouped(module, x, [3, 0, 2, 1]), module, rows)
    memory = [p.grad for p in module.parameters()]
    into = Accumulation(module.parameters(), touched.append)
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(lambda p: None)  # the engine's, which `touched` stands for
    loss = (grouped(module, rows, [3, 0, 2, 1]) * want[0].cos()).sum()
    with into.during(loss):
        loss.backward()
    assert [id(p) for p in touched] == [id(module.gate_up_proj), id(module.down_proj)]
    for param, grad, one in zip(module.parameters(), memory, want[2:], strict=True):
        assert param.grad is grad
        torch.testing.assert_close(param.grad, 2 * one)


def test_frozen_weights_and_other_forms() -> None:
    module = experts("mixtral").requires_grad_(False)
    out, of_rows = run(lambda x: grouped(module, x, [2, 0, 1, 0]), module, torch.ones(3, HIDDEN).double())
    assert of_rows.any()
    module.config._experts_implementation = "grouped_mm"
    module.adapter = nn.Linear(2, 2)  # more than products, biases and a gate
    assert not takes(module)
