"""Cuts a small model of every causal language model in transformers over two ranks and writes docs/models.md.

It is: a command, `python -m tests.sweep`, whose answer is a table with a line for each architecture that has a
tensor-parallel plan, transformers' or ours: pass, or the precise reason. It is not: a test; a chosen part of it is one
(`tests/ranks/test_tensor_models.py`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.procs import RankError, run_ranks
from tests.ranks.model_parity import compare, loss_of
from tests.small_models import architectures, build_small, plan_of, token_ids

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"
PASS = "pass"


@dataclass(frozen=True)
class Row:
    """One line of the table: what happened at tensor_parallel_size 2, without and with sequence parallelism."""

    name: str
    plan: str
    tp: str
    sp: str


def sweep(names: Sequence[str]) -> list[Row]:
    """Try every architecture of `names` that has a plan or a reason not to be built."""
    rows = []
    for name in names:
        row = _row(name)
        if row is not None:
            print(f"{row.name}: {row.tp} | {row.sp}", flush=True)
            rows.append(row)
    return rows


def _row(name: str) -> Row | None:
    plan = plan_of(name)
    if not plan:
        return None
    try:
        ids = token_ids()
        loss_of(build_small(name), ids).backward()
    except Exception as error:
        return Row(name, plan, f"not tried, the small model does not run in one process: {_text(error)}", "-")
    tp = _attempt(name, {})
    return Row(name, plan, tp, "-")


def _text(error: Exception) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").strip()


def _attempt(name: str, options: dict[str, Any]) -> str:
    try:
        run_ranks(2, compare, name, options, {}, timeout=120)
    except RankError as error:
        kind, message, _ = next(iter(error.errors.values()), ("RankTimeout", "did not end in time", ""))
        text = re.sub(r"\s+", " ", message).strip()
        return text if kind in ("ValueError", "AssertionError") else f"{kind}: {text}"
    return PASS


def write(rows: list[Row]) -> None:
    """Put the table into its place in docs/models.md."""
    import torch
    import transformers

    passed = sum(r.tp == PASS for r in rows)
    lines = [
        f"With transformers {transformers.__version__} and torch {torch.__version__.split('+')[0]}: "
        f"{passed} of {len(rows)} architectures pass.",
        "",
        "| architecture | plan | tp2 | tp2, sequences cut |",
        "|---|---|---|---|",
        *(f"| {r.name} | {r.plan} | {_cell(r.tp)} | {_cell(r.sp)} |" for r in rows),
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + after)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:300]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__.splitlines()[0])  # type: ignore
    parser.add_argument("names", nargs="*", help="model types; all, written to docs/models.md, when none is given")
    names = parser.parse_args(arguments).names
    rows = sweep(names or architectures())
    if not names:
        write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
