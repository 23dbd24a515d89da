"""Every schedule trains as one plain torch process does: loss, norm, every gradient and weight, to fp64 1e-9.

Schedules x {pp2, pp4} x ZeRO stages x three models (a Llama, a GPT-2 with tied weights, a plain module), and what they
are combined with: tensor parallelism, recomputation, adapters, clipping (always), accumulation, odd numbers of
micro-batches, bf16. A selection runs by default; `pytest tests/parity/test_schedules.py --all-layouts` runs all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.parity import harness, reference
from tests.parity.test_parity import TOLERANCE, assert_equal, zero_in_theory
from tests.parity.test_precision import assert_within
from tests.procs import run_ranks

WHOLE_BACKWARDS = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")
HALVES = ("zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v")  # refused with ZeRO-3
MODELS = ("llama8", "gpt2_8", "plain8")
DISORDER = "schedule=tests.random_schedules:"
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One training run: a model at a layout on `ranks`; `how` goes to the harness, and its sizes to the reference."""

    model: str
    layout: str
    ranks: int
    how: tuple[tuple[str, Any], ...] = ()
    precision: str = ""

    def __str__(self) -> str:
        extra = "".join(f"-{k}{v if v is not True else ''}" for k, v in self.how)
        name = self.layout.replace(DISORDER, "").replace(" ", "_")
        return f"{self.model}-{name}{extra}{'-' * bool(self.precision)}{self.precision}"

    def reference(self, dtype: torch.dtype, **more: Any) -> reference.Run:
        sizes = {k: v for k, v in self.how if k in ("size", "accumulate", "steps")}
        return reference.train(self.model, dtype, **{"steps": STEPS, **sizes, **more})


def everything() -> list[Case]:
    """Every schedule at every width and ZeRO stage, on every model."""
    cases = []
    for schedule in (*WHOLE_BACKWARDS, *HALVES):
        for model in MODELS:
            for pp in (2, 4):
                cases.append(Case(model, f"pp{pp} mb4 {schedule}", pp))
                for zero in (1, 2, 3) if schedule in WHOLE_BACKWARDS else (1, 2):
                    cases.append(Case(model, f"pp{pp} dp2 zero{zero} mb4 {schedule}", 2 * pp))
    return cases


def composed() -> list[Case]:
    """What schedules are combined with."""
    recompute, odd, accumulate = (("recompute", True),), (("size", 6),), (("accumulate", 2), ("steps", 4))
    cases = []
    for schedule in ("interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"):
        cases += [
            Case("gpt2_8", f"tp2 pp2 mb4 {schedule}", 4),
            Case("llama", f"tp2 pp2 mb4 {schedule}", 4),
            Case("plain8", f"tp2 pp2 mb4 {schedule}", 4),
            Case("llama8", f"pp2 mb4 stage {schedule}", 2),
            Case("gpt2_8", f"tp2 pp2 mb4 stage {schedule}", 4),
            Case("plain8", f"pp2 dp2 zero2 mb4 stage {schedule}", 4),
            Case("llama8", f"pp2 mb4 {schedule}", 2, recompute),
            Case("llama", f"tp2 pp2 mb2 {schedule}", 4, recompute),  # eight layers leave fp32 too few digits for tp
            Case("llama8", f"pp2 dp2 zero1 mb2 {schedule}", 4, recompute),
            Case("plain8", f"pp2 mb3 {schedule}", 2, odd),
            Case("gpt2_8", f"pp2 mb1 {schedule}", 2),
            Case("gpt2_8", f"pp2 dp2 zero2 mb2 {schedule}", 4, accumulate),
            Case("lora8", f"pp2 mb4 {schedule}", 2),
            Case("lora8", f"pp2 dp2 zero1 mb2 {schedule}", 4),
            Case("llama8", f"pp2 mb4 {schedule}", 2, precision="bf16-mixed"),
            Case("llama8", f"pp2 dp2 zero1 mb2 {schedule}", 4, precision="bf16-true"),
        ]
    cases += [Case(model, "pp2 dp2 zero3 mb4 stage interleaved_1f1b", 4) for model in MODELS]
    cases += [
        Case(model, f"pp{pp} mb4 v{v} {DISORDER}{schedule}", pp)
        for model in MODELS
        for pp in (2, 4)
        for v, schedule in ((2, "loop_in_disorder"), (2, "loop_in_halves"), (2, "turned_in_disorder"))
    ]
    return cases + [Case("plain8", f"pp2 mb4 v4 {DISORDER}turned_in_disorder", 2)]


