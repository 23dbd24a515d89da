"""`--bytes`: what every rank sends equals closed formulas, to the byte, and a byte more or less fails by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallax.plugins.base import ParallelPlugin
from parallax.plugins.data.base import DataEngine
from parallax.strategies.verify import verify

SCRIPT = str(Path(__file__).with_name("targets.py"))

CASES = {
    "Lit": [
        "tp2 dp2 zero3 recompute=selective",
        "tp2 pp2 sp1 zb_h1 mb4 recompute=full",
        "pp2 dp2 zero3 mb2 recompute=stage",
    ],
    "Gpt2": ["tp2 pp2 interleaved_1f1b v2 mb4", "cp2 dp2 ulysses zero2 mb2 recompute=full", "dp2 zero3 fsdp"],
    "Plain": ["tp2 cp2 all_gather mb2", "cp4 inner2 hybrid", "pp2 dp2 zero1 zb_v mb2"],
    "DeepSeek": ["tp2 dp2 ep4 etp1 zero1 recompute=full", "pp2 dp2 ep2 zero3 mb4 recompute=full"],
    "Qwen2Moe": ["dp2 ep2 zero3 recompute=full"],
    "Olmo2": ["tp2 recompute=full"],
    "Phi3": ["tp4"],
}
"""Pairs of axes, methods, schedules, stages and recomputation; `--all 8` does all axes."""


@pytest.mark.limit(200)
@pytest.mark.parametrize("target", CASES)
def test_counted_bytes_are_the_formulas(target: str) -> None:
    for verdict in verify(f"{SCRIPT}:{target}", CASES[target], steps=2, check_bytes=True, repeat=False, timeout=90):
        assert verdict.passed, (verdict.refused, verdict.no_formula, verdict.wrong_rows[:3], verdict.differences[:1])
        assert {row.step for row in verdict.rows} == {0, 1}
        assert {row.rank for row in verdict.rows} == set(range(verdict.ranks)), "no rank is silent at these layouts"
        sent = {row.axis for row in verdict.rows}
        axes = {"tp": "tp2" in verdict.layout, "pp": "pp2" in verdict.layout}
        assert {axis for axis, there in axes.items() if there} <= sent


OPTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("Lit", "tp2", {"tp_chunks": 3}),
    ("Mixtral", "dp2 ep2", {"expert_chunks": 2}),
    ("Balanced", "tp2 dp2 ep2 etp1", {"expert_balance": "global", "expert_capacity_factor": 8.0}),
]


@pytest.mark.limit(60)
@pytest.mark.parametrize(("target", "layout", "options"), OPTIONS)
def test_options_that_change_what_is_sent(target: str, layout: str, options: dict[str, Any]) -> None:
    (verdict,) = verify(
        f"{SCRIPT}:{target}", layout, steps=1, check_bytes=True, repeat=False, timeout=50, options=options
    )
    assert verdict.passed, (verdict.wrong_rows[:3], verdict.no_formula)


def one_more_call() -> None:
    from parallax.plugins.data.replicated import ReplicatedEngine

    right = ReplicatedEngine.reduce

    def reduce(self: Any) -> None:
        right(self)
        self.mesh["data"].all_reduce(torch.zeros(1))

    ReplicatedEngine.reduce = reduce  # type: ignore[method-assign]


def one_more_byte() -> None:
    """The counts of parameters used are sent with one number more than there are parameters."""
    from parallax.plugins.data.buckets import GradBuckets

    right = GradBuckets.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self.buffers = [torch.cat([b, b.new_zeros(1)]) for b in self.buffers]
        for grads, buffer in zip(self.grads, self.buffers, strict=True):
            at = 0
            for p, view in self.views.items():
                self.views[p] = buffer[at : at + view.numel()].view(view.shape)
                at += view.numel()
            self.counts = {p: buffer[at + i] for i, p in enumerate(self.counts)}
            self.grads = [buffer[: grads.numel()]]
        self.attach()

    GradBuckets.__init__ = init  # type: ignore[method-assign]


def sent_twice() -> None:
    from parallax.plugins.tensor import chunked

    right: Any = chunked.reduce_from_region

    def twice(x: Any, comm: Any) -> Any:
        comm.all_reduce(x.detach().clone())
        return right(x, comm)

    chunked.reduce_from_region = twice


PLANTED: dict[str, tuple[Callable[[], None], str, tuple[str, str, str]]] = {
    "an all-reduce that changes nothing": (one_more_call, "dp2", ("data", "all_reduce", "step")),
    "a buffer one number too long": (one_more_byte, "dp2", ("data", "all_reduce", "step")),
    "a region reduced twice": (sent_twice, "tp2 sp0", ("tp", "all_reduce", "forward")),
}


@pytest.mark.limit(90)
@pytest.mark.parametrize("name", PLANTED)
def test_a_byte_too_many_fails_though_all_values_are_right(name: str) -> None:
    plant, layout, where = PLANTED[name]
    (verdict,) = verify(f"{SCRIPT}:Plain", layout, steps=1, prepare=plant, check_bytes=True, repeat=False, timeout=60)
    assert not verdict.differences, "the values are right"
    assert not verdict.passed
    assert {(row.axis, row.kind, row.phase) for row in verdict.wrong_rows} == {where}
    worst = verdict.wrong_rows[0]
    assert worst.counted.bytes > worst.expected.bytes
    assert f"{worst.counted.bytes:,} bytes" in str(worst) and f"by formula {worst.expected.bytes:,}" in str(worst)


def test_who_states_no_formula_fails_by_name() -> None:
    class Silent(ParallelPlugin):
        name, axis = "silent", "tp"

        def check(self, layout: Any, model: nn.Module) -> None: ...

        def apply(self, model: nn.Module, *, mesh: Any, layout: Any) -> None: ...

    with pytest.raises(NotImplementedError, match="plugin 'silent' states no formula"):
        Silent().traffic(None, None)  # type: ignore[arg-type]
    engine: Any = type("Quiet", (DataEngine,), {"name": "quiet"})
    with pytest.raises(NotImplementedError, match="data engine 'quiet' states no formula"):
        engine.traffic(engine, None, None)


@pytest.mark.limit(60)
def test_a_layout_without_a_formula_does_not_pass() -> None:
    (verdict,) = verify(
        f"{SCRIPT}:Plain", "dp2 zero3", steps=1, check_bytes=True, repeat=False, timeout=50,
        options={"zero3_prefetch": True},
    )  # fmt: skip
    assert not verdict.differences and not verdict.passed
    assert verdict.no_formula == ["weights that ZeRO-3 gathers ahead have no formula; use zero3_prefetch=False"]
