"""Mixture-of-experts models with experts on different ranks equal one plain torch process, in fp64.

Losses, norms, every gradient and every weight after 5 clipped AdamW steps, as in `test_parity.py`. Every model runs
with experts over ep alone and with one or two other axes, so that each layout is met by two models or more;
`--all-layouts` runs every model at every layout. Both sides run inside `KeepDouble`: routers upcast to fp32, and a
choice between two experts whose scores are closer than 1e-7 would otherwise depend on rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallax.strategies.verify.exact import KeepDouble
from tests.parity import harness, reference
from tests.parity.moe_models import MOE
from tests.parity.test_parity import assert_equal, zero_in_theory
from tests.procs import run_ranks

LAYOUTS = {
    2: ["dp2 ep2", "cp2 ep2"],
    4: [
        "dp4 ep4",
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
ALL = [(model, layout) for model in MOE for layouts in LAYOUTS.values() for layout in layouts]


def train(rank: int, world: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    with KeepDouble():
        return {(m, la): harness.train_rank(rank, world, m, torch.float64, la, {}) for m, la in cases}


def size_of(layout: str) -> int:
    return next(world for world, layouts in LAYOUTS.items() if layout in layouts)


@pytest.fixture(scope="module")
def want() -> Any:
    done: dict[str, reference.Run] = {}

    def get(model: str) -> reference.Run:
        if model not in done:
            with KeepDouble():
                done[model] = reference.train(model, torch.float64)
        return done[model]

    return get
