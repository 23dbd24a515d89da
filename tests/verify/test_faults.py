"""The verifier itself is tested: twenty known faults are planted, and each must be caught and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallax.strategies.verify import verify
from tests.verify.faults import FAULTS

SCRIPT = str(Path(__file__).with_name("targets.py"))


@pytest.mark.limit(120)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_and_named(name: str) -> None:
    fault = FAULTS[name]
    (verdict,) = verify(
        f"{SCRIPT}:{fault.target}", fault.layout, steps=2, world=2, prepare=fault.plant, timeout=100, repeat=False
    )
    assert not verdict.passed, "the fault was not seen"
    first = verdict.differences[0]
    assert first.what in fault.what, str(first)
    assert any(words in first.cause for words in fault.cause), str(first)
    assert first.ranks == fault.ranks, str(first)
    assert str(first.step) in str(first) and first.phase in str(first)


def test_enough_faults() -> None:
    assert len(FAULTS) >= 15
