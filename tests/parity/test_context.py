"""Training over cut sequences equals one plain torch process: attention methods, models, and the axis with the others.

As in `test_parity.py`; 12 tokens over 4 ranks are padded to 16. fp64 trains on a loss the step computes from logits,
shifted against each other, fp32 on the model's own loss.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity import harness, reference
from tests.parity.test_parity import TOLERANCE, assert_equal, references, zero_in_theory
from tests.procs import run_ranks

__all__ = ["references"]

EXACT, SINGLE = torch.float64, torch.float32
CASES: dict[int, list[tuple[str, str, torch.dtype]]] = {
    2: [
        ("llama", "cp2 ring", SINGLE),
        ("gemma2", "cp2 ring", EXACT),
        ("gemma2", "cp2 ulysses contiguous", EXACT),
        ("qwen3", "cp2 all_gather mb2", EXACT),
        ("qwen3", "cp2 ulysses", SINGLE),
        ("mistral", "cp2 contiguous", EXACT),
        ("mistral", "cp2", SINGLE),
        ("gpt2", "cp2", SINGLE),
        ("plain", "cp2 mb2", SINGLE),
    ],
    4: [
        ("llama", "cp4 ring", EXACT),
        ("llama", "cp4 hybrid inner2", EXACT),
        ("llama", "tp2 cp2 ulysses", EXACT),
        ("llama", "pp2 cp2 interleaved_1f1b v2 mb4", EXACT),
        ("llama", "pp2 cp2 zb_h1 mb4", EXACT),
        ("plain", "pp2 cp2 zb_v mb4", EXACT),
        ("llama", "cp2 dp2 zero3", EXACT),
        ("gemma2", "cp4 all_gather", EXACT),
        ("mistral", "cp4", EXACT),
        ("qwen3", "pp2 cp2 mb2", EXACT),
        ("gpt2", "cp2 dp2 zero1", EXACT),
        ("gpt2", "cp4 ulysses", EXACT),
        ("plain", "pp2 cp2 mb2 zero1", EXACT),
        ("plain", "tp2 cp2", EXACT),
        ("plain", "cp2 dp2 zero3 mb2", SINGLE),
    ],
}
RECOMPUTED = "cp2 dp2"
SCHEDULES = ("gpipe", "1f1b", "looped_bfs v2", "zb_h2", "v_half", "v_min", "dualpipe_v")
"""Those that are not among the cases."""


def every_schedule(rank: int, world: int) -> list[Any]:
    layouts = (f"pp2 cp2 {schedule} mb4" for schedule in SCHEDULES)
    return [harness.train_rank(rank, world, "llama", EXACT, layout, {}) for layout in layouts]


def all_cases(rank: int, world: int) -> Any:
    found = {case: harness.train_rank(rank, world, case[0], case[2], case[1], {}) for case in CASES[world]}
    if world == 4:
        found[RECOMPUTED] = harness.train_rank(rank, world, "llama", EXACT, RECOMPUTED, {}, recompute=True)
    return found


@pytest.fixture(scope="module")
def runs() -> Any:
    return {n: run_ranks(n, all_cases, timeout=170) for n in CASES}


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("n", "case"), [(n, case) for n in CASES for case in CASES[n]], ids=lambda v: "" if isinstance(v, int) else str(v)
)
def test_equals_one_process(n: int, case: tuple[str, str, torch.dtype], runs: Any, references: Any) -> None:
    model, _, dtype = case
    want = references(model, dtype)
    assert want.norms[0] > reference.CLIP, "clipping must be active for the test to mean anything"
    ranks = [result[case] for result in runs[n]]
    assert_equal(ranks, want, zero_in_theory(references(model, EXACT)), TOLERANCE[dtype])


@pytest.mark.limit(300)
def test_activation_recomputation_changes_nothing(runs: Any, references: Any) -> None:
    want = references("llama", EXACT)
    assert_equal([result[RECOMPUTED] for result in runs[4]], want, zero_in_theory(want), TOLERANCE[EXACT])


@pytest.mark.all_layouts
@pytest.mark.limit(300)
def test_every_schedule_equals_one_process(references: Any) -> None:
    want = references("llama", EXACT)
    for ranks in zip(*run_ranks(4, every_schedule, timeout=200), strict=True):
        assert_equal(list(ranks), want, zero_in_theory(want), TOLERANCE[EXACT])
