"""The records under a folder, as a sorted table and as CSV.

It is: reading, naming what differs between the runs, and text. It is not: pictures (`figures.py`) or the page that
holds all of it (`page.py`).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from parallax.plugins.sweep.folder import RECORD
from parallax.strategies.layout_words import OPTIONAL, SHORT
from parallax.strategies.names import unknown_name

MIB = 2**20


@dataclass(frozen=True)
class Run:
    """One record.

    Attributes:
        record: as in the file.
        series: what was varied besides the layout, e.g. "model=gpt2_tiny"; "" for nothing.
    """

    record: Mapping[str, Any]
    series: str

    @property
    def ok(self) -> bool:
        return self.record["status"] == "ok"

    @property
    def layout(self) -> str:
        return str(self.record["layout"])

    def value(self, column: str) -> Any:
        """A column of the table, or the size of an axis or a key of the layout; None when the run has none."""
        if column in COLUMNS:
            return COLUMNS[column](self.record) if self.ok or column in ALWAYS else None
        return self.record.get("layout_keys", {}).get(SHORT.get(column, column))


def _spread(record: Mapping[str, Any]) -> float:
    low, high = record["step_time_spread_s"]
    return float(high - low)


def _memory(record: Mapping[str, Any]) -> float:
    return float(max(record["peak_memory_bytes"]) / MIB)


def _sent(record: Mapping[str, Any]) -> float:
    return float(sum(record["bytes_per_step"].values()) / MIB)


COLUMNS: Mapping[str, Any] = {
    "layout": lambda r: r["layout"],
    "status": lambda r: r["status"],
    "step_time_s": lambda r: r["step_time_s"],
    "spread_s": _spread,
    "tokens_per_s": lambda r: r["tokens_per_s"],
    "memory_mib": _memory,
    "sent_mib": _sent,
    "bubble": lambda r: r["bubble"],
    "loss": lambda r: r["loss"],
    "seconds": lambda r: r.get("seconds"),
    "reason": lambda r: r.get("reason", ""),
}
"""Column -> its value in a record. Times in seconds; memory (the largest rank's) and what a rank sends in a step in
MiB; `spread_s` is the distance of the quartiles; `seconds` is the whole job."""

ALWAYS = ("layout", "status", "seconds", "reason")
MORE_IS_BETTER = ("tokens_per_s",)


def read_runs(folder: Path) -> list[Run]:
    """Every record in `folder` and below.

    Raises:
        ValueError: no such folder, no record in it, or a record that cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    records = []
    for file in sorted(folder.rglob(RECORD)):
        try:
            records.append(json.loads(file.read_text()))
        except ValueError as error:
            raise ValueError(f"{file} is no record: {error}") from None
    if not records:
        raise ValueError(f"there is no {RECORD} in {folder} nor below it: has a run ended there?")
    varied = _varied(records)
    return [Run(record, _series(record, varied)) for record in records]


def sort_runs(runs: Sequence[Run], column: str = "step_time_s") -> list[Run]:
    """Best first: by series, then by `column`; failed runs last.

    Raises:
        ValueError: no such column.
    """
    if column not in COLUMNS:
        raise unknown_name("column", column, COLUMNS)
    sign = -1 if column in MORE_IS_BETTER else 1

    def order(run: Run) -> tuple[Any, ...]:
        value = run.value(column)
        number = isinstance(value, int | float)
        return run.series, not run.ok, sign * value if number else math.inf, str(value), run.layout

    return sorted(runs, key=order)


def table(runs: Sequence[Run]) -> Table:
    """For a terminal."""
    made = Table(title=f"{len(runs)} runs, {sum(not run.ok for run in runs)} failed", title_justify="left")
    with_series = any(run.series for run in runs)
    failed = any(not run.ok for run in runs)
    names = [name for name in COLUMNS if failed or name not in ("status", "reason")]
    for name in [*(["series"] if with_series else []), *names]:
        made.add_column(name, justify="left" if name in ("series", "layout", "status", "reason") else "right")
    for run in runs:
        cells = [shown(name, run.value(name)) for name in names]
        made.add_row(*([run.series] if with_series else []), *cells)
    return made


def write_csv(runs: Sequence[Run], path: Path) -> None:
    """Every column, the keys of the layout and the bytes of each axis."""
    keys = list(dict.fromkeys(key for run in runs for key in run.record.get("layout_keys", {})))
    axes = sorted({axis for run in runs for axis in run.record.get("bytes_per_step", {})})
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["series", *COLUMNS, *keys, *(f"bytes_{axis}" for axis in axes)])
        for run in runs:
            sent = run.record.get("bytes_per_step", {})
            cells = [run.value(name) for name in COLUMNS]
            layout = [run.record.get("layout_keys", {}).get(key) for key in keys]
            writer.writerow([run.series, *cells, *layout, *(sent.get(axis, 0 if run.ok else None) for axis in axes)])


def shown(column: str, value: Any) -> str:
    """One cell, for people."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if column == "tokens_per_s":
        return f"{value:,.0f}"
    return f"{value:.3g}" if column != "loss" else f"{value:.4f}"


def axes_of(runs: Sequence[Run]) -> list[str]:
    """The short names of the layout keys in which the runs differ, those with most values first."""
    found: dict[str, int] = {}
    for short, name in SHORT.items():
        if name in (SHORT[other] for other in found):
            continue
        values = {run.value(short) for run in runs if name not in OPTIONAL or run.value(short) is not None}
        if len(values) > 1:
            found[short] = len(values)
    return sorted(found, key=lambda short: -found[short])


def _overrides(record: Mapping[str, Any]) -> dict[str, str]:
    pairs = (text.partition("=") for text in record.get("overrides", []))
    return {key: value.replace("\\", "") for key, _, value in pairs if key not in ("layout", "+sweep")}


def _varied(records: Sequence[Mapping[str, Any]]) -> list[str]:
    everyones = [_overrides(record) for record in records]
    keys = dict.fromkeys(key for each in everyones for key in each)
    return [key for key in keys if len({each.get(key) for each in everyones}) > 1]


def _series(record: Mapping[str, Any], varied: Sequence[str]) -> str:
    own = _overrides(record)
    return " ".join(f"{key}={own[key]}" for key in varied if key in own)
