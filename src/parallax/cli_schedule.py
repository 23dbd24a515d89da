"""`parallax schedule`: what a pipeline schedule does, as a picture and in numbers.

It is: one subcommand for a schedule by name, from a CSV file, a function of the user's, or the trace of a real step. It
is not: a run of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from parallax.plugins.pipeline.actions import Lists
from parallax.plugins.pipeline.catalog import find_schedule, make_lists
from parallax.plugins.pipeline.gantt import Gantt
from parallax.plugins.pipeline.picture_svg import draw, draw_both, page, summary
from parallax.plugins.pipeline.picture_text import chart, legend
from parallax.plugins.pipeline.schedule_csv import load_csv, save_csv
from parallax.plugins.pipeline.simulator import Costs, simulate
from parallax.plugins.pipeline.trace import Comparison, compare, load_trace


def add_schedule(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    command = commands.add_parser("schedule", help="draw a pipeline schedule, with its bubble and its memory")
    command.add_argument("name", nargs="?", help='e.g. 1f1b, zb_v, "my_schedule.csv" or "my_module:my_function"')
    command.add_argument("--pp", type=int, metavar="RANKS", help="pipeline ranks (default 4)")
    command.add_argument("--microbatches", type=int, metavar="M", help="micro-batches (default 8)")
    command.add_argument("--virtual-stages", type=int, metavar="V", help="stages per rank (default: the schedule's)")
    command.add_argument(
        "--costs",
        metavar="F,B,W",
        default="1,2,1",
        help="time of a forward, of a whole backward, and of its weight half, on one stage (default 1,2,1); "
        "the input half takes B - W",
    )
    command.add_argument(
        "--transfer", type=float, default=0.0, metavar="T", help="time from one rank to the next (default 0)"
    )
    command.add_argument("--trace", metavar="FILE", help="the times of a real step, instead of a name")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--svg", metavar="FILE", help="write the picture")
    command.add_argument("--html", metavar="FILE", help="write a page with the picture; blocks say what they are")
    command.add_argument("--csv", metavar="FILE", help="write the lists, one row for each rank")
    command.set_defaults(command=show_schedule)


def show_schedule(options: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        ValueError: an unknown schedule, sizes or costs that it does not permit, a file that cannot be read or written.
    """
    if (options.name is None) == (options.trace is None):
        raise ValueError("name a schedule, e.g. 1f1b, or give the --trace of a real step; one of them")
    if options.trace is not None:
        return _show_trace(options)
    costs = _costs(options.costs, options.transfer)
    lists = _lists(options)
    gantt = simulate(lists, costs)
    title = Path(options.name).name
    _write(options.svg, lambda: draw(gantt, title) + "\n")
    _write(options.html, lambda: page(f"Schedule {title}", [draw(gantt, title, names=True)], [_said(costs)]))
    if options.csv:
        _write_lists(lists, options.csv)
    if options.json:
        print(json.dumps({"schedule": options.name, **_numbers(gantt), "costs": _table(costs)}))
    else:
        _print(f"{title}, {summary(gantt)}", gantt, _said(costs))
    return 0


def _show_trace(options: argparse.Namespace) -> int:
    found = compare(load_trace(options.trace))
    title, pictures = Path(options.trace).name, {"measured": found.measured, "predicted": found.predicted}
    if options.svg:
        raise ValueError("--svg is for one picture; a trace has two, measured and predicted: use --html")
    _write(options.html, lambda: draw_both(f"Step {title}", found))
    if options.csv:
        _write_lists(found.measured.lists, options.csv)
    if options.json:
        print(json.dumps(_comparison(found)))
    else:
        for name, gantt in pictures.items():
            _print(f"{name}, {summary(gantt, 's')}", gantt)
        print(found)
    return 0


def _lists(options: argparse.Namespace) -> Lists:
    ranks, count = 4, 8
    if options.name.endswith(".csv"):
        rows = load_csv(options.name)
        ranks, count = len(rows), 1 + max((a.microbatch for row in rows for a in row), default=0)
    ranks = ranks if options.pp is None else options.pp
    count = count if options.microbatches is None else options.microbatches
    return make_lists(find_schedule(options.name), ranks, count, options.virtual_stages, name=options.name)


def _costs(text: str, transfer: float) -> Costs:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(0 <= n < float("inf") for n in (*numbers, transfer)) or numbers[2] > numbers[1]:
        raise ValueError(
            f"--costs {text!r} must be three numbers of at least 0: forward, whole backward, and its weight half, "
            f"which is a part of the backward; e.g. 1,2,1. --transfer {transfer:g} must be at least 0"
        )
    forward, backward, weight = numbers
    return Costs(forward, backward, weight, transfer=transfer)


def _table(costs: Costs) -> dict[str, float]:
    return {**{kind: column[0] for kind, column in costs.table(1).items()}, "transfer": costs.transfer}


def _said(costs: Costs) -> str:
    cost = _table(costs)
    return (
        f"costs on one stage: forward F = {cost['F']:g}, backward B = {cost['B']:g} = input half I = {cost['I']:g} + "
        f"weight half W = {cost['W']:g}; transfer {cost['transfer']:g}"
    )


def _numbers(gantt: Gantt) -> dict[str, Any]:
    """All there is to say, for --json."""
    ranks, stages = len(gantt.lists), len(gantt.placement)
    actions = [
        [{"action": str(a), "kind": a.kind, "microbatch": a.microbatch, "stage": a.stage, "start": start, "end": end}
         for a, start, end in rank]
        for rank in gantt.ranks()
    ]  # fmt: skip
    return {
        "ranks": ranks,
        "microbatches": gantt.microbatches,
        "stages_per_rank": stages // ranks,
        "placement": gantt.placement,
        "makespan": gantt.makespan,
        "ideal": gantt.ideal,
        "bubble_of_total": gantt.bubble,
        "bubble_of_ideal": gantt.bubble_of_ideal,
        "longest_rank": gantt.span,
        "peak_in_flight": gantt.peak_in_flight,
        "peak_of_1f1b": gantt.peak_of_1f1b,
        "actions": actions,
    }


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "unit": "s",
        "measured": _numbers(found.measured),
        "predicted": _numbers(found.predicted),
        "stage_seconds": found.stage_seconds,
        "slowest_stage": found.slowest_stage,
        "slowest_rank": found.measured.placement[found.slowest_stage],
    }


def _print(head: str, gantt: Gantt, *notes: str) -> None:
    """The picture, as wide as the terminal; in a file or pipe without colour and 120 columns wide."""
    colour = sys.stdout.isatty() and Console().color_system is not None
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(head)
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
    console.print(chart(gantt, width, colour=colour), end="")
    console.print(legend(gantt, colour=colour))
    peaks = gantt.peak_in_flight
    each = f"{peaks[0]} on every rank" if len(set(peaks)) == 1 else f"{', '.join(map(str, peaks))} by rank"
    console.print(f"activations in flight at most: {each} (unit: one micro-batch on one stage)")
    for note in notes:
        console.print(note)


def _write(path: str | None, text: Any) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(text(), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path!r} cannot be written: {error}") from error


def _write_lists(lists: Lists, path: str) -> None:
    try:
        save_csv(lists, path)
    except OSError as error:
        raise ValueError(f"{path!r} cannot be written: {error}") from error
