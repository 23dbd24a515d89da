"""`python -m parallax results DIR`: what the runs in a folder measured.

It is: the subcommand: a table here, and a page, CSV and pictures in the folder. It is not: how they are made
(`plugins/sweep`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from parallax.plugins.sweep.page import write_page
from parallax.plugins.sweep.results import COLUMNS, read_runs, sort_runs, table


def add_results(commands: Any) -> None:
    """Add the subcommand to argparse's `commands`."""
    parser = commands.add_parser("results", help="show what the runs in a folder measured: table, CSV, HTML, pictures")
    parser.add_argument("folder", type=Path, metavar="DIR", help="of a sweep, or any with records somewhere below")
    parser.add_argument("--sort", default="step_time_s", metavar="COLUMN", help=f"one of {', '.join(COLUMNS)}")
    parser.add_argument("--x", metavar="AXIS", help="horizontal axis of the heat map, e.g. tp (default: most values)")
    parser.add_argument("--y", metavar="AXIS", help="vertical axis of the heat map")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the files go (default: DIR)")
    parser.add_argument("--table-only", action="store_true", help="print the table, write nothing")
    parser.set_defaults(command=show_results)


def show_results(options: argparse.Namespace) -> int:
    """Print the table and write the files. Status 1 when some run failed."""
    runs = sort_runs(read_runs(options.folder), options.sort)
    console = Console(markup=False) if sys.stdout.isatty() else Console(markup=False, width=240)
    console.print(table(runs))
    if not options.table_only:
        page = write_page(options.folder, sort=options.sort, x=options.x, y=options.y, out=options.out)
        assert page is not None
        print(f"page      {page}\nnumbers   {page.with_name('results.csv')}")
        for picture in sorted(page.parent.glob("*.png")):
            print(f"picture   {picture}")
    return int(any(not run.ok for run in runs))
