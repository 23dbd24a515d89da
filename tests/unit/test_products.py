"""Products in fp32, whoever computes them, equal those in fp64; layers built on them are autograd's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallax.strategies import products
from parallax.strategies.accumulating import accumulate_in, linear
from parallax.strategies.accumulation import Accumulation
from parallax.strategies.products import add_product, linear_product, multiply, outer, product

BIG = (512, 64, 48)
"""Rows, inner and outer features: more multiplications than the smallest product that goes through oneDNN."""


def _like(kind: str, rows: int, cols: int) -> Tensor:
    """[rows, cols], laid out as gradients and slices are."""
    made: dict[str, Any] = {
        "plain": lambda: torch.randn(rows, cols),
        "transposed": lambda: torch.randn(cols, rows).t(),
        "columns of a wider one": lambda: torch.randn(rows, cols + 9)[:, 5:-4],
        "every second row": lambda: torch.randn(2 * rows, cols)[::2],
        "one row": lambda: torch.randn(1, cols).expand(rows, cols),
        "one column": lambda: torch.randn(rows, 1).expand(rows, cols),
    }
    return made[kind]()  # type: ignore[no-any-return]


KINDS = ("plain", "transposed", "columns of a wider one", "every second row", "one row", "one column")


@pytest.mark.parametrize("left", KINDS)
@pytest.mark.parametrize("right", KINDS)
@torch.no_grad()
def test_products_of_any_layout(left: str, right: str) -> None:
    torch.manual_seed(0)
    n, k, m = BIG
    assert n * k * m >= products.SMALLEST
    x, w = _like(left, n, k), _like(right, m, k)
    want, bias, before = x.double() @ w.double().t(), torch.randn(m), torch.randn(n, m)
    out = torch.full((m, n), float("nan")).t()
    found = {
        "product": (product(x, w.t()), want),
        "out": (product(x, w.t(), out), want),
        "added": (add_product(before.clone(), x, w.t()), want + before),
        "linear": (linear_product(x.unsqueeze(1), w, bias).squeeze(1), want + bias),
    }
    for name, (got, right_one) in found.items():
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), right_one, rtol=1e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert found["out"][0] is out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weight", ["accumulated", "plain", "frozen"])
def test_a_layer_is_autograds(weight: str, bias: bool) -> None:
    """Output, first and second derivatives of a large fp32 layer, and the output without autograd."""
    torch.manual_seed(1)
    n, k, m = BIG
    layer, x = nn.Linear(k, m, bias=bias).requires_grad_(weight != "frozen"), torch.randn(2, n // 2, k)
    into = Accumulation(layer.parameters())
    if weight != "accumulated":
        into.release()
    params = [p for p in layer.parameters() if p.requires_grad]

    def derivatives(forward: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = forward(leaf, layer.weight, layer.bias)
        first = torch.autograd.grad(out.sin().sum(), [leaf, *params], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [leaf, *params], allow_unused=True)
        return [out, *first, *(g for g in second if g is not None)]

    for got, want in zip(derivatives(linear), derivatives(F.linear), strict=True):
        size = want.abs().max().item()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * size)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, layer.weight, layer.bias), layer(x), rtol=1e-5, atol=1e-5)
    vmapped = torch.vmap(lambda part: linear(part, layer.weight, layer.bias))(x)
    torch.testing.assert_close(vmapped, layer(x), rtol=1e-5, atol=1e-5)


def test_gradients_of_several_backwards() -> None:
    """fp32 sums of a layer that adds them in place, against fp64."""
    torch.manual_seed(2)
    n, k, m = BIG
    layer = nn.Linear(k, m)
    want, batches = nn.Linear(k, m).double(), torch.randn(3, n, k)
    want.load_state_dict(layer.state_dict())
    into = Accumulation(layer.parameters())
    accumulate_in(layer)
    for x in batches:
        loss = layer(x).square().sum()
        with into.during(loss):
            loss.backward()
        want(x.double()).square().sum().backward()
    for got, right in zip(layer.parameters(), want.parameters(), strict=True):
        assert got.grad is not None
        assert right.grad is not None
        torch.testing.assert_close(got.grad.double(), right.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n", [0, 1, 31, 32, 300, 513])
def test_products_in_blocks(n: int) -> None:
    """fp32 against fp64, relative to the size of the sums."""
    gen = torch.Generator().manual_seed(n)
    x, w, g = (torch.randn(*size, generator=gen) for size in ((n, 33), (33, 20), (n, 20)))
    product, weight = torch.full((n, 20), float("nan")), torch.full((33, 20), float("nan"))
    multiply(x, w, product)
    outer(x, g, weight)
    torch.testing.assert_close(product.double(), x.double() @ w.double(), rtol=1e-5, atol=1e-5 * 33**0.5)
    torch.testing.assert_close(weight.double(), x.double().t() @ g.double(), rtol=1e-5, atol=1e-5 * max(n, 1) ** 0.5)
    outer(x, g, weight, add=True)
    torch.testing.assert_close(weight.double(), 2 * (x.double().t() @ g.double()), rtol=1e-5, atol=1e-4)
    strided = torch.empty(20, n).t()
    multiply(x, w.t().contiguous().t(), strided)
    torch.testing.assert_close(strided, product, rtol=1e-5, atol=1e-5 * 33**0.5)


@pytest.mark.parametrize("trained", [True, False])
def test_the_input_of_a_frozen_weight_is_not_kept(trained: bool) -> None:
    layer, x = nn.Linear(64, 48), torch.randn(512, 64, requires_grad=True)
    layer.weight.requires_grad_(trained)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = linear(x.clone(), layer.weight, layer.bias)
    assert sum(tensor.shape == x.shape for tensor in kept) == trained
    out.sum().backward()
    assert x.grad is not None and (layer.weight.grad is not None) is trained
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(512, 64))
