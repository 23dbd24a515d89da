"""Schedules as SVG and as one HTML page: a row per rank, time from left to right.

It is: text that needs nothing else to be shown, in light and dark. It is not: the numbers (`gantt.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10

from parallax.plugins.pipeline.actions import KINDS
from parallax.plugins.pipeline.gantt import Gantt
from parallax.plugins.pipeline.picture_text import COLOURS, NAMES
from parallax.plugins.pipeline.trace import Comparison

WIDTH = 1160
"""Of the picture, in pixels."""
LEFT, RIGHT, TOP, ROW, GAP, AXIS = 70, 92, 74, 26, 6, 34
"""Room for rank names, for peaks, for title and legend, height of a row, between rows, and for the axis."""
MOST_BLOCKS = 40_000
"""Blocks drawn in one picture; a file with more would be too large to open."""

STYLE = """
:root{--ink:#1c2430;--soft:#5b6675;--idle:#eef1f5;--line:#c6ced9;--page:#fff;--peak:#b9c4d3}
@media(prefers-color-scheme:dark){
:root{--ink:#e6ebf2;--soft:#9aa7b8;--idle:#1b222c;--line:#3a4553;--page:#12171e;--peak:#4a596c}}
text{font:12px system-ui,sans-serif;fill:var(--soft)}.title{font-size:15px;font-weight:600;fill:var(--ink)}
.name{font-weight:600;fill:var(--ink)}.idle{fill:var(--idle)}.tick{stroke:var(--line)}.peak{fill:var(--peak)}
.no{font-size:10.5px;text-anchor:middle;dominant-baseline:central;fill:#fff}.late .no{fill:#10151c}
"""
PAGE = """
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:2rem auto;max-width:1200px;
padding:0 1rem}svg{max-width:100%;height:auto;display:block;margin:1rem 0}h1{font-size:1.4rem}p{color:var(--soft)}
"""


def draw(gantt: Gantt, title: str, unit: str = "", *, until: float | None = None, names: bool = False) -> str:
    """SVG of one step.

    Args:
        gantt: what is drawn.
        title: its first words; the makespan and the bubble follow.
        unit: of the times; "s" is shown in milliseconds.
        until: where the time axis ends, to draw several at one scale; None: at the makespan.
        names: whether a block says what it is when pointed at (makes the file about three times as large).

    Raises:
        ValueError: more blocks than `MOST_BLOCKS`.
    """
    blocks = sum(map(len, gantt.lists))
    if blocks > MOST_BLOCKS:
        raise ValueError(f"a picture of {blocks} actions is too large; at most {MOST_BLOCKS} are drawn. Use fewer "
                         f"ranks or micro-batches for the picture, or --json")  # fmt: skip
    until = until or gantt.makespan
    scale = (WIDTH - LEFT - RIGHT) / until
    height = TOP + len(gantt.lists) * (ROW + GAP) + AXIS
    rows = "".join(_row(gantt, rank, scale, names=names) for rank in range(len(gantt.lists)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}{_colours()}</style>'
        f'<rect width="{WIDTH}" height="{height}" fill="var(--page)"/>{_head(gantt, title, unit)}{rows}'
        f"{_axis(until, scale, height - AXIS, unit)}</svg>"
    )


def page(title: str, pictures: Sequence[str], notes: Sequence[str] = ()) -> str:
    """One HTML page of SVG pictures, below each other, and a line of text for each note."""
    lines = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}{PAGE}</style><h1>{escape(title)}</h1>{lines}"
        f"{''.join(pictures)}</html>\n"
    )


def draw_both(title: str, found: Comparison) -> str:
    """The page of a measured and a predicted step, at one scale of time."""
    both = {"measured": found.measured, "predicted": found.predicted}
    until = max(gantt.makespan for gantt in both.values())
    pictures = [draw(gantt, name, "s", until=until, names=True) for name, gantt in both.items()]
    return page(title, pictures, [str(found)])


def summary(gantt: Gantt, unit: str = "") -> str:
    """The numbers in one line."""
    ranks = len(gantt.lists)
    return (
        f"{ranks} rank{'s' if ranks > 1 else ''}, {gantt.microbatches} micro-batches: "
        f"makespan {_time(gantt.makespan, unit)}, bubble {gantt.bubble:.1%} of the time "
        f"({gantt.bubble_of_ideal:.1%} of ideal), peak {max(gantt.peak_in_flight)} activations, "
        f"{gantt.peak_of_1f1b:.0%} of 1F1B's"
    )


def _colours() -> str:
    return "".join(f".{kind}{later}{{fill:{COLOURS[kind][later]}}}" for kind in KINDS for later in (0, 1))


def _head(gantt: Gantt, title: str, unit: str) -> str:
    several = len(gantt.placement) > len(gantt.lists)
    parts, x = [f'<text x="{LEFT}" y="24"><tspan class="title">{escape(title)}</tspan>'], float(LEFT)
    parts.append(f'<tspan dx="14">{escape(summary(gantt, unit))}</tspan></text>')
    for kind in KINDS:
        if any(action.kind == kind for actions in gantt.lists for action in actions):
            for later in range(2 if several else 1):
                parts.append(f'<rect class="{kind}{later}" x="{x:g}" y="40" width="14" height="14" rx="3"/>')
                x += 17
            parts.append(f'<text x="{x + 3:g}" y="51">{NAMES[kind]}</text>')
            x += 24 + 6.6 * len(NAMES[kind])
    if several:
        parts.append(f'<text x="{x:g}" y="51">light: a rank\'s later stages</text>')
    parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="64">activations</text>')
    return "".join(parts)


def _row(gantt: Gantt, rank: int, scale: float, *, names: bool) -> str:
    y = TOP + rank * (ROW + GAP)
    end = gantt.makespan * scale
    parts = [
        f'<g transform="translate({LEFT},{y})"><text class="name" x="-12" y="17" text-anchor="end">rank {rank}</text>'
        f'<rect class="idle" width="{end:.1f}" height="{ROW}" rx="3"/>'
    ]
    late: list[str] = []
    for action, start, stop in zip(gantt.lists[rank], gantt.starts[rank], gantt.ends[rank], strict=True):
        x, width = (start - gantt.begin) * scale, (stop - start) * scale
        later = min(gantt.positions[action.stage], 1)
        shown = f"{width - 1 if width > 4 else width:.1f}"
        says = f"<title>{action}: {start:.4g} to {stop:.4g}</title>" if names else ""
        close = f">{says}</rect>" if says else "/>"
        block = f'<rect class="{action.kind}{later}" x="{x:.1f}" width="{shown}" height="{ROW}" rx="2"{close}'
        number = str(action.microbatch)
        if width > 5 + 6 * len(number):
            block += f'<text class="no" x="{x + width / 2 - 0.5:.1f}" y="{ROW / 2:g}">{number}</text>'
        (late if later else parts).append(block)
    parts.append(f'<g class="late">{"".join(late)}</g>' if late else "")
    return "".join(parts) + _peak(gantt, rank) + "</g>"


def _peak(gantt: Gantt, rank: int) -> str:
    """A bar at the right: the rank's peak of activations in flight, next to the largest of all."""
    peak, most = gantt.peak_in_flight[rank], max(gantt.peak_in_flight)
    x, room = WIDTH - LEFT - RIGHT + 12, RIGHT - 46
    return (
        f'<rect class="peak" x="{x}" y="7" width="{room * peak / most:.1f}" height="{ROW - 14}" rx="2"/>'
        f'<text x="{x + room + 6}" y="17">{peak}</text>'
    )


def _axis(until: float, scale: float, y: int, unit: str) -> str:
    step = _step(until)
    parts, at = [], 0.0
    while at <= until * (1 + 1e-9):
        x = LEFT + at * scale
        parts.append(f'<path class="tick" d="M{x:.1f} {y}v5"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 19}" text-anchor="middle">{_time(at, unit)}</text>')
        at += step
    return "".join(parts)


def _step(until: float) -> float:
    """A round step that makes about ten ticks."""
    power = 10.0 ** floor(log10(until / 10))
    return next(power * n for n in (1, 2, 5, 10) if power * n * 10 >= until)


def _time(value: float, unit: str) -> str:
    return f"{value * 1e3:.4g} ms" if unit == "s" else f"{value:.4g}{unit and ' ' + unit}"
