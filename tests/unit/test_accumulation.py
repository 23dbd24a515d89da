"""Gradients that are added where they are made equal autograd's, and are left to autograd where it is watched."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from parallax.plugins.pipeline.backward import Postponed
from parallax.strategies.accumulating import accumulate_in, restore
from parallax.strategies.accumulation import Accumulation


class Model(nn.Module):
    """Every layer that adds, one that is tied, one that is frozen, one used twice, and a product written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 6, padding_idx=2), nn.Embedding(5, 6)
        self.first, self.turned = nn.Linear(6, 8), Conv1D(6, 8)
        self.no_bias, self.frozen, self.partly = nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.partly.bias.requires_grad_(False)
        self.raw, self.norm = nn.Parameter(torch.randn(6, 6)), nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = x + self.turned(torch.tanh(self.first(self.norm(x))))
        x = self.partly(self.frozen(self.no_bias(torch.tanh(self.no_bias(x))))) @ self.raw
        out: Tensor = self.head(x)
        return out


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(i)) for i in range(count)]


def loss(model: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    return model(ids).double().square().mean()


def autograd(model: Model, count: int = 3) -> dict[str, Tensor]:
    """Gradients of several backwards of a copy that adds nothing."""
    plain = copy.deepcopy(model)
    for ids in batches(count):
        loss(plain, ids).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def assert_same(model: Model, want: dict[str, Tensor], **close: Any) -> None:
    assert {name for name, p in model.named_parameters() if p.grad is not None} == want.keys()
    for name, grad in want.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad, **(close or EXACT), msg=name)


EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def model() -> Iterator[Model]:
    torch.manual_seed(3)
    yield Model().double()


def added(monkeypatch: Any) -> list[nn.Parameter]:
    """Filled with the parameters whose gradients are added."""
    seen: list[nn.Parameter] = []
    plain = Accumulation.added

    def touched(self: Accumulation, param: Any) -> None:
        seen.append(param)
        plain(self, param)

    monkeypatch.setattr(Accumulation, "added", touched)
    return seen


def names(model: Model, params: list[nn.Parameter]) -> set[str]:
    return {name for name, p in model.named_parameters() if any(p is q for q in params)}


PRODUCTS = {"first.weight", "turned.weight", "no_bias.weight", "partly.weight", "words.weight"}


@pytest.mark.parametrize("recompute", [None, "plain", "reentrant"])
def test_what_is_added_is_what_autograd_adds(model: Model, recompute: str | None, monkeypatch: Any) -> None:
    seen, want = added(monkeypatch), autograd(model)
    into = Accumulation(model.parameters())
    accumulate_in(model)

    def run(ids: Tensor) -> Tensor:
        if recompute is None:
            return model(ids)
        anchor = torch.ones((), dtype=torch.float64, requires_grad=True)
        out: Tensor = checkpoint(lambda x, one: model(x) * one, ids, anchor, use_reentrant=recompute == "reentrant")
        return out

    for ids in batches():
        total = loss(run, ids)
        with into.during(total):
            total.backward()
    assert_same(model, want)
    expected = set() if recompute == "reentrant" else PRODUCTS | {"places.weight"}  # whose backward is another one
    assert names(model, seen) == expected


def test_buffers_of_the_engine_are_added_to_in_place(model: Model) -> None:
    want = autograd(model)
    touched: set[Tensor] = set()
    views = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
    for p, view in views.items():
        p.grad = view
        p.register_post_accumulate_grad_hook(touched.add)
    into = Accumulation(model.parameters(), touched.add)
    accumulate_in(model)
    into.repeats = False  # there is a gradient before the first backward
    for ids in batches():
        total = loss(model, ids)
        with into.during(total):
            total.backward()
    assert_same(model, want)
    assert all(p.grad is view for p, view in views.items()) and touched == set(views)


