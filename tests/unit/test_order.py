"""What may be asked of the order of the ranks, how it is told, and when nothing is done at all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from parallax import ParallaxStrategy
from parallax.plugins.launch.order import Order, OrderOptions, settle_order
from parallax.plugins.launch.placed import PlacedEnvironment
from parallax.strategies.layout import Layout
from parallax.strategies.report import rank_table

NEVER = timedelta(seconds=1)


class Theirs(LightningEnvironment):
    """An environment that somebody has written; its world is told, nobody else is there."""

    def world_size(self) -> int:
        return 4

    def __getattribute__(self, name: str) -> Any:
        assert name not in ("main_port", "main_address"), "nobody may be waited for"
        return super().__getattribute__(name)


def settle(environment: ClusterEnvironment, reorder: Any, check: str = "warn", **job: Any) -> Order | None:
    options = OrderOptions(reorder, check)
    return settle_order(environment, Layout(), options, **({"device": None, "nodes": 1, "timeout": NEVER} | job))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reorder_ranks": "yes"}, "reorder_ranks must be True, False, 'auto', 'measure' or .* got 'yes'"),
        ({"reorder_ranks": 1}, "got 1"),
        ({"topology": "refuse"}, "topology must be one of warn, error, off; got 'refuse'"),
    ],
)
def test_other_settings_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParallaxStrategy("tp2", **options)


@pytest.mark.parametrize(
    "job",
    [
        {"reorder": "auto"},  # one node, no accelerators
        {"reorder": "auto", "nodes": 2},  # ranks of somebody else
        {"reorder": False, "check": "off", "nodes": 2, "device": 0},
    ],
)
def test_nothing_is_done(job: dict[str, Any]) -> None:
    assert settle(Theirs(), **job) is None


@pytest.mark.parametrize("reorder", [True, "measure", [1, 0, 3, 2]])
def test_what_was_asked_for_is_not_ignored(reorder: Any) -> None:
    with pytest.raises(ValueError, match="but Theirs is not one of a launcher that Parallax knows: leave it out"):
        settle(Theirs(), reorder)


def test_only_known_environments_are_wrapped() -> None:
    assert PlacedEnvironment.around(Theirs(), NEVER) is None
    assert isinstance(PlacedEnvironment.around(LightningEnvironment(), NEVER), PlacedEnvironment)


def test_the_line_about_the_order() -> None:
    here = LightningEnvironment()
    assert Order(here, (0, 1, 2, 3), 1.0).describe() is None
    line = Order(here, (0, 4, 1, 5, 2, 6, 3, 7), 3.456).describe()
    assert line == (
        "ranks reordered: the launcher's 0 2 4 6 1 3 5 7 are now 0 to 7; communication 3.46 times as fast by prediction"
    )
    many = Order(here, (*range(1, 32), 0), None).describe()
    assert many == "ranks reordered: the launcher's 31 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 ... are now 0 to 31"


def test_the_table_says_where_ranks_are() -> None:
    layout = Layout.parse("tp2").resolve(4)
    table = rank_table(layout, dict.fromkeys(range(4), "all"), {0: "a", 1: "a", 2: "b", 3: "b"})
    assert [str(column.header) for column in table.columns][-2:] == ["holds", "on"]
    assert list(table.columns[-1].cells) == ["a", "a", "b", "b"]
    assert [str(column.header) for column in rank_table(layout).columns][-1] == "tp"
