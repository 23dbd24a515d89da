"""Which layers go to which stage: the best split by brute force, the rules' costs by hand, what is refused."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.plugins.pipeline.layer_costs import measure_layer_costs
from parallax.plugins.pipeline.partition import balance, make_partition
from parallax.plugins.pipeline.plans import find_structure
from tests.parity.models import VOCAB, Plain, gpt2

HIDDEN = 32
BLOCK = 12 * HIDDEN * HIDDEN  # q, k, v, out and the two matrices of the MLP


def parts(layers: list[float], counts: Any, before: float, after: float) -> list[float]:
    ends = list(itertools.accumulate(counts))
    sums = [sum(layers[lo:hi]) for lo, hi in zip([0, *ends[:-1]], ends, strict=True)]
    sums[0] += before
    sums[-1] += after
    return sums


def test_balance_is_what_brute_force_finds() -> None:
    rng = random.Random(3)
    for _ in range(60):
        count, stages = rng.randint(2, 9), rng.randint(1, 5)
        if stages > count:
            continue
        layers = [rng.choice([1.0, 1.0, 2.0, 3.5]) for _ in range(count)]
        before, after = rng.choice([0.0, 1.0]), rng.choice([0.0, 2.0, 7.0])
        splits = [
            [hi - lo for lo, hi in zip((0, *cuts), (*cuts, count), strict=True)]
            for cuts in itertools.combinations(range(1, count), stages - 1)
        ]

        def value(counts: list[int]) -> tuple[float, float]:
            costs = parts(layers, counts, before, after)  # noqa: B023
            return max(costs), sum(c * c for c in costs)

        got = balance(layers, stages, before, after)
        assert sum(got) == count and len(got) == stages and min(got) >= 1
        assert value(got) == pytest.approx(min(value(s) for s in splits))


def test_longer_stages_come_first_when_all_else_is_equal() -> None:
    assert balance([1.0] * 10, 4) == [3, 3, 2, 2]
    assert balance([1.0] * 8, 4) == [2, 2, 2, 2]


def test_a_large_head_takes_layers_off_the_last_stage() -> None:
    assert balance([1.0] * 8, 2, after=2.0) == [5, 3]
    assert balance([1.0] * 8, 4, before=0.1, after=4.0) == [2, 3, 2, 1]


def test_costs_of_a_plain_module_by_hand() -> None:
    model = Plain(depth=4)
    structure = find_structure(model)
    found = make_partition(model, structure, 2)
    whole = 4 * BLOCK + HIDDEN + VOCAB * HIDDEN  # an embedding costs one row, the head its matrix
    assert found.bounds == ((0, 2), (2, 4)) and found.how == "by cost"
    assert found.shares == pytest.approx(((2 * BLOCK + HIDDEN) / whole, (2 * BLOCK + VOCAB * HIDDEN) / whole))
    found = make_partition(model, structure, 2, "parameters")
    # matrices, 9 biases of width h (4h of the MLP's first) and two norms of 2h each
    block, head, norm = BLOCK + (4 + 4 + 1) * HIDDEN + 4 * HIDDEN, VOCAB * HIDDEN, 2 * HIDDEN
    whole = 4 * block + 2 * head + norm
    assert found.shares == pytest.approx(((2 * block + head) / whole, (2 * block + head + norm) / whole))
    assert make_partition(Plain(depth=5), find_structure(Plain(depth=5)), 2, "uniform").bounds == ((0, 3), (3, 5))


def test_a_tied_head_costs_what_an_untied_one_does() -> None:
    model = gpt2()
    found = make_partition(model, find_structure(model), 4)
    layer = 12 * HIDDEN * HIDDEN
    whole = 4 * layer + 2 * HIDDEN + VOCAB * HIDDEN
    assert found.shares[-1] == pytest.approx((layer + VOCAB * HIDDEN) / whole)


@pytest.mark.parametrize(
    "asked",
    [
        [1, 2, 1],
        ["layers.1", "layers.3"],
        [["layers.0"], ["layers.1", "layers.2"], ["layers.3"]],
        {"layers.0": 3, "layers.1": 2, "layers.2": 1, "layers.3": 2, "head": 1.0},
    ],
)
def test_partitions_by_hand(asked: Any) -> None:
    model = Plain(depth=4)
    found = make_partition(model, find_structure(model), 3, asked)
    assert found.bounds == ((0, 1), (1, 3), (3, 4))
    assert sum(found.shares) == pytest.approx(1)


def test_costs_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({f"layers.{i}": 1.0 + 4 * (i == 0) for i in range(4)}))
    model = Plain(depth=4)
    found = make_partition(model, find_structure(model), 2, str(file))
    assert found.bounds == ((0, 1), (1, 4)) and found.how == "by the costs in costs.json"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("costs", "pp_partition='costs' is no rule; use one of cost, parameters, uniform"),
        ("none.json", "no file 'none.json'"),
        ([1, 2], r"gives stages of \[1, 2\] layers; there must be 3 stages of at least 1 layer, 4 in all, e.g. \[2, 1"),
        ([2, 2, 0], r"stages of \[2, 2, 0\] layers"),
        (["layers.1"], r"stages of \[1, 3\] layers"),
        (["layers.1", "layer.2"], "'layer.2', which is none of the layers; did you mean 'layers.2'"),
        ([["layers.0"], ["layers.2"], ["layers.1", "layers.3"]], "each layer of 'layers' once, in order"),
        ({"layers.0": 1.0}, "no cost for layers.1, layers.2, layers.3"),
        ({"layers.0": 1.0, "heat": 1.0}, "'heat', which is neither a layer.*did you mean 'head'"),
        ({"layers.0": -1.0}, "costs are at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(asked: Any, message: str) -> None:
    model = Plain(depth=4)
    with pytest.raises(ValueError, match=message):
        make_partition(model, find_structure(model), 3, asked)


class Uneven(nn.Module):
    """The second layer does ten times the work of the others."""

    pp_plan = {"layers": None, "head": None}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(*(nn.Linear(64, 64) for _ in range(n))) for n in (4, 40, 4, 4))
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_measured_costs_find_the_slow_layer() -> None:
    model = Uneven()
    costs = measure_layer_costs(model, lambda: model(torch.randn(64, 64, requires_grad=True)).sum())
    assert list(costs) == ["layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert costs["layers.1"] > 2 * max(costs[f"layers.{i}"] for i in (0, 2, 3))
    assert all(p.grad is None for p in model.parameters()) and not model.head._forward_hooks
    assert make_partition(model, find_structure(model), 3, costs).bounds[1] == (1, 2)
    with pytest.raises(ValueError, match=r"did not run layers.0"):
        measure_layer_costs(model, lambda: model.head(torch.zeros(1, 64, requires_grad=True)).sum())


