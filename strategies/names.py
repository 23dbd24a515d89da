"""One way to say that a name is unknown: what was given, the nearest valid name, and all valid ones.

It is: the wording shared by layouts, plugins, the command line and errors of ranks. It is not: any list of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def nearest_name(given: str, valid: Iterable[str]) -> str | None:
    """The name in `valid` most like `given` (letter case ignored), None when none is at all alike."""
    lowered = {name.lower(): name for name in valid}
    hits = get_close_matches(given.lower(), lowered, n=1, cutoff=0.5)
    return lowered[hits[0]] if hits else None


def unknown_name(kind: str, given: str, valid: Iterable[str], hint: str | None = None) -> ValueError:
    """The error to raise for an unknown `kind` of name ("schedule", "layout key").

    Args:
        kind: what the name should have been.
        given: what the user wrote.
        valid: all names that would have been right.
        hint: replaces the nearest name, when the caller knows better.
    """
    names = list(dict.fromkeys(valid))
    near = hint or nearest_name(given, names)
    guess = f"; did you mean {near!r}?" if near else "."
    return ValueError(f"unknown {kind} {given!r}{guess} Valid: {', '.join(names) or 'none'}.")


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 2" or "ranks 0, 3"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
