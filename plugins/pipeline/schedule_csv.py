"""Schedules in CSV files: one row per rank, one cell per action, as `torch.distributed.pipelining` writes them.

It is: reading and writing of lists of actions. It is not: a check of what they mean (`simulator.py`).

A cell is stage, kind, micro-batch: "0F3" is the forward of micro-batch 3 on virtual stage 0. Empty cells (a rank waits)
say nothing, as order alone decides when an action runs. Cells for transfers and for the gathering of weights, which
torch adds when it lowers a schedule, are implied here and skipped.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallax.plugins.pipeline.actions import Action, Lists, placement
from parallax.plugins.pipeline.catalog import stages_per_rank as stages

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_IMPLIED = re.compile(r"\d+(SEND|RECV)_[FB]\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


def load_csv(path: str | Path) -> list[list[Action]]:
    """The lists in a file, one for each row.

    Raises:
        ValueError: no such file, or a cell that is no action, with its row and column (from 1).
    """
    try:
        with open(path, newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"schedule file {str(path)!r} cannot be read: {error}") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise ValueError(f"schedule file {str(path)!r} is empty; it needs one row of cells such as 0F0 for each rank")
    lists: list[list[Action]] = [[] for _ in rows]
    for rank, row in enumerate(rows):
        for at, cell in enumerate(row):
            action = _read(cell.strip(), f"{path}, row {rank + 1}, cell {at + 1}")
            lists[rank] += [action] if action else []
    return lists


def _read(cell: str, where: str) -> Action | None:
    if not cell or _IMPLIED.fullmatch(cell):
        return None
    found = _CELL.fullmatch(cell)
    if found is None:
        raise ValueError(
            f"{where}: {cell!r} is no action; write stage, kind (F, B, I or W) and micro-batch, as in 0F3"
        )
    kind: Any = found[2]
    return Action(kind, int(found[3]), int(found[1]))


def save_csv(lists: Lists, path: str | Path) -> None:
    """Write lists so that `load_csv` and torch read them again."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([f"{a.stage}{a.kind}{a.microbatch}" for a in actions] for actions in lists)


def csv_schedule(path: str | Path) -> Callable[[int, int, int], list[list[Action]]]:
    """The schedule in a file. It is for one number of ranks and micro-batches, and refuses others.

    Raises:
        ValueError: as `load_csv`, or stages that sit on two ranks or are missing.
    """
    lists = load_csv(path)
    try:
        held = len(placement(lists))
    except ValueError as error:
        raise ValueError(f"schedule file {str(path)!r}: {error}") from error
    ranks = len(lists)
    count = 1 + max(action.microbatch for actions in lists for action in actions)
    if held % ranks:
        raise ValueError(f"schedule file {str(path)!r} has {held} stages on {ranks} ranks; all need equally many")

    @stages(default=held // ranks, least=held // ranks, most=held // ranks)
    def schedule(num_ranks: int, num_microbatches: int, stages_per_rank: int = held // ranks) -> list[list[Action]]:
        if (num_ranks, num_microbatches) != (ranks, count):
            raise ValueError(
                f"schedule file {str(path)!r} is for {ranks} ranks and {count} micro-batches, not {num_ranks} and "
                f"{num_microbatches}; set pipeline_parallel_size={ranks} and num_microbatches={count}"
            )
        return lists

    return schedule