@pytest.mark.parametrize("mixed", [False, True])
def test_narrow_dtypes_round_as_autograd_does(model: Model, mixed: bool, monkeypatch: Any) -> None:
    model = model.float() if mixed else model.bfloat16()
    # A weight used twice has its products summed in bf16 where autocast keeps the weight's copy.
    context: Any = torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if mixed else nullcontext()
    with context:
        want = autograd(model, 2)
    seen, into = added(monkeypatch), Accumulation(model.parameters())
    accumulate_in(model)
    for ids in batches(2):
        with context:
            total = loss(model, ids)
        with into.during(total):
            total.backward()
    dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    assert dtypes == {torch.float32 if mixed else torch.bfloat16}
    # With autocast each product is rounded before it is added, as autograd does. In bf16 it is rounded once, after.
    assert_same(model, want, **({"rtol": 1e-6, "atol": 1e-6} if mixed else {"rtol": 2e-2, "atol": 2e-2}))
    assert PRODUCTS - {"words.weight"} <= names(model, seen)


def test_a_gradient_that_is_watched_is_autograds(model: Model, monkeypatch: Any) -> None:
    seen, calls = added(monkeypatch), list[str]()
    into = Accumulation(model.parameters())
    accumulate_in(model)
    model.first.weight.register_hook(lambda grad: calls.append("before"))
    model.turned.weight.register_post_accumulate_grad_hook(lambda param: calls.append("after"))
    total = loss(model, batches()[0])
    with into.during(total):
        total.backward()
    assert sorted(calls) == ["after", "before"]
    assert names(model, seen).isdisjoint({"first.weight", "turned.weight"}) and "no_bias.weight" in names(model, seen)


def test_a_backward_of_the_users_own_adds_nothing(model: Model) -> None:
    into = Accumulation(model.parameters())
    accumulate_in(model)
    plain = copy.deepcopy(model)
    ids = batches()[0]
    weights = (model.first.weight, model.words.weight, model.turned.weight)
    got = torch.autograd.grad(loss(model, ids), weights, create_graph=True)
    same = (plain.first.weight, plain.words.weight, plain.turned.weight)
    want = torch.autograd.grad(loss(plain, ids), same, create_graph=True)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, **EXACT)
    assert all(p.grad is None for p in model.parameters())
    total, other = (torch.stack([g.square().sum() for g in grads]).sum() for grads in (got, want))
    with into.during(total):
        total.backward()  # of a gradient: through the first backward
    other.backward()
    assert_same(model, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})


def test_one_backward_a_step_is_left_alone(model: Model, monkeypatch: Any) -> None:
    seen, into = added(monkeypatch), Accumulation(model.parameters())
    accumulate_in(model)
    into.repeats = False
    total = loss(model, batches()[0])
    with into.during(total):
        total.backward()
    assert not seen


def test_postponed_gradients_are_added_in_w(model: Model, monkeypatch: Any) -> None:
    seen, want, into = added(monkeypatch), autograd(model, 2), Accumulation(model.parameters())
    accumulate_in(model)
    for ids in batches(2):
        postponed = Postponed()
        seen.clear()
        with postponed:
            total = loss(model, ids)
        with postponed, into.during(total):
            total.backward()
        early = names(model, seen)
        postponed.finish(lambda scalar: pytest.fail("nothing is left for autograd"))
    assert_same(model, want)
    assert early == {"words.weight", "places.weight"} and {"raw", "first.bias"} | PRODUCTS <= names(model, seen)


def test_copies_and_saved_layers_are_plain_and_classes_come_back(model: Model) -> None:
    kinds = {name: type(m) for name, m in model.named_modules()}
    into = Accumulation(model.parameters())
    changed = accumulate_in(model)
    assert sorted(n for n, m in model.named_modules() if m in changed) == sorted(
        ("words", "places", "first", "turned", "no_bias", "frozen", "partly", "head")
    )
    assert all(isinstance(m, kinds[n]) for n, m in model.named_modules())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert {name: type(m) for name, m in other.named_modules()} == kinds
        assert not any(value for p in other.parameters() for value in vars(p).values())
        torch.testing.assert_close(other(batches()[0]), model(batches()[0]), **EXACT)
    restore(changed)
    into.release()
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert not any(vars(p) for p in model.parameters())
