"""`python -m parallax verify script.py:Lit --layout "tp2 pp2"`: is this layout right for this module?

It is: arguments, the table, JSON and the exit status. It is not: the verification (`strategies/verify/`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def add_verify(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "verify",
        help="train a module for a few steps at a layout and in one process, and compare everything",
        description="Trains the LightningModule for a few steps at the layout, on processes of this machine, and in "
        "one process; compares losses, gradient norms, every gradient, weight and optimizer state, metrics and the "
        "samples read. Status 0: the same; 1: a difference, which is named; 2: it could not be run.",
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
    parser.add_argument("--bytes", action="store_true", help="show what each axis has sent, by phase")
    parser.add_argument("--json", metavar="FILE", help="write the verdicts as JSON ('-' prints it)")
    parser.set_defaults(command=run_verify)


def run_verify(options: argparse.Namespace) -> int:
    from parallax.strategies.verify.layouts import all_layouts
    from parallax.strategies.verify.target import Target
    from parallax.strategies.verify.verify import verify

    if bool(options.layout) == bool(options.all):
        raise ValueError('say which layouts: --layout "tp2 pp2" (may be repeated), or --all N')
    target = Target.parse(options.target, _synthetic(options.synthetic))
    console = Console(stderr=options.json == "-")
    layouts = options.layout or list(all_layouts(options.all, experts=False))
    verdicts = verify(
        target,
        layouts,
        steps=options.steps,
        dtype=options.dtype,
        shrink=options.shrink,
        world=options.world,
        timeout=options.timeout,
        report=lambda verdict: show_verdict(console, verdict, with_bytes=options.bytes),
    )
    ran = [v for v in verdicts if v.refused is None]
    wrong = [v for v in ran if not v.passed]
    if len(verdicts) > 1:
        console.print(f"{len(ran) - len(wrong)} right, {len(wrong)} wrong, {len(verdicts) - len(ran)} refused")
    if options.json == "-":
        print(json.dumps([v.to_dict() for v in verdicts], indent=2))
    elif options.json:
        Path(options.json).write_text(json.dumps([v.to_dict() for v in verdicts], indent=2))
    return 1 if wrong else 0


def show_verdict(console: Console, verdict: Any, *, with_bytes: bool = False) -> None:
    """One line for a layout that is right or refused; the first differences of one that is wrong."""
    head = f"{verdict.layout} on {verdict.ranks} rank(s)"
    if verdict.refused is not None:
        console.print(f"[yellow]refused[/]  {head}: {verdict.refused}", highlight=False, soft_wrap=True)
        return
    if verdict.passed:
        console.print(f"[green]right[/]    {head}; largest difference {verdict.largest:.1e}", highlight=False)
    else:
        console.print(f"[red]wrong[/]    {head}: {len(verdict.differences)} difference(s); the first:", highlight=False)
        for difference in verdict.differences[:3]:
            console.print(f"         {difference}", highlight=False, soft_wrap=True)
    for note in verdict.notes:
        console.print(f"         {note}", highlight=False, soft_wrap=True)
    if with_bytes and verdict.traffic:
        console.print(traffic_table(verdict.traffic))


def traffic_table(traffic: dict[tuple[str, str, str], tuple[int, int]]) -> Table:
    """Calls and payload bytes of one rank by axis, kind and phase."""
    table = Table("axis", "kind", "phase", "calls", "bytes")
    for (axis, kind, phase), (calls, size) in sorted(traffic.items()):
        if size:
            table.add_row(axis, kind, phase, f"{calls:,}", f"{size:,}")
    return table


def _synthetic(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isdigit() and int(p) for p in parts):
        raise ValueError(f"--synthetic {text!r} must be samples x tokens, e.g. 4x32")
    return int(parts[0]), int(parts[1])
