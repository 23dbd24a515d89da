"""Loss, gradient norm, every gradient and every weight after 5 clipped AdamW steps equal one plain torch process.

The reference is `reference.py`: no Lightning, no Parallax. All layouts of one number of ranks run in one group of
processes per model, one after the other; each is a test of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity import harness, reference
from tests.procs import run_ranks

LAYOUTS = {
    4: [
        *(f"dp4 zero{z}" for z in range(4)),
        "tp4",
        "pp4 gpipe mb4",
        "pp4 mb8",
    ],
    2: ["tp2", "tp2 sp0", "pp2 mb2", "pp2 gpipe mb4", "dp2 zero1 mb2"],
    8: [f"tp2 pp2 dp2 zero{z} mb2" for z in range(4)],
}
CASES = [
    pytest.param(
        model,
        layout,
        n,
        id=f"{model}-{layout.replace(' ', '_')}",
        marks=pytest.mark.all_layouts if (model, n) == ("plain", 8) else (),
    )
    for model in ("llama", "gpt2", "plain")
    for n, ls in LAYOUTS.items()
    for layout in ls
]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def all_layouts(rank: int, world: int, name: str, dtypes: list[torch.dtype]) -> dict[Any, Any]:
    return {
        (dtype, layout): harness.train_rank(rank, world, name, dtype, layout, {})
        for layout in LAYOUTS[world]
        for dtype in dtypes
    }


@pytest.fixture(scope="session")
def runs() -> Any:
    """(model, ranks) -> what every rank returned, run once."""
    done: dict[Any, Any] = {}

    def get(name: str, n: int) -> Any:
        if (name, n) not in done:
            done[name, n] = run_ranks(n, all_layouts, name, list(TOLERANCE), timeout=170)
        return done[name, n]

    return get


@pytest.fixture(scope="session")
def references() -> Any:
    done: dict[Any, reference.Run] = {}

    def get(name: str, dtype: torch.dtype) -> reference.Run:
        if (name, dtype) not in done:
            done[name, dtype] = reference.train(name, dtype)
        return done[name, dtype]

    return get


def assert_equal(ranks: list[Any], want: reference.Run, zero: set[str], tolerance: float) -> None:
    """Everything within `tolerance` of the reference, relative to the largest element of each tensor.

    Gradients in `zero` vanish in exact arithmetic (a key's bias): what is computed is the rounding of terms that
    cancel, which are as large as the other gradients.
    """
    for run, _, _ in ranks:
        assert run.losses == pytest.approx(want.losses, rel=tolerance)
        assert run.norms == pytest.approx(want.norms, rel=tolerance)
    for field in ("first_grads", "last_grads", "weights"):
        like = getattr(want, field)
        got = harness.whole([(getattr(run, field), shards) for run, shards, _ in ranks], like)
        largest = max(float(t.abs().max()) for t in like.values())
        for name, tensor in like.items():
            scale = largest if field != "weights" and name in zero else float(tensor.abs().max())
            error = float((got[name] - tensor).abs().max()) / scale
            assert error < tolerance, f"{field} of {name} is off by {error:.2e} (tolerance {tolerance})"


def zero_in_theory(exact: reference.Run) -> set[str]:
    largest = max(float(t.abs().max()) for t in exact.first_grads.values())
    return {n for n, t in exact.first_grads.items() if float(t.abs().max()) < 1e-13 * largest}


RECOMPUTED = ["tp2 pp2 mb2", "pp2 dp2 zero3 mb2", "tp2 dp2 zero2"]
ON_SHARDS = ["tp2 dp2 zero3", "tp2 pp2 v2 interleaved_1f1b mb4", "tp2 pp2 zb_h1 mb4"]
"""Layouts whose stages exchange shards of sequences, or whose engine comes between a layer's call and its forward."""


def recomputed(rank: int, world: int) -> dict[str, Any]:
    # ZeRO-3 numbers all modules a process has made, so its first layout must be one whose stages do not differ
    cases = [(layout, layout in RECOMPUTED) for layout in (*ON_SHARDS, *RECOMPUTED)]
    return {la: harness.train_rank(rank, world, "llama", torch.float64, la, {}, recompute=r) for la, r in cases}


@pytest.mark.limit(240)
def test_activation_recomputation_and_sequence_shards_change_nothing(references: Any) -> None:
    ranks = run_ranks(4, recomputed, timeout=170)
    want = references("llama", torch.float64)
    for layout in (*RECOMPUTED, *ON_SHARDS):
        assert_equal([r[layout] for r in ranks], want, zero_in_theory(want), TOLERANCE[torch.float64])


@pytest.mark.limit(240)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp64", "fp32"])
@pytest.mark.parametrize(("model", "layout", "n"), CASES)
def test_equals_one_process(model: str, layout: str, n: int, dtype: torch.dtype, runs: Any, references: Any) -> None:
    ranks = [result[dtype, layout] for result in runs(model, n)]
    want = references(model, dtype)
    assert want.norms[0] > reference.CLIP, "clipping must be active for the test to mean anything"
    assert_equal(ranks, want, zero_in_theory(references(model, torch.float64)), TOLERANCE[dtype])
