"""One HTML file that holds a sweep's table and pictures, and the same as CSV and PNG files beside it.

It is: the putting together; the page needs no other file and no network. It is not: the table (`results.py`) or the
drawings (`figures.py`).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

from parallax.plugins.sweep import figures
from parallax.plugins.sweep.results import COLUMNS, Run, read_runs, shown, sort_runs, write_csv

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1180px; padding: 0 1em; color: #1c2530 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .28em .7em; text-align: right; border-bottom: 1px solid #e3e6e9; white-space: nowrap }
th { border-bottom: 2px solid #98a2ad; font-weight: 600 }
.text { text-align: left } .reason { white-space: normal; min-width: 22em }
tr.best td { background: #fdf3e5 } tr.failed td { color: #a33 }
img { max-width: 100%; margin: .6em 0 1.6em } .scroll { overflow-x: auto } .small { color: #5a6672; font-size: 12.5px }
"""
TEXT = ("series", "layout", "status", "reason")


def write_page(folder: Path, *, sort: str = "step_time_s", x: str | None = None, y: str | None = None,
               out: Path | None = None) -> Path | None:  # fmt: skip
    """Write results.html, results.csv and the pictures of the records in `folder`.

    Args:
        folder: of a sweep, or any that has records somewhere below.
        sort: column of the table.
        x, y: axes of the heat map; by default those with most values.
        out: where to write; default: `folder`.

    Returns:
        The page; None when there is no record yet.

    Raises:
        ValueError: an unknown column or axis; matplotlib is missing.
    """
    if not any(folder.rglob("record.json")):
        return None
    if find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'lightning-parallax[sweep]'")
    out = out or folder
    out.mkdir(parents=True, exist_ok=True)
    runs = sort_runs(read_runs(folder), sort)
    write_csv(runs, out / "results.csv")
    pictures = []
    if any(run.ok for run in runs):
        drawn = {
            "bars": ("Step time", figures.bars(runs)),
            "heatmap": ("Best step time over two axes", figures.heat_map(runs, x, y)),
            "memory": ("Memory against time", figures.memory_against_time(runs)),
        }
        for name, (title, figure) in drawn.items():
            if figure is not None:
                data = figures.png(figure)
                (out / f"{name}.png").write_bytes(data)
                pictures.append((title, data))
        pictures += [
            (f"Load of experts: {run.series + ', ' if run.series else ''}{run.layout}", figures.png(figure))
            for run, figure in figures.expert_loads(runs)
        ]
    page = out / "results.html"
    page.write_text(_html(runs, pictures, folder.name))
    return page


def _html(runs: Sequence[Run], pictures: Sequence[tuple[str, bytes]], name: str) -> str:
    failed = sum(not run.ok for run in runs)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style></head><body>',
        f"<h1>{escape(name)}</h1>",
        f"<p>{len(runs)} runs, {failed} failed. {escape(_best(runs))}</p>",
    ]
    for title, data in pictures:
        encoded = base64.b64encode(data).decode()
        parts.append(f'<h2>{escape(title)}</h2><img alt="{escape(title)}" src="data:image/png;base64,{encoded}">')
    parts += ["<h2>All runs</h2>", f'<div class="scroll">{_table(runs)}</div>', _made_with(runs), "</body></html>"]
    return "\n".join(parts) + "\n"


def _best(runs: Sequence[Run]) -> str:
    found = []
    for series in dict.fromkeys(run.series for run in runs):
        ran = [run for run in runs if run.ok and run.series == series]
        if ran:
            best = min(ran, key=lambda run: run.value("step_time_s"))
            found.append(f"{series + ': ' if series else ''}{best.layout}, {best.value('step_time_s'):.3g} s a step")
    return f"Fastest: {'; '.join(found)}." if found else ""


def _table(runs: Sequence[Run]) -> str:
    names = ["series", *COLUMNS] if any(run.series for run in runs) else [*COLUMNS]
    if all(run.ok for run in runs):
        names = [name for name in names if name not in ("status", "reason")]
    head = "".join(f'<th class="{"text" if name in TEXT else ""}">{name}</th>' for name in names)
    fastest = {
        id(min((r for r in runs if r.ok and r.series == run.series), key=lambda r: r.value("step_time_s")))
        for run in runs
        if run.ok
    }
    lines = []
    for run in runs:
        kind = "best" if id(run) in fastest else "" if run.ok else "failed"
        cells = "".join(_cell(name, run.series if name == "series" else shown(name, run.value(name))) for name in names)
        lines.append(f'<tr class="{kind}">{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(name: str, text: str) -> str:
    kind = f"{'text' if name in TEXT else ''} {'reason' if name == 'reason' else ''}".strip()
    return f'<td class="{kind}">{escape(text)}</td>'


def _made_with(runs: Sequence[Run]) -> str:
    hosts = dict.fromkeys(str(run.record["host"]) for run in runs if run.ok)
    versions = dict.fromkeys(", ".join(f"{k} {v}" for k, v in run.record["versions"].items()) for run in runs if run.ok)
    notes = [
        "step_time_s: median over the timed steps; spread_s: between the quartiles; memory_mib: peak of the largest "
        "rank; sent_mib: what a rank sends in a step, as counted (ZeRO's own traffic is not); bubble: simulated; "
        "seconds: the whole job.",
        *(f"Machine: {host}." for host in hosts),
        *(f"Versions: {text}." for text in versions),
    ]
    return "".join(f'<p class="small">{escape(note)}</p>' for note in notes)
