"""docs/pipeline.md: its pictures are what the code draws, its numbers what the simulator says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallax.plugins import registry
from parallax.plugins.pipeline.catalog import find_schedule, make_lists, stages_of
from parallax.plugins.pipeline.picture_svg import draw
from parallax.plugins.pipeline.simulator import simulate

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "pipeline.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", registry.names("parallax.schedules"))
def test_each_schedule_has_its_picture_and_its_numbers(name: str) -> None:
    schedule = find_schedule(name)
    drawn = draw(simulate(make_lists(schedule, 4, 8)), name) + "\n"
    assert (DOCS / "img" / f"{name}.svg").read_text(encoding="utf-8") == drawn
    assert f"(img/{name}.svg)" in TEXT
    found = simulate(make_lists(schedule, 8, 32))
    own = 1 - found.ideal / found.span
    assert f"| `{name}` | {found.bubble:.1%} | {own:.1%} | {found.peak_of_1f1b:.0%} |" in TEXT.replace(" %", "%")
    stages = re.search(rf"\| `{name}` \| ([^|]*) \| [^|]* \| [^|]* \| [^|]* \|", TEXT)
    assert stages is not None
    said = {"any, default 2": "1 or more"}.get(stages[1], stages[1])
    assert said == str(stages_of(schedule))
