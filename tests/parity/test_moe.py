"""Mixture-of-experts models with experts on different ranks equal one plain torch process, in fp64.

Losses, norms, every gradient and every weight after 5 clipped AdamW steps, as in `test_parity.py`. Every model runs
with experts over ep alone and with one or two other axes, so that each layout is met by two models or more;
`--all-layouts` runs every model at every layout. The one process computes transformers' experts in its "eager" way; on
ranks every second layout computes them in Parallax's own, which is what "grouped_mm" stands for on CPUs. Both sides run
inside `KeepDouble`: routers upcast to fp32, and a choice between two experts whose scores are closer than 1e-7 would
otherwise depend on rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from parallax.strategies.verify.exact import KeepDouble
from tests.parity import harness, reference
from tests.parity.moe_models import MOE
from tests.parity.test_parity import assert_equal, zero_in_theory
from tests.procs import run_ranks

LAYOUTS = {
    2: ["dp2 ep2", "cp2 ep2", "tp2 ep2 etp1"],
    4: [
        "dp4 ep4",
        "tp2 dp2 ep4 etp1",
        "tp4 ep2 etp2",
        "tp2 dp2 ep2 etp1 zero2",
        "tp2 dp2 ep2",
        "pp2 dp2 ep2 mb2",
        "dp2 cp2 ep4",
        "dp4 ep2 zero1",
        "dp4 ep2 zero2",
        "dp4 ep2 zero3",
        "tp2 dp2 ep2 zero3",
        "pp2 dp2 ep2 zero2 mb2",
    ],
}

HUNG = ("deepseek_v3", "dp4 ep2 zero3")
"""Its ranks once waited for each other: DeepSpeed gathered ahead around a shared expert that runs early."""

RAGGED = {
    ("mixtral", "dp4 ep4"): (3, 1, 2, 2),
    ("qwen3_moe", "tp2 dp2 ep4 etp1"): (5, 3),
    ("deepseek_v3", "pp2 dp2 ep2 mb2"): (5, 3),
}
"""Rows of the last batch on each data rank, where it is spread unevenly."""


def cases_of(world: int, everything: bool) -> list[tuple[str, str]]:
    """(model, layout) on `world` ranks: all of them, or every third layout for each model."""
    return [
        (model, layout)
        for at, model in enumerate(MOE)
        for i, layout in enumerate(LAYOUTS[world])
        if everything or i % 3 == at % 3 or (model, layout) == HUNG
    ]


def params() -> Any:
    for world in LAYOUTS:
        usual = cases_of(world, everything=False)
        for case in cases_of(world, everything=True):
            name = f"{case[0]}-{case[1].replace(' ', '_')}"
            yield pytest.param(world, case, id=name, marks=() if case in usual else pytest.mark.all_layouts)


def experts_of(world: int, model: str, layout: str) -> str | None:
    return "grouped_mm" if model != "plain_moe" and LAYOUTS[world].index(layout) % 2 == 0 else None


def train(rank: int, world: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    def run(model: str, layout: str) -> Any:
        return harness.train_rank(
            rank, world, model, torch.float64, layout, {}, experts=experts_of(world, model, layout),
            last=RAGGED.get((model, layout), ()),
        )  # fmt: skip

    with KeepDouble():
        return {case: run(*case) for case in cases}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Any:
    """Number of ranks -> what every rank returned, run once."""
    everything = request.config.getoption("--all-layouts")
    return cache(lambda world: run_ranks(world, train, cases_of(world, everything), timeout=900 if everything else 170))


@pytest.fixture(scope="module")
def references() -> Any:
    def train_whole(model: str) -> reference.Run:
        with KeepDouble():
            return reference.train(model, torch.float64)

    return cache(train_whole)


@pytest.mark.limit(1000)
@pytest.mark.parametrize(("world", "case"), list(params()))
def test_equals_one_process(world: int, case: tuple[str, str], runs: Any, references: Any) -> None:
    want = references(case[0])
    assert want.norms[0] > reference.CLIP, "clipping must be active for the test to mean anything"
    assert_equal([rank[case] for rank in runs(world)], want, zero_in_theory(want), 1e-9)
