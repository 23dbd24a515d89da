"""FSDP2 as the data engine equals one plain torch process: alone, with every other axis, with split backwards.

As in `test_parity.py`: loss, norm, every gradient and every weight after 3 clipped AdamW steps; fp64 to 1e-9, fp32 to
1e-5. All layouts of one number of ranks run in one set of processes.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from parallax.strategies.verify.exact import KeepDouble
from tests.parity import harness, reference
from tests.parity.test_parity import TOLERANCE, assert_equal, zero_in_theory
from tests.procs import run_ranks

EXACT, SINGLE = torch.float64, torch.float32
EXPERTS = ("mixtral", "plain_moe")
CASES: dict[int, list[tuple[str, str, torch.dtype]]] = {
    2: [
        ("llama", "dp2 fsdp", EXACT),
        ("llama", "dp2 zero2 fsdp mb2", SINGLE),
        ("plain", "dp2 fsdp mb2", EXACT),
        ("gpt2", "dp2 zero2 fsdp", EXACT),
    ],
    4: [
        ("llama", "dp4 fsdp", SINGLE),
        ("plain", "dp4 zero2 fsdp mb2", EXACT),
        ("llama", "tp2 dp2 fsdp", EXACT),
        ("plain", "tp2 dp2 zero2 fsdp", SINGLE),
        ("llama", "pp2 dp2 fsdp mb4", EXACT),
        ("gpt2", "pp2 dp2 zero2 fsdp mb4", EXACT),
        ("plain", "pp2 dp2 fsdp gpipe mb2", EXACT),
        ("llama", "cp2 dp2 fsdp", EXACT),
        ("plain", "cp2 dp2 zero2 fsdp mb2", SINGLE),
        ("llama8", "pp2 dp2 fsdp mb4 zb_h1", EXACT),
        ("gpt2_8", "pp2 dp2 fsdp mb4 zb_v", EXACT),
        ("plain8", "pp2 dp2 zero2 fsdp mb4 interleaved_1f1b", EXACT),
        ("llama8", "pp2 dp2 fsdp mb4 interleaved_1f1b", EXACT),
        ("llama8", "pp2 dp2 fsdp mb4 stage interleaved_1f1b", EXACT),
        ("gpt2_8", "pp2 dp2 zero2 fsdp mb4 stage zb_h1", EXACT),
        ("mixtral", "dp4 ep2 fsdp", EXACT),
        ("plain_moe", "dp4 ep2 zero2 fsdp", EXACT),
        ("mixtral", "dp2 ep2 tp2 fsdp", EXACT),
        ("mixtral", "tp2 dp2 ep2 etp1 fsdp", EXACT),
        ("lora8", "pp2 dp2 fsdp mb2", EXACT),
    ],
}
RECOMPUTED = [("llama", "pp2 dp2 fsdp mb2"), ("llama", "dp4 zero2 fsdp")]


def train(rank: int, world: int) -> dict[Any, Any]:
    found = {}
    for case in CASES[world]:
        name, layout, dtype = case
        with KeepDouble() if name in EXPERTS else nullcontext():
            found[case] = harness.train_rank(rank, world, name, dtype, layout, {}, steps=3)
    for name, layout in RECOMPUTED if world == 4 else ():
        found[name, layout] = harness.train_rank(rank, world, name, EXACT, layout, {}, recompute=True, steps=3)
    return found


@cache
def runs(world: int) -> list[Any]:
    return run_ranks(world, train, timeout=170)


@cache
def expected(name: str, dtype: torch.dtype) -> reference.Run:
    with KeepDouble() if name in EXPERTS else nullcontext():
        return reference.train(name, dtype, steps=3)


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("n", "case"), [(n, case) for n in CASES for case in CASES[n]], ids=lambda v: "" if isinstance(v, int) else str(v)
)
def test_equals_one_process(n: int, case: tuple[str, str, torch.dtype]) -> None:
    name, _, dtype = case
    want = expected(name, dtype)
    assert want.norms[0] > reference.CLIP, "clipping must be active for the test to mean anything"
    assert_equal([result[case] for result in runs(n)], want, zero_in_theory(expected(name, EXACT)), TOLERANCE[dtype])


@pytest.mark.limit(300)
@pytest.mark.parametrize("case", RECOMPUTED)
def test_activation_recomputation_changes_nothing(case: tuple[str, str]) -> None:
    want = expected(case[0], EXACT)
    assert_equal([result[case] for result in runs(4)], want, zero_in_theory(want), TOLERANCE[EXACT])
