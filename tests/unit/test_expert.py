"""What expert parallelism refuses, with the numbers that would do; how parameters are cut; the capacity rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallax.plugins.expert import ExpertParallel
from parallax.plugins.expert.block import find_router
from parallax.plugins.expert.plans import find_experts
from parallax.plugins.expert.plugin import _cuts
from parallax.plugins.expert.router import in_fp32
from parallax.plugins.expert.routing import within_capacity
from parallax.strategies.assemble import make_plugins
from parallax.strategies.layout import Layout
from tests.parity.models import Plain
from tests.parity.moe_models import PlainMoe, deepseek_v3, gpt_oss, mixtral, olmoe, qwen3_moe
from tests.small_models import build_small


def check(layout: str, model: nn.Module, world: int = 48, **options: Any) -> None:
    ExpertParallel(**options).check(Layout.parse(layout).resolve(world), model)


@pytest.mark.parametrize(("size", "valid"), [(8, "1, 2, 4"), (3, "1, 2, 4")])
def test_experts_that_ranks_do_not_divide(size: int, valid: str) -> None:
    with pytest.raises(ValueError, match=rf"4 experts.*expert_parallel_size={size}.*use one of {valid}$"):
        check(f"ep{size}", PlainMoe())


def test_every_layer_counts() -> None:
    model = PlainMoe()
    odd: Any = model.layers[2]
    odd.experts = type(odd.experts)(32, 24, 6)
    with pytest.raises(ValueError, match=r"layers\.2\.experts has 6 experts"):
        check("ep4", model)


def test_a_dense_model() -> None:
    with pytest.raises(ValueError, match="no plan for its experts; give it one"):
        check("ep2", Plain())


def test_experts_in_a_list_of_modules() -> None:
    model = nn.Module()
    model.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    with pytest.raises(ValueError, match="'experts' is a list of modules"):
        check("ep2", model)


def test_parameters_of_no_single_expert_do_not_fold_over_tp() -> None:
    model = PlainMoe()
    model.ep_plan = {name: word for name, word in PlainMoe.ep_plan.items() if not name.endswith("down")}
    check("tp2 ep2", model)
    with pytest.raises(ValueError, match=r"does not say that down belong to single experts"):
        check("tp2 ep2 etp1", model)


@pytest.mark.parametrize("layout", ["dp2 ep2", "tp2 etp1"])
def test_adapters_on_experts_do_not_travel(layout: str) -> None:
    from peft import LoraConfig, get_peft_model

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(mixtral(), LoraConfig(target_modules=[], target_parameters=names))
    with pytest.raises(ValueError, match=r"0.mlp.experts has adapters .*target_modules.*or keep experts on every rank"):
        check(layout, model, world=2)
    check("tp2", model, world=2)


def test_a_width_that_tp_does_not_divide() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=16 does not divide the experts' width 24"):
        check("tp16 ep2", PlainMoe(), world=32)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"balance": "all"}, "microbatch, global"), ({"capacity_factor": 0}, "above 0"), ({"capacity_factor": -1}, "-1")],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertParallel(**options)


def test_capacity_without_experts() -> None:
    with pytest.raises(ValueError, match="expert_capacity_factor is set, but the model has no plan"):
        check("dp2", Plain(), world=2, capacity_factor=1.0)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe, deepseek_v3, gpt_oss, olmoe])
@pytest.mark.parametrize("mixed", [True, False])
def test_a_router_in_fp32(make: Any, mixed: bool) -> None:
    """Its scores and the gradient of its weights are those of fp32 products, in bf16 and under autocast."""
    torch.manual_seed(2)
    model = make().to(torch.float32 if mixed else torch.bfloat16)
    block = model.model.layers[-1].mlp
    router = find_router(block, "experts", block.experts.num_experts)
    nn.init.normal_(router.weight)
    x = torch.randn(7, 32).bfloat16()
    want = x.double() @ router.weight.detach().double().t()
    want += getattr(router, "bias", torch.zeros(())).detach().double()
    in_fp32(router)
    scores = _scores_of(router, x, mixed)
    assert scores.dtype is torch.float32
    torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(scores.sum(), router.weight)
    torch.testing.assert_close(grad, x.float().sum(0).expand_as(grad).to(grad.dtype))


def _scores_of(router: Any, x: Any, mixed: bool) -> Any:
    """What a linear product in it returned."""
    found = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            found.extend([out] if func is nn.functional.linear else [])
            return out

    with torch.autocast("cpu", torch.bfloat16, enabled=mixed), Seen():
        router(x)
    (scores,) = found
    return scores


def test_no_router_beside_the_experts() -> None:
    model = PlainMoe()
    check("dp2", model, world=2, router_fp32=True)
    layer: Any = model.layers[1]
    layer.router = nn.Identity()
    with pytest.raises(ValueError, match=r"beside layers\.1\.experts there is not one module with a matrix of 4 rows"):
        check("dp2", model, world=2, router_fp32=True)
    with pytest.raises(ValueError, match="expert_router_fp32 is set, but the model has no plan"):
        check("dp2", Plain(), world=2, router_fp32=True)


def test_capacity_of_experts_without_weights() -> None:
    with pytest.raises(ValueError, match=r"experts without weights \(identity_expert\), which have no capacity"):
        check("tp2", build_small("longcat_flash"), world=2, capacity_factor=1.0)


def test_options_that_nothing_reads() -> None:
    with pytest.raises(ValueError, match="expert_capacity_factor is set"):
        make_plugins(Layout.parse("auto").resolve(1), {"ep": {"plan": None, "capacity_factor": 1.0}})


def test_first_layers_dense() -> None:
    found = [target.fqn for target in find_experts(qwen3_moe(dense=2))]
    assert found == ["model.layers.2.mlp.experts", "model.layers.3.mlp.experts"]


@pytest.mark.parametrize("model", [PlainMoe, mixtral])
def test_parts_of_all_ranks_are_the_whole(model: Any) -> None:
    """Every element is held once by the ranks of ep x tp, and counted once in the norm."""
    target = find_experts(model())[0]
    for name, param in target.module.named_parameters():
        whole, owned = torch.zeros_like(param), 0
        for ep in range(2):
            for tp in range(2):
                shard = _cuts(target, (2, ep), (2, tp))[name]
                part = shard.take(param.detach())
                shard.put(whole, part)
                owned += part.numel() if shard.owner else 0
        assert torch.equal(whole, param) and owned == param.numel()


def test_capacity_keeps_the_highest_weights() -> None:
    choices = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]])
    weights = torch.tensor([[0.5, 0.1], [0.7, 0.1], [0.5, 0.1], [0.9, 0.1]])
    kept = within_capacity(choices, weights, 4, 1.0)  # 4 tokens * 2 choices / 4 experts = 2 each
    assert kept.tolist() == [[4, 1], [0, 2], [4, 1], [0, 3]]
    assert torch.equal(within_capacity(choices, weights, 4, 2.0), choices)
