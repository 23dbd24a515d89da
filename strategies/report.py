"""The small table that says which rank sits where, and what it holds.

It is: the rendering of a resolved layout for a person. It is not: the source of any number in it (see
`layout.py` and `mesh.py`), and it needs no process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from rich.table import Table

from parallax.strategies.layout import Layout
from parallax.strategies.mesh import AXES, coordinates, expert_partitions

MAX_ROWS = 16
"""Longest table printed with one row a rank; beyond it, neighbours along the innermost axes share a row."""


def rank_table(
    layout: Layout, holds: Mapping[int, str] | None = None, places: Mapping[int, str] | None = None
) -> Table:
    """Coordinates of every rank of a resolved `layout`, as a rich table.

    Up to `MAX_ROWS` ranks have a row each. In larger worlds ranks that differ only along the innermost axes share a
    row, as ranges; pipeline stages always keep rows of their own.

    Args:
        layout: the resolved layout.
        holds: rank -> what it holds, for a column. Ranks of one row that hold the same say it once.
        places: rank -> host and device, for a last column, likewise.
    """
    at = _coordinates(layout)
    columns = [axis for axis in (*AXES, "ep") if axis in at[0]]
    title = f"{layout} on {layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
    table = Table(title=title, title_justify="left", min_width=len(title))
    for column in ("rank", *columns):
        table.add_column(column, justify="right", no_wrap=True)
    texts = [(name, column) for name, column in (("holds", holds), ("on", places)) if column is not None]
    for name, _ in texts:
        table.add_column(name)
    for ranks in _rows(layout, at):
        cells = [ranges(ranks), *(ranges(at[rank][column] for rank in ranks) for column in columns)]
        table.add_row(*cells, *(_held(ranks, column) for _, column in texts))
    return table


def ranges(numbers: Iterable[int]) -> str:
    """Distinct numbers as runs: 0, 1, 2, 3, 6 is "0-3, 6"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _coordinates(layout: Layout) -> list[dict[str, int]]:
    """Coordinates of each rank on the mesh axes, and on ep when there is one."""
    sizes = layout.axis_sizes()
    at = [coordinates(rank, sizes) for rank in range(layout.world_size)]
    if layout.expert_parallel_size > 1:
        for group in expert_partitions(layout)["ep"]:
            for index, rank in enumerate(group):
                at[rank]["ep"] = index
    return at


def _rows(layout: Layout, at: list[dict[str, int]]) -> Iterator[list[int]]:
    """Ranks of each row: neighbours that agree on the axes that keep rows of their own."""
    kept = list(AXES)
    sizes = layout.axis_sizes()
    rows = layout.world_size
    while rows > MAX_ROWS and len(kept) > 1:  # AXES[0] is pp
        rows //= sizes[kept.pop()]
    for _, group in groupby(range(layout.world_size), key=lambda rank: [at[rank][axis] for axis in kept]):
        yield list(group)


def _held(ranks: list[int], holds: Mapping[int, str]) -> str:
    different = list(dict.fromkeys(holds.get(rank, "") for rank in ranks))
    return different[0] if len(different) == 1 else f"{different[0]} ... {different[-1]}"
