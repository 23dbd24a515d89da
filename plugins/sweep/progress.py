"""What a long sweep prints: one line when a job starts and one when it has ended.

It is: text, made from numbers. It is not: a progress bar; a log file can hold all of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from parallax.plugins.sweep.filter import Point, reasons

SHOWN = 3
"""Dropped points that are named for one reason."""


class Progress:
    """Prints to `out`.

    Args:
        out: a terminal or a file.
        clock: seconds since some time.
    """

    def __init__(self, out: TextIO, clock: Any = time.time) -> None:
        self._out, self._clock = out, clock
        self._seconds: list[float] = []
        self.done = self.running = self.left = 0

    def dropped(self, points: Sequence[Point]) -> None:
        """Say which points are not run, and why."""
        gone = [point for point in points if point.dropped]
        self._say(f"sweep: {len(points)} points, {len(gone)} dropped, {len(points) - len(gone)} to run")
        for reason, same in reasons(points).items():
            named = "; ".join(_changes(point) for point in same[:SHOWN])
            more = f"; and {len(same) - SHOWN} more" if len(same) > SHOWN else ""
            self._say(f"  dropped {len(same)}: {reason}\n      {named}{more}")

    def resumed(self, count: int, folder: Any) -> None:
        """Say that `count` jobs have their records already."""
        self.done = count
        if count:
            self._say(f"sweep: {count} of them are done already, in {folder}")

    def started(self, number: int, point: Point) -> None:
        """A job starts."""
        self._say(f"[{number:>3}] start    {label(point)}")

    def ended(self, number: int, point: Point, record: Mapping[str, Any], parallel: int) -> None:
        """A job has ended; up to `parallel` jobs run at the same time."""
        self._seconds.append(float(record.get("seconds", 0.0)))
        said = outcome(record)
        self._say(f"[{number:>3}] {record['status']:<8} {label(point)}: {said} ({_span(self._seconds[-1])})")
        end = ""
        if self.left + self.running:
            mean = sum(self._seconds) / len(self._seconds)
            rest = mean * (self.left + self.running) / max(1, parallel)
            end = f", about {_span(rest)} more, end at {time.strftime('%H:%M', time.localtime(self._clock() + rest))}"
        self._say(f"      done {self.done}, running {self.running}, left {self.left}{end}")

    def say(self, text: str) -> None:
        """One more line."""
        self._say(text)

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def label(point: Point) -> str:
    """The layout and what else was varied, for people."""
    rest = [text for text in point.overrides if text in point.varied and not text.startswith("layout=")]
    return " | ".join([point.words, *([" ".join(rest)] if rest else [])])


def _changes(point: Point) -> str:
    """What makes it another than the other points."""
    return " ".join(point.varied or point.overrides).replace("\\", "")


def outcome(record: Mapping[str, Any]) -> str:
    """What came of a job, in a few words."""
    if record["status"] != "ok":
        return str(record.get("reason", ""))
    return f"{record['step_time_s']:.3g} s a step, {record['tokens_per_s']:,.0f} tokens/s"


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
