"""`python -m parallax verify script.py:Lit --layout "tp2 pp2"`: is this layout right for this module?

It is: arguments, the table, JSON and the exit status. It is not: the verification (`strategies/verify/`).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parallax.strategies.layout import Layout


def add_verify(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "verify",
        help="train a module for a few steps at a layout and in one process, and compare everything",
        description="Trains the LightningModule for a few steps at the layout, on processes of this machine, and in "
        "one process; compares losses, gradient norms, every gradient, weight and optimizer state, metrics and the "
        "samples read. Status 0: the same; 1: a difference, which is named; 2: it could not be run (of --all: a layout "
        "failed, or none fits).",
    )
    parser.add_argument(
        "target", help="script.py:Name or package.module:Name; Name() makes the module or (module, data)"
    )
    parser.add_argument("--layout", action="append", default=[], help='e.g. "tp2 pp2"; may be repeated')
    parser.add_argument("--all", type=int, metavar="N", help="every layout of up to N ranks, as a matrix")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument("--dtype", default="fp64", choices=["fp64", "fp32", "bf16"], help="of both runs (default fp64)")
    parser.add_argument("--shrink", action="store_true", help="build Hugging Face models small: the same architecture")
    parser.add_argument("--synthetic", metavar="BxS", help="made-up token batches: samples per data rank x tokens")
    parser.add_argument("--world", type=int, metavar="N", help="ranks, where the layout leaves dp open")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for one run (default 600)")
    parser.add_argument("--bytes", action="store_true", help="compare what was sent with closed formulas, and show it")
    parser.add_argument(
        "--dropout",
        type=int,
        nargs="?",
        const=24,
        default=0,
        metavar="STEPS",
        help="also with dropout on: mean loss, rate, and which ranks share masks (default 24 steps)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the verdicts as JSON ('-' prints it)")
    parser.set_defaults(command=run_verify)


def run_verify(options: argparse.Namespace) -> int:
    from parallax.plugins.expert.plans import find_experts
    from parallax.strategies.verify.layouts import all_layouts
    from parallax.strategies.verify.runs import sketch
    from parallax.strategies.verify.target import Target
    from parallax.strategies.verify.verify import verify

    if bool(options.layout) == bool(options.all):
        raise ValueError('say which layouts: --layout "tp2 pp2" (may be repeated), or --all N')
    target = Target.parse(options.target, _synthetic(options.synthetic))
    console = Console(stderr=options.json == "-")
    layouts = options.layout
    if options.all:
        experts = bool(find_experts(sketch(target, shrink=options.shrink)))
        layouts = list(all_layouts(options.all, experts=experts))
    verdicts = verify(
        target,
        layouts,
        steps=options.steps,
        dtype=options.dtype,
        shrink=options.shrink,
        world=options.world,
        timeout=options.timeout,
        report=lambda verdict: show_verdict(console, verdict),
        check_bytes=options.bytes,
        dropout=options.dropout,
    )
    counts = Counter(map(word_of, verdicts))
    if options.all:
        console.print(matrix(verdicts))
    if len(verdicts) > 1:
        failed = f", {counts['failed']} failed" if counts["failed"] else ""
        console.print(f"{counts['right']} right, {counts['wrong']} wrong, {counts['refused']} refused{failed}")
    if options.json == "-":
        print(json.dumps([v.to_dict() for v in verdicts], indent=2))
    elif options.json:
        Path(options.json).write_text(json.dumps([v.to_dict() for v in verdicts], indent=2))
    return exit_status(verdicts, every=bool(options.all))


def exit_status(verdicts: Sequence[Any], *, every: bool) -> int:
    """0: all right; 1: something is wrong; 2: something could not be run. Of `every` possible layout some do not fit;
    one that was asked for must."""
    words = set(map(word_of, verdicts))
    if "wrong" in words:
        return 1
    return 2 if "failed" in words or "right" not in words or ("refused" in words and not every) else 0


def word_of(verdict: Any) -> str:
    """right, wrong, refused or failed."""
    if verdict.refused is not None or verdict.failed is not None:
        return "failed" if verdict.refused is None else "refused"
    return "right" if verdict.passed else "wrong"


def show_verdict(console: Console, verdict: Any) -> None:
    """One line for a layout that is right, refused or failed; the first differences of one that is wrong; and what was
    sent."""
    head = f"{verdict.layout} on {verdict.ranks} rank(s)"
    if verdict.refused is not None:
        console.print(f"[yellow]refused[/]  {head}: {verdict.refused}", highlight=False, soft_wrap=True)
        return
    if verdict.failed is not None:
        console.print(f"[red]failed[/]   {head}: {verdict.failed.splitlines()[0]}", highlight=False, soft_wrap=True)
        return
    if verdict.passed:
        console.print(f"[green]right[/]    {head}; largest difference {verdict.largest:.1e}", highlight=False)
    elif verdict.differences:
        console.print(f"[red]wrong[/]    {head}: {len(verdict.differences)} difference(s); the first:", highlight=False)
        for difference in verdict.differences[:3]:
            console.print(f"         {difference}", highlight=False, soft_wrap=True)
    if verdict.wrong_rows or verdict.no_formula:
        console.print(
            f"[red]wrong[/]    {head}: {len(verdict.wrong_rows)} row(s) of bytes; the first:", highlight=False
        )
        for line in (*verdict.no_formula, *verdict.wrong_rows[:5]):
            console.print(f"         {line}", highlight=False, soft_wrap=True)
    for note in verdict.notes:
        console.print(f"         {note}", highlight=False, soft_wrap=True)
    if verdict.rows:
        console.print(traffic_table(verdict.rows))


def matrix(verdicts: Sequence[Any]) -> Table:
    """Sizes of the axes by ZeRO stage: right, wrong, refused or failed."""
    table = Table("ranks", "tp", "pp", "cp", "dp", "ep", "ddp", "zero1", "zero2", "zero3")
    lines: dict[tuple[int, ...], dict[int, str]] = {}
    for verdict in verdicts:
        layout = Layout.parse(verdict.layout)
        sizes = layout.axis_sizes()
        key = (layout.world_size, *(sizes[a] for a in ("tp", "pp", "cp", "dp")), layout.expert_parallel_size)
        word = word_of(verdict)
        color = {"right": "green", "refused": "default"}.get(word, "red")
        lines.setdefault(key, {})[layout.zero_stage] = f"[{color}]{word}[/]"
    for key, words in lines.items():
        table.add_row(*map(str, key), *(words.get(stage, "") for stage in range(4)))
    return table


def traffic_table(rows: Sequence[Any]) -> Table:
    """Calls and payload bytes of a rank in the last step, by axis, kind, phase and group; ranks that sent the same are
    one line."""
    last = max(row.step for row in rows)
    lines: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        if row.step == last:
            key = (row.axis, row.kind, row.phase, len(row.group), row.counted, row.expected, row.pooled)
            lines.setdefault(key, set()).update(row.group if row.pooled else [row.rank])
    table = Table("axis", "kind", "phase", "of", "calls", "bytes", "by formula", "ranks")
    for (axis, kind, phase, size, counted, expected, pooled), ranks in sorted(lines.items(), key=lambda x: x[0][:4]):
        formula = "the same" if counted == expected else f"{expected.bytes:,} in {expected.calls:,}"
        who = ", ".join(map(str, sorted(ranks))) + (" together" if pooled else "")
        table.add_row(axis, kind, phase, str(size), f"{counted.calls:,}", f"{counted.bytes:,}", formula, who)
    return table


def _synthetic(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isdigit() and int(p) for p in parts):
        raise ValueError(f"--synthetic {text!r} must be samples x tokens, e.g. 4x32")
    return int(parts[0]), int(parts[1])
