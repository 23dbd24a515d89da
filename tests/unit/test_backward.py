"""A backward in two halves is exact, holds what it must and no more, and takes what it cannot postpone along in I."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parallax.plugins.pipeline.backward import Postponed, Seed
from parallax.plugins.pipeline.random_state import RandomState

FP64 = torch.float64


class Products(nn.Module):
    """Every way to write a product with a weight, and weights used in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.no_bias = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.turned = nn.Parameter(torch.randn(6, 6))  # [in, out], as transformers' Conv1D
        self.turned_bias = nn.Parameter(torch.randn(6))
        self.raw = nn.Parameter(torch.randn(6, 6))
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.randn(6))
        self.frozen, self.half_frozen = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.half_frozen.bias.requires_grad_(False)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.tied = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.no_bias(F.gelu(self.plain(self.norm(x)))) * self.scale
        x = torch.addmm(self.turned_bias, x.reshape(-1, 6), self.turned).view(x.shape)
        x = self.half_frozen(self.frozen(x @ self.raw))
        x = x + F.linear(torch.matmul(x, self.raw), self.raw.t())
        x = x + self.attention(x, x, x)[0]
        return self.tied(F.relu(self.tied(x)))


def whole(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return x.grad, found


def halves(model: Callable[[Tensor], Tensor], x: Tensor, postponed: Postponed) -> Tensor:
    x = x.clone().requires_grad_()
    with postponed:
        loss = model(x).square().sum()
    with postponed:
        loss.backward()
    assert x.grad is not None
    return x.grad


def run(scalar: Tensor) -> None:
    scalar.backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_two_halves_are_the_whole(recompute: bool) -> None:
    torch.manual_seed(1)
    model, x = Products().to(FP64), torch.randn(2, 5, 6, dtype=FP64)
    want_x, want = whole(model, x)
    postponed = Postponed()
    call: Callable[[Tensor], Tensor] = model
    if recompute:
        call = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    got_x = halves(call, x, postponed)
    torch.testing.assert_close(got_x, want_x, rtol=1e-12, atol=1e-12)
    early = {n for n, p in model.named_parameters() if p.grad is not None}
    late = {"plain.weight", "plain.bias", "no_bias.weight", "turned", "turned_bias", "raw", "half_frozen.weight"}
    assert early.isdisjoint(late | {"tied.weight"}), "these wait for W"
    assert {"norm.weight", "norm.bias", "scale", "attention.in_proj_weight"} <= early, "these are part of I"
    postponed.finish(run)
    assert {n for n, p in model.named_parameters() if p.grad is not None} == want.keys()
    for name, grad in want.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("bias", [False, True])
def test_products_in_fp32_that_go_through_onednn(bias: bool) -> None:
    """Large enough for it; where a processor has none, torch's own are tested."""
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(128, 128, bias), nn.GELU(), nn.Linear(128, 96, bias)), torch.randn(2, 64, 128)
    want_x, want = whole(copy.deepcopy(model).to(FP64), x.to(FP64))
    postponed = Postponed()
    got_x = halves(model, x, postponed)
    postponed.finish(run)
    torch.testing.assert_close(got_x, want_x.float(), rtol=1e-5, atol=1e-5 * float(want_x.abs().max()))
    for name, grad in want.items():
        got = model.get_parameter(name).grad
        torch.testing.assert_close(got, grad.float(), rtol=1e-5, atol=1e-5 * float(grad.abs().max()), msg=name)


def test_several_micro_batches_wait_at_once_and_add_up() -> None:
    model = Products().to(FP64)
    batches = [torch.randn(2, 5, 6, dtype=FP64) for _ in range(3)]
    want = [whole(model, x) for x in batches]
    waiting = [Postponed() for _ in batches]
    for i in (2, 0, 1):
        torch.testing.assert_close(halves(model, batches[i], waiting[i]), want[i][0])
    for postponed in waiting:
        postponed.finish(run)
    for name in want[0][1]:
        total = sum(grads[name] for _, grads in want)
        torch.testing.assert_close(model.get_parameter(name).grad, total, msg=name)


def test_between_the_halves_only_inputs_and_output_gradients_are_held() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6)).to(FP64)
    postponed = Postponed()
    alive: list[weakref.ref[Any]] = []
    model[1].register_forward_hook(lambda _, args, out: alive.extend(map(weakref.ref, (args[0], out))))
    x = torch.randn(2, 5, 6, dtype=FP64, requires_grad=True)
    with postponed:
        model(x).square().sum().backward()
    gc.collect()
    assert alive[0]() is None, "the input of GELU is needed by I alone"
    # x, GELU's output, and the gradients of both products' outputs: 10 tokens of 8 bytes times their widths
    assert sorted(postponed.storages().values()) == sorted(10 * 8 * width for width in (6, 8, 8, 6))
    postponed.finish(run)
    assert not postponed.storages()


@pytest.mark.parametrize("width", [torch.float32, FP64])
def test_autocast_casts_as_torch_does(width: torch.dtype) -> None:
    model, x = Products().to(width), torch.randn(2, 5, 6, dtype=width)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    x_plain = x.clone().requires_grad_()
    cast(x_plain).float().square().sum().backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    postponed, x_halves = Postponed(), x.clone().requires_grad_()
    with postponed:
        cast(x_halves).float().square().sum().backward()
    postponed.finish(run)
    assert torch.equal(x_halves.grad, x_plain.grad)  # type: ignore[arg-type]
    for name, grad in want.items():
        got = model.get_parameter(name).grad
        assert got is not None and got.dtype == grad.dtype
        torch.testing.assert_close(got, grad, rtol=2e-2, atol=2e-2 * float(grad.abs().max()), msg=name)


def test_a_seed_hands_gradients_on_and_lets_outputs_go() -> None:
    x = torch.randn(3, requires_grad=True)
    outputs = [x * 2, x.exp()]
    grads: list[Tensor] = []
    seed = Seed.apply(grads, *outputs)
    gone = weakref.ref(outputs[0])
    exp = outputs[1].detach().clone()
    outputs.clear()
    assert gone() is None
    grads += [torch.ones(3), torch.full((3,), 3.0)]
    seed.backward()
    torch.testing.assert_close(x.grad, 2 + 3 * exp)
    assert not grads


def test_random_numbers_are_drawn_again() -> None:
    torch.manual_seed(4)
    state = RandomState.now(torch.device("cpu"))
    first = torch.rand(3)
    after = torch.rand(3)
    torch.manual_seed(4)
    torch.rand(3)
    with state.restored():
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3), after)
