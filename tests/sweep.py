"""Cuts a small model of every architecture in transformers over two and four ranks and writes docs/models.md.

It is: a command, `python -m tests.sweep`, whose answer is a table with a line for each causal language model that has
a tensor-parallel plan, transformers' or ours, and for each model that has an expert-parallel one: pass, or the precise
reason. It is not: a test;
chosen parts of it are (`tests/ranks/test_tensor_models.py`, `tests/parity/test_moe.py`).
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
from typing import Any

import torch
import torch.distributed as dist

from tests.procs import RankError, run_ranks
from tests.ranks.model_parity import SEED, TOLERANCE, compare, loss_of
from tests.small_models import architectures, build_small, expert_architectures, has_expert_plan, plan_of, token_ids

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"
PASS, NO_PLAN, SEPARATOR = "pass", "-", "\x1f"
DRAWS = "not tried, a sample's loss depends on the samples beside it: the model draws random numbers for them"
COLUMNS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"sequence_parallel": False}),
    "tp2, sequence shards": (2, {"sequence_parallel": True}),
    "tp4": (4, {"sequence_parallel": False}),
    "tp4, sequence shards": (4, {"sequence_parallel": True}),
    "ep2": (2, {"tensor_parallel_size": 1, "expert_parallel_size": 2}),
}
"""Head of each column of results -> number of ranks, and fields of the layout."""
CHUNK = 12
"""Models that one set of processes tries one after the other."""


@dataclass
class Row:
    """One line of the table: `cells` by column, and the share of the model that the tensor-parallel plan cuts."""

    name: str
    plan: str
    cut: str = "-"
    cells: dict[str, str] = field(default_factory=dict)


def sweep(names: Sequence[str]) -> list[Row]:
    """Try every architecture of `names` that has a plan; what is no causal language model only with its experts cut."""
    rows, causal = [], architectures()
    for name in names:
        plan, experts = plan_of(name) if name in causal else "", has_expert_plan(name)
        if plan or experts:
            rows.append(row := Row(name, plan or "-"))
            row.cells = {head: NO_PLAN for head in COLUMNS if not (experts if head.startswith("ep") else plan)}
            if error := _error_alone(name):
                reason = f"not tried, the small model does not run in one process: {error}"
                row.cells = {head: row.cells.get(head, reason) for head in COLUMNS}
            elif experts and _draws(name):
                row.cells |= {head: DRAWS for head in COLUMNS if head.startswith("ep")}
    for size in sorted({size for size, _ in COLUMNS.values()}):
        able = [row for row in rows if _left(row, size)]
        for start in range(0, len(able), CHUNK):
            _try(able[start : start + CHUNK], size)
    return rows


def _left(row: Row, size: int) -> list[str]:
    """Columns of `size` ranks that `row` has no result for."""
    return [head for head, (ranks, _) in COLUMNS.items() if ranks == size and head not in row.cells]


def _error_alone(name: str) -> str:
    """Why one process cannot train the small model; empty when it can."""
    try:
        loss_of(build_small(name), token_ids()).backward()
    except Exception as error:  # whatever it is, it is no fault of the cut
        return _text(error)
    return ""


def _draws(name: str) -> bool:
    """Whether a sample's loss depends on the samples beside it: then data ranks cannot equal one process."""
    model, ids = build_small(name), token_ids()
    losses = []
    for batch in (ids, *ids.split(1)):
        torch.manual_seed(SEED)
        losses.append(loss_of(model, batch).item())
    return abs(losses[0] - sum(losses[1:]) / len(ids)) > TOLERANCE


def _try(rows: list[Row], size: int) -> None:
    """Fill the cells of `rows` for `size` ranks, with new processes after a model that ends or hangs them."""
    left = list(rows)
    while left:
        outputs: list[str] = []
        end = ""
        try:
            with redirect_stdout(io.StringIO()):  # which repeats what is in `outputs`
                tries = [(row.name, _left(row, size)) for row in left]
                run_ranks(size, _attempts, tries, timeout=90 * len(left), outputs=outputs)
        except RankError as error:
            end = _text(error)
        for line in (outputs[0] if outputs else "").splitlines():
            if line.count(SEPARATOR) == 3:
                name, head, text, share = line.split(SEPARATOR)
                row = next(r for r in left if r.name == name)
                row.cells[head], row.cut = text, share if share and head.startswith("tp") else row.cut
        done = [row for row in left if not _left(row, size)]
        left = [row for row in left if row not in done]
        if left and end:
            for head in _left(left[0], size):
                left[0].cells[head] = end
            done.append(left.pop(0))
        for row in done:
            print(row.name, {head: row.cells[head] for head in COLUMNS if COLUMNS[head][0] == size}, flush=True)


def _attempts(rank: int, world: int, tries: list[tuple[str, list[str]]]) -> None:
    """On one rank: each model in each column named for it; one line of output for each attempt."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    for name, heads in tries:
        for head in heads:
            share = ""
            try:
                share = f"{compare(rank, world, name, COLUMNS[head][1], {}).cut:.0%}"
                text = PASS
            except Exception as error:
                text = _text(error)
            everyones: list[str] = [""] * world
            dist.all_gather_object(everyones, text)
            worst = next((t for t in everyones if t != PASS), PASS)
            if rank == 0:
                print(SEPARATOR.join((name, head, worst, share)), flush=True)


def _text(error: Exception) -> str:
    kind = "" if isinstance(error, (ValueError, AssertionError)) else f"{type(error).__name__}: "
    return re.sub(r"\s+", " ", f"{kind}{error}").strip()[:400] or repr(error)


def write(rows: list[Row]) -> None:
    """Put the table into its place in docs/models.md."""
    import transformers

    results = {head: [cell for r in rows if (cell := r.cells[head]) != NO_PLAN] for head in COLUMNS}
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}. Of those with a plan pass "
        + ", ".join(f"{cells.count(PASS)} of {len(cells)} at {head}" for head, cells in results.items())
        + ".",
        "",
        f"| architecture | plan | cut | {' | '.join(COLUMNS)} |",
        "|---" * (3 + len(COLUMNS)) + "|",
    ]
    reasons: dict[str, int] = {}
    for row in rows:
        cells = [_cell(row.cells[head], reasons) for head in COLUMNS]
        lines.append(f"| {row.name} | {row.plan} | {row.cut} | {' | '.join(cells)} |")
    lines += ["", "Reasons:", "", *(f"{number}. {text}" for text, number in reasons.items())]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + after)


def read() -> list[Row]:
    """The rows of the table that is there."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    reasons = {f"({n})": text.replace("&lt;", "<") for n, text in re.findall(r"^(\d+)\. (.*)$", "\n".join(lines), re.M)}
    rows = []
    for line in lines[lines.index("|---" * (3 + len(COLUMNS)) + "|") + 1 :]:
        if line.startswith("| "):
            name, plan, cut, *cells = line.strip("| ").split(" | ")
            rows.append(Row(name, plan, cut, dict(zip(COLUMNS, (reasons.get(c, c) for c in cells), strict=True))))
    return rows


def _cell(text: str, reasons: dict[str, int]) -> str:
    """`pass`, or the number of the reason below the table; names of single models do not make a reason of their own."""
    if text in (PASS, NO_PLAN):
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
    parser.add_argument("--write", action="store_true", help="put the lines of these into the table that is there")
    options = parser.parse_args(arguments)
    rows = sweep(options.names or architectures() + expert_architectures())
    if options.write and options.names:
        new = {row.name: row for row in rows}
        rows = [new.get(row.name, row) for row in read()]
    if options.write or not options.names:
        write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
