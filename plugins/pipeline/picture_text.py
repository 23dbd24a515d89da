"""A schedule in the terminal: one line per rank, time from left to right.

It is: a rich text that fits a width and can be read without colour. It is not: the numbers (`gantt.py`).

With colour, the background says what runs (see `COLOURS`) and the text which micro-batch. Without, each block starts
with the letter of what runs, small for a rank's second, third, ... stage. Dots are waiting.
"""

from __future__ import annotations

from rich.style import Style
from rich.text import Text

from parallax.plugins.pipeline.actions import KINDS, Action, Kind
from parallax.plugins.pipeline.gantt import Gantt

COLOURS: dict[Kind, tuple[str, str]] = {
    "F": ("#3f7fd6", "#a9c9f5"),
    "B": ("#2e9e74", "#a5dfc8"),
    "I": ("#1f9aa8", "#a3dfe6"),
    "W": ("#dd8a2b", "#f5d2a4"),
}
"""Kind -> its colour on a rank's first stage and on its later ones."""
NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
WAITING = "·"
WIDEST = 4
"""Columns of the shortest action, at most: more would only stretch the picture."""


def chart(gantt: Gantt, width: int, *, colour: bool = True) -> Text:
    """The picture, `width` columns at most (a label needs 9 of them)."""
    label = len(f"rank {len(gantt.lists) - 1}") + 2
    columns = _columns(gantt, max(width - label, 20))
    text = Text(no_wrap=True, overflow="crop")
    for rank in range(len(gantt.lists)):
        text.append(f"rank {rank}".ljust(label))
        text.append_text(_line(gantt, rank, columns, colour=colour))
        text.append("\n")
    return text


def legend(gantt: Gantt, *, colour: bool = True) -> Text:
    """What the colours or letters mean; only those that occur."""
    text = Text()
    kinds = {action.kind for actions in gantt.lists for action in actions}
    several = len(gantt.placement) > len(gantt.lists)
    for kind in KINDS:
        if kind in kinds:
            for later in range(2 if several else 1):
                mark = f" {kind} " if colour or not later else f" {kind.lower()} "
                text.append(mark, _style(kind, later) if colour else None)
            text.append(f" {NAMES[kind]}   ")
    text.append(f"{WAITING} waiting")
    if several:
        text.append("   light: a rank's later stages" if colour else "   small letter: a rank's later stages")
    return text


def _columns(gantt: Gantt, most: int) -> int:
    """As many as fit: where all fit, a whole number for the shortest action, so that equal times look equal."""
    shortest = min(
        end - start
        for starts, ends in zip(gantt.starts, gantt.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    )
    each = min(int(most * shortest / gantt.makespan), WIDEST)
    return round(gantt.makespan / shortest * each) if each else most


def _line(gantt: Gantt, rank: int, columns: int, *, colour: bool) -> Text:
    scale = columns / gantt.makespan
    text, at = Text(), 0
    for action, start, end in zip(gantt.lists[rank], gantt.starts[rank], gantt.ends[rank], strict=True):
        lo, hi = round((start - gantt.begin) * scale), round((end - gantt.begin) * scale)
        text.append(WAITING * (lo - at), "dim" if colour else None)
        later = min(gantt.positions[action.stage], 1)
        if colour:
            text.append(_centred(action, hi - lo), _style(action.kind, later))
        else:
            text.append(_marked(action, hi - lo, later))
        at = hi
    text.append(WAITING * (columns - at), "dim" if colour else None)
    return text


def _style(kind: Kind, later: int) -> Style:
    return Style(color="#10151c" if later else "#ffffff", bgcolor=COLOURS[kind][later], bold=not later)


def _centred(action: Action, width: int) -> str:
    name = str(action.microbatch)
    return (name if len(name) <= width else "").center(width)


def _marked(action: Action, width: int, later: int) -> str:
    letter = action.kind.lower() if later else action.kind
    name = f"{letter}{action.microbatch}"
    return (name if len(name) <= width else letter).ljust(width, "-")[:width]
