"""Which schedules there are, and the lists of one: by name, from a CSV file, or a function of the user's.

It is: what a schedule function is, how many stages per rank it takes, and how one is found. It is not: any schedule
(`schedules/`), or the simulation (`simulator.py`).

A schedule is a pure function `(num_ranks, num_microbatches, stages_per_rank) -> one list of actions for each rank`, see
`actions.py`. Anyone's is found by entry point `parallax.schedules`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parallax.plugins import registry
from parallax.plugins.pipeline.actions import Action, placement
from parallax.plugins.pipeline.simulator import check
from parallax.strategies.names import unknown_name

Schedule = Callable[[int, int, int], Sequence[Sequence[Action]]]
GROUP = "parallax.schedules"


@dataclass(frozen=True)
class StagesPerRank:
    """How many virtual stages a schedule puts on each rank.

    Attributes:
        default: when the user does not say.
        least, most: the numbers it permits; most None: any from `least`.
    """

    default: int = 1
    least: int = 1
    most: int | None = None

    def __str__(self) -> str:
        if self.most is None:
            return f"{self.least} or more"
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


Function = TypeVar("Function", bound=Callable[..., Any])


def stages_per_rank(default: int, least: int = 1, most: int | None = None) -> Callable[[Function], Function]:
    """Decorator: say how many stages per rank a schedule takes. Without it: 1 by default, any number permitted."""

    def mark(function: Function) -> Function:
        function.stages_per_rank = StagesPerRank(default, least, most)  # type: ignore[attr-defined]
        return function

    return mark


def stages_of(schedule: Schedule) -> StagesPerRank:
    """How many stages per rank `schedule` takes; known without calling it."""
    found = getattr(schedule, "stages_per_rank", None)
    return found if isinstance(found, StagesPerRank) else StagesPerRank()


def name_of(schedule: Schedule) -> str:
    """ "module:function" of a schedule given as a function; where it is no name to import, still what to call it."""
    if not callable(schedule):
        raise ValueError(
            f"schedule must be a name, the path of a .csv file, or a function (num_ranks, num_microbatches, "
            f"stages_per_rank) -> lists of actions; got {type(schedule).__name__}"
        )
    named: Any = schedule if hasattr(schedule, "__qualname__") else type(schedule)
    return f"{named.__module__}:{named.__qualname__}"


def find_schedule(text: str) -> Schedule:
    """The schedule called `text`: the name of an entry point, the path of a CSV file, or "module:function".

    Raises:
        ValueError: no such name (with the nearest), file, module or function; a file that cannot be read as a schedule.
    """
    if text.endswith(".csv"):
        from parallax.plugins.pipeline.schedule_csv import csv_schedule

        return csv_schedule(text)
    if ":" in text:
        return _imported(text)
    found: Schedule = registry.load(GROUP, text)
    return found


def make_lists(
    schedule: Schedule,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    *,
    name: str | None = None,
) -> list[list[Action]]:
    """The checked lists of `schedule`, one for each rank.

    Args:
        schedule: the function.
        num_ranks, num_microbatches: p and m.
        stages_per_rank: v; None: the schedule's default.
        name: what messages call it; None: the function's own name.

    Raises:
        ValueError: a number it does not permit; lists that are incomplete, out of order or deadlock.
    """
    name = name or getattr(schedule, "__name__", type(schedule).__name__)
    stages = stages_of(schedule)
    count = stages.default if stages_per_rank is None else stages_per_rank
    for what, value in (("ranks", num_ranks), ("micro-batches", num_microbatches), ("stages per rank", count)):
        if value < 1:
            raise ValueError(f"schedule {name} needs at least 1 of {what}, got {value}")
    nearest = max(stages.least, count if stages.most is None else min(count, stages.most))
    if count != nearest:
        raise ValueError(
            f"schedule {name} puts {stages} stage(s) on each rank, not {count}; set stages_per_rank={nearest} or "
            f"choose another schedule"
        )
    lists = [list(actions) for actions in schedule(num_ranks, num_microbatches, count)]
    if len(lists) != num_ranks:
        raise ValueError(f"schedule {name} made {len(lists)} lists for {num_ranks} ranks; it must make one for each")
    check(lists, num_microbatches)
    held = len(placement(lists))
    if held != num_ranks * count:
        raise ValueError(
            f"schedule {name} runs {held} stages for {num_ranks} ranks with {count} stage(s) each; "
            f"it must run {num_ranks * count}"
        )
    return lists


def _imported(text: str) -> Schedule:
    module, _, path = text.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"schedule {text!r}: module {module!r} cannot be imported: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if callable(getattr(found, name)) and not name.startswith("_")]
            raise unknown_name(f"schedule of {module}", path, names)
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"schedule {text!r} must be a function, but is of type {type(found).__name__}")
    schedule: Schedule = found
    return schedule
