"""Dropout on: right layouts pass, and masks that are shared by the wrong ranks, or rates that differ, are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallax.strategies.verify import verify
from parallax.strategies.verify.dropout import DropoutRun, Mask, Masks, judge
from tests.verify.faults import _no_agreement

SCRIPT = str(Path(__file__).with_name("targets.py"))


@pytest.mark.limit(150)
def test_right_layouts_pass_with_dropout_on() -> None:
    """Whole sequences, sequence shards, stages and data ranks."""
    layouts = ["tp2 pp2 sp0 mb2", "tp2 dp2 sp1 zero1"]
    for verdict in verify(f"{SCRIPT}:Dropping", layouts, steps=0, dropout=24, repeat=False, timeout=70):
        assert verdict.passed, (verdict.layout, verdict.refused, verdict.differences[:3])
        assert "the module has no dropout" not in verdict.notes


def _seeded(seed: Callable[[Any], int]) -> None:
    """The ranks' random numbers once the model is assembled."""
    from parallax.strategies import strategy

    right = strategy.assemble

    def assemble(module: Any, plugins: Any, *, mesh: Any, **rest: Any) -> None:
        right(module, plugins, mesh=mesh, **rest)
        torch.manual_seed(seed(mesh))

    strategy.assemble = assemble


def same_numbers_in_a_region() -> None:
    from parallax.plugins.tensor.streams import Streams

    Streams.enter = lambda self: None  # type: ignore[method-assign]


def other_numbers_on_each_rank() -> None:
    _no_agreement()
    _seeded(lambda mesh: 100 + mesh.rank)


def same_numbers_on_data_ranks() -> None:
    _seeded(lambda mesh: 100)


def half_the_rate() -> None:
    right = nn.Dropout.forward

    def forward(self: Any, x: Any) -> Any:
        self.p, p = self.p / 2, self.p
        try:
            return right(self, x)
        finally:
            self.p = p

    nn.Dropout.forward = forward  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Callable[[], None], str, str, str]] = {
    "one mask for all heads": (same_numbers_in_a_region, "tp2 sp0", "mask", "holds its own part"),
    "one mask for all shards of a sequence": (same_numbers_in_a_region, "tp2 sp1", "mask", "holds its own part"),
    "other masks of what all ranks hold": (other_numbers_on_each_rank, "tp2 sp0", "mask", "all ranks of tp hold this"),
    "one mask for all data ranks": (same_numbers_on_data_ranks, "dp2", "mask", "read other samples"),
    "half the rate": (half_the_rate, "pp2", "drop rate", "the rate is 0.1, and 0.2 in one process"),
}


@pytest.mark.limit(90)
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_mask_is_named(name: str) -> None:
    plant, layout, what, cause = FAULTS[name]
    (verdict,) = verify(f"{SCRIPT}:Dropping", layout, steps=0, dropout=8, prepare=plant, repeat=False, timeout=70)
    assert not verdict.passed
    assert verdict.differences[0].what == what, verdict.differences[:3]
    assert cause in verdict.differences[0].cause


def _runs(losses: list[float], rate: float = 0.2) -> list[DropoutRun]:
    masks = Masks({"drop": [Mask((100, 100), i, int(10_000 * rate), 10_000, 0.2) for i in range(len(losses))]})
    return [DropoutRun(losses, masks, {"pp": 0, "dp": 0, "data": 0, "tp": 0}, [1.0] * len(losses))]


def test_statistics_have_bounds_of_their_own_spread() -> None:
    gen = torch.Generator().manual_seed(0)
    noise = (torch.randn(24, generator=gen, dtype=torch.float64) * 0.1).tolist()
    whole = {"drop": [Mask((100, 100), 0, 2000, 10_000, 0.2)]}
    one = DropoutRun([3.0] * 24, Masks())
    assert judge(_runs([3 + x for x in noise]), one, whole) == []
    (fault,) = judge(_runs([3.2 + x for x in noise]), one, whole)
    assert fault.what == "mean loss" and f"off by {0.2 + sum(noise) / 24:+.3g}" in fault.cause
    (fault,) = judge(_runs([3 + x for x in noise], rate=0.21), one, whole)
    assert fault.what == "drop rate" and "0.2100 of 240,000 elements" in fault.cause
    (fault,) = judge([DropoutRun(_runs(noise)[0].losses, Masks(), {"pp": 0, "dp": 0, "data": 0, "tp": 0}, [1.0] * 24)],
                     DropoutRun([0.0] * 24, Masks()), whole)  # fmt: skip
    assert fault.what == "drop rate" and "no rank drops anything" in fault.cause


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="too few for statistics"):
        verify(f"{SCRIPT}:Dropping", "dp2", dropout=2)
