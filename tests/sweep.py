"""Cuts a small model of every causal language model in transformers over two and four ranks and writes docs/models.md.

It is: a command, `python -m tests.sweep`, whose answer is a table with a line for each architecture that has a
tensor-parallel plan, transformers' or ours: pass, or the precise reason. It is not: a test; a chosen part of it is one
(`tests/ranks/test_tensor_models.py`).
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from tests.procs import RankError, run_ranks
from tests.ranks.model_parity import compare, loss_of
from tests.small_models import architectures, build_small, plan_of, token_ids

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"
PASS, SEPARATOR = "pass", "\x1f"
COLUMNS = [(2, False), (2, True), (4, False), (4, True)]
"""(ranks, sequence shards) of each column of results."""
CHUNK = 12
"""Models that one set of processes tries one after the other."""


@dataclass
class Row:
    """One line of the table: `cells` by (ranks, sequence shards), and the share of the model that the plan cuts."""

    name: str
    plan: str
    cut: str = "-"
    cells: dict[tuple[int, bool], str] = field(default_factory=dict)


def sweep(names: Sequence[str]) -> list[Row]:
    """Try every architecture of `names` that has a plan."""
    rows = [Row(name, plan) for name in names if (plan := plan_of(name))]
    for row in rows:
        if error := _error_alone(row.name):
            row.cells = dict.fromkeys(COLUMNS, f"not tried, the small model does not run in one process: {error}")
    able = [row for row in rows if not row.cells]
    for size in sorted({size for size, _ in COLUMNS}):
        for start in range(0, len(able), CHUNK):
            _try(able[start : start + CHUNK], size)
    return rows


def _error_alone(name: str) -> str:
    """Why one process cannot train the small model; empty when it can."""
    try:
        loss_of(build_small(name), token_ids()).backward()
    except Exception as error:  # whatever it is, it is no fault of the cut
        return _text(error)
    return ""


def _try(rows: list[Row], size: int) -> None:
    """Fill the cells of `rows` for `size` ranks, with new processes after a model that ends or hangs them."""
    left = list(rows)
    while left:
        outputs: list[str] = []
        end = ""
        try:
            with redirect_stdout(io.StringIO()):  # which repeats what is in `outputs`
                run_ranks(size, _attempts, [row.name for row in left], timeout=90 * len(left), outputs=outputs)
        except RankError as error:
            end = _text(error)
        for line in (outputs[0] if outputs else "").splitlines():
            if line.count(SEPARATOR) == 3:
                name, shards, text, share = line.split(SEPARATOR)
                row = next(r for r in left if r.name == name)
                row.cells[size, shards == "True"], row.cut = text, share or row.cut
        done = [row for row in left if {(size, False), (size, True)} <= row.cells.keys()]
        left = [row for row in left if row not in done]
        if left and end:
            for shards in (False, True):
                left[0].cells.setdefault((size, shards), end)
            done.append(left.pop(0))
        for row in done:
            print(row.name, {key: value for key, value in row.cells.items() if key[0] == size}, flush=True)


def _attempts(rank: int, world: int, names: list[str]) -> None:
    """On one rank: each model without and with sequence shards; one line of output for each attempt."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    for name in names:
        for shards in (False, True):
            share = ""
            try:
                share = f"{compare(rank, world, name, {'sequence_parallel': shards}, {}).cut:.0%}"
                text = PASS
            except Exception as error:
                text = _text(error)
            everyones: list[str] = [""] * world
            dist.all_gather_object(everyones, text)
            worst = next((t for t in everyones if t != PASS), PASS)
            if rank == 0:
                print(SEPARATOR.join((name, str(shards), worst, share)), flush=True)


def _text(error: Exception) -> str:
    kind = "" if isinstance(error, (ValueError, AssertionError)) else f"{type(error).__name__}: "
    return re.sub(r"\s+", " ", f"{kind}{error}").strip()[:400]


def write(rows: list[Row]) -> None:
    """Put the table into its place in docs/models.md."""
    import torch
    import transformers

    counts = [sum(r.cells.get(key) == PASS for r in rows) for key in COLUMNS]
    heads = [f"tp{size}" + (", sequence shards" if shards else "") for size, shards in COLUMNS]
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}. "
        f"Of {len(rows)} architectures "
        + ", ".join(f"{count} pass at {head}" for count, head in zip(counts, heads, strict=True))
        + ".",
        "",
        f"| architecture | plan | cut | {' | '.join(heads)} |",
        "|---|---|---|---|---|---|---|",
    ]
    reasons: dict[str, int] = {}
    for row in rows:
        cells = [_cell(row.cells.get(key, "-"), reasons) for key in COLUMNS]
        lines.append(f"| {row.name} | {row.plan} | {row.cut} | {' | '.join(cells)} |")
    lines += ["", "Reasons:", "", *(f"{number}. {text}" for text, number in reasons.items())]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + after)


def _cell(text: str, reasons: dict[str, int]) -> str:
    """`pass`, or the number of the reason below the table; names of single models do not make a reason of their own."""
    if text in (PASS, "-"):
        return text
    short = re.sub(r"\b\w+For\w+ \(model_type '\w+'\)", "the model", text).split("; give it one")[0]
    short = short.split(". Leave sequence_parallel")[0].replace("sequence_parallel=True, but ", "")
    short = re.sub(r"the residual stream of \w+", "the residual stream", short).replace("<", "&lt;")
    return f"({reasons.setdefault(short, len(reasons) + 1)})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description="Write docs/models.md.")
    parser.add_argument(
        "names", nargs="*", help="model types to try without writing; all, and write, when none is given"
    )
    names = parser.parse_args(arguments).names
    rows = sweep(names or architectures())
    if not names:
        write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