BY_DEFAULT = [
    "llama8-pp2_mb4_gpipe",
    "plain8-pp2_mb4_1f1b",
    "llama8-pp2_mb4_interleaved_1f1b",
    "gpt2_8-pp2_mb4_looped_bfs",
    "llama8-pp2_mb4_zb_h1",
    "plain8-pp2_mb4_zb_h2",
    "gpt2_8-pp2_mb4_zb_v",
    "plain8-pp2_mb4_v_half",
    "llama8-pp2_mb4_v_min",
    "gpt2_8-pp2_mb4_dualpipe_v",
    "llama8-pp2_mb4_zb_v-recompute",
    "llama8-pp2_mb4_stage_zb_v",
    "plain8-pp2_dp2_zero2_mb4_stage_zb_h1",
    "gpt2_8-pp2_dp2_zero3_mb4_stage_interleaved_1f1b",
    "plain8-pp2_mb3_interleaved_1f1b-size6",
    "lora8-pp2_mb4_zb_h1",
    "plain8-pp2_mb4_v4_turned_in_disorder",
    "gpt2_8-pp2_mb4_v2_loop_in_halves",
    "gpt2_8-pp4_mb4_interleaved_1f1b",
    "plain8-pp4_mb4_zb_h1",
    "llama8-pp4_mb4_zb_v",
    "gpt2_8-pp4_mb4_v2_loop_in_disorder",
    "plain8-pp2_dp2_zero1_mb4_zb_v",
    "llama8-pp2_dp2_zero2_mb4_zb_h1",
    "plain8-pp2_dp2_zero3_mb4_interleaved_1f1b",
    "gpt2_8-tp2_pp2_mb4_dualpipe_v",
    "gpt2_8-pp2_dp2_zero2_mb2_zb_v-accumulate2-steps4",
    "llama8-pp2_dp2_zero1_mb2_zb_v-bf16-true",
    "llama8-pp2_mb4_zb_h1-bf16-mixed",
]
FP32 = ("llama8-pp2_mb4_zb_v", "gpt2_8-pp2_mb4_zb_v", "llama8-pp4_mb4_zb_v", "plain8-pp2_dp2_zero1_mb4_zb_v")
"""Run in fp32 too by default; with --all-layouts every case is."""


def train_all(rank: int, world: int, cases: list[tuple[Case, torch.dtype]]) -> dict[Any, Any]:
    out = {}
    for case, dtype in cases:
        options = {"precision": case.precision} if case.precision else {}
        how = {"steps": STEPS, **dict(case.how)}
        out[case, dtype] = harness.train_rank(rank, world, case.model, dtype, case.layout, options, **how)
    return out


@dataclass
class Runs:
    """What every rank returned, by case; cases of one number of ranks run in one set of processes (by schedule)."""

    wanted: list[tuple[Case, torch.dtype]]
    together: bool
    done: dict[Any, Any] = field(default_factory=dict)

    def _group(self, case: Case) -> Any:
        return case.ranks if self.together else (case.ranks, case.model, case.layout.split()[-1], case.how)

    def get(self, case: Case, dtype: torch.dtype) -> list[Any]:
        group = self._group(case)
        if group not in self.done:
            mine = [(c, d) for c, d in self.wanted if self._group(c) == group]
            try:
                self.done[group] = run_ranks(case.ranks, train_all, mine, timeout=20 + 30 * len(mine))
            except AssertionError as error:
                self.done[group] = error  # once is enough
        if isinstance(self.done[group], AssertionError):
            raise self.done[group]
        return [rank[case, dtype] for rank in self.done[group]]


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest) -> Runs:
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    ours = [params for params in chosen if isinstance(params.get("case"), Case)]
    wanted = list(dict.fromkeys((params["case"], params["dtype"]) for params in ours))
    return Runs(wanted, together=not request.config.getoption("--all-layouts"))


def parameters() -> list[Any]:
    found = []
    for case in [*everything(), *composed()]:
        chosen = str(case) in BY_DEFAULT
        for dtype in (torch.float32,) if case.precision else TOLERANCE:
            usual = chosen and (dtype == torch.float64 or bool(case.precision) or str(case) in FP32)
            name = f"{case}-{str(dtype).removeprefix('torch.float')}"
            found.append(pytest.param(case, dtype, id=name, marks=() if usual else pytest.mark.all_layouts))
    return found


def test_the_default_selection_exists() -> None:
    names = [str(case) for case in [*everything(), *composed()]]
    assert set(BY_DEFAULT) <= set(names) and len(names) == len(set(names))
    assert all(any(f"_{each}" in name for name in BY_DEFAULT) for each in (*WHOLE_BACKWARDS, *HALVES))


@pytest.mark.limit(1200)
@pytest.mark.parametrize(("case", "dtype"), parameters())
def test_equals_one_process(case: Case, dtype: torch.dtype, runs: Runs) -> None:
    ranks = runs.get(case, dtype)
    if case.precision == "bf16-mixed":
        assert_within(ranks, case.reference(dtype, autocast=torch.bfloat16), case.reference(dtype))
    elif case.precision == "bf16-true":
        assert_within(ranks, reference.train_bf16_true(case.model, STEPS), case.reference(dtype))
    else:
        want = case.reference(dtype)
        assert want.norms[0] > reference.CLIP, "clipping must be active for the test to mean anything"
        assert_equal(ranks, want, zero_in_theory(case.reference(torch.float64)), TOLERANCE[dtype])
