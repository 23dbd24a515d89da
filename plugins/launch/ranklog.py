"""What the ranks print, read from mpirun's output: whose line it is, and which rank failed first.

It is: the counterpart of `guard.py`: bytes to lines, a line that mpirun tore put together again, and the record of
failures. It is not: the reaction to them (`watchdog.py`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_LABEL = re.compile(r"\[rank (\d+) ([^\s\]]+)(?: (alive|stopped|ended))?\] ?")
_TITLE = re.compile(r"rank \d+(?: of \d+)?.* on \S+ failed at (\d\d:\d\d:\d\d):$")
_TRACE = re.compile(r"Traceback \(most recent call last\):|Fatal Python error: ")
_ENDED = re.compile(r"(.*) at (\d\d:\d\d:\d\d)")
RECENT = 30.0
"""Seconds after which a traceback is not taken for the reason of its rank's end: it was caught."""
KEPT = 200
"""Lines of a failure that are repeated at the end."""


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        rank: the launcher's; None for mpirun's own words.
        host: of the rank.
        kind: "text", "alive", "stopped" or "ended".
        text: without label and end.
        redrawn: it is to be overwritten by what follows.
    """

    rank: int | None
    host: str
    kind: str
    text: str
    redrawn: bool = False

    @property
    def labelled(self) -> str:
        """As shown to people."""
        if self.rank is None:
            return f"[mpirun] {self.text}" if self.text else ""
        return f"[rank {self.rank} {self.host}{'' if self.kind == 'text' else ' ' + self.kind}] {self.text}"


class LineReader:
    """Bytes of one stream to lines.

    mpirun hands output on in pieces of some thousand bytes; a piece may end inside a line and be followed by another
    rank's. The first half waits for the next line without a label.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._torn: deque[str] = deque()

    def feed(self, data: bytes) -> Iterator[Line]:
        """Lines that are complete with `data`."""
        *parts, self._rest = re.split(rb"(\r?\n|\r)", self._rest + data)
        for raw, end in zip(parts[::2], parts[1::2], strict=True):
            yield from self._lines(raw.decode(errors="replace"), end == b"\r")

    def close(self) -> Iterator[Line]:
        """What is left at the end."""
        rest, self._rest = self._rest, b""
        for text in (*self._torn, rest.decode(errors="replace")):
            if text:
                yield _line(text, False)
        self._torn.clear()

    def _lines(self, text: str, redrawn: bool) -> Iterator[Line]:
        starts = [match.start() for match in _LABEL.finditer(text)]
        if not starts and self._torn:
            yield _line(self._torn.popleft() + text, redrawn)
            return
        if starts and starts[0] > 0 and self._torn:
            yield _line(self._torn.popleft() + text[: starts[0]], False)
        elif starts and starts[0] > 0:
            starts.insert(0, 0)
        for start, end in zip(starts, starts[1:], strict=False):
            self._torn.append(text[start:end])
        yield _line(text[starts[-1] :] if starts else text, redrawn)


def _line(text: str, redrawn: bool) -> Line:
    match = _LABEL.match(text)
    if match is None:
        return Line(None, "", "text", text, redrawn)
    return Line(int(match[1]), match[2], match[3] or "text", text[match.end() :], redrawn)


@dataclass
class Failure:
    """Why a rank failed.

    Attributes:
        rank, host: whose.
        since: `time.monotonic()` of its first sign.
        clock: time of day on its host.
        reason: in a few words.
        lines: its traceback, if any.
    """

    rank: int
    host: str
    since: float
    clock: str
    reason: str
    lines: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """ "rank 3 on node2 at 12:00:01: RuntimeError: ..." """
        return f"rank {self.rank} on {self.host}{' at ' + self.clock if self.clock else ''}: {self.reason}"


class FailureLog:
    """Failures of a job, from its lines."""

    def __init__(self) -> None:
        self._traces: dict[int, Failure] = {}
        self._titles: dict[int, Failure] = {}
        self._ends: dict[int, Failure] = {}

    def see(self, line: Line, now: float, on_stderr: bool = True) -> None:
        """Take one line in; `now` is `time.monotonic()`."""
        rank = line.rank
        if rank is None or line.redrawn:
            return
        if line.kind == "ended":
            match = _ENDED.match(line.text)
            words, clock = (match[1], match[2]) if match else (line.text, "")
            self._ends.setdefault(rank, Failure(rank, line.host, now, clock, f"ended {words}"))
        elif line.kind == "text" and on_stderr:
            self._see_text(rank, line, now)

    def add(self, failure: Failure) -> None:
        """Take in a failure that no line tells of."""
        self._ends.setdefault(failure.rank, failure)

    @property
    def any(self) -> bool:
        """Whether some rank has failed for certain."""
        return bool(self._titles or self._ends)

    def first(self) -> Failure | None:
        """The failure whose first sign came first, with its traceback."""
        found = list(self._titles.values())
        for rank, end in self._ends.items():
            trace = self._traces.get(rank)
            if rank in self._titles:
                continue
            if trace is not None and end.since - trace.since < RECENT:
                trace.clock = end.clock
                found.append(trace)
            else:
                found.append(end)
        first = min(found, key=lambda failure: failure.since, default=None)
        if first is not None and first.lines:
            first.reason = _reason(first.lines)
        return first

    def _see_text(self, rank: int, line: Line, now: float) -> None:
        title = _TITLE.match(line.text)
        if title is not None and rank not in self._titles:
            self._titles[rank] = Failure(rank, line.host, now, title[1], "failed")
            return
        open_ = self._titles.get(rank) or self._traces.get(rank)
        if _TRACE.match(line.text) and rank not in self._titles and (open_ is None or now - open_.since > RECENT / 2):
            open_ = self._traces[rank] = Failure(rank, line.host, now, "", "failed")
        if open_ is not None and len(open_.lines) < KEPT:
            open_.lines.append(line.text)


def _reason(lines: Sequence[str]) -> str:
    """The line after the last frame of a traceback; without frames (the interpreter's last words) the first line."""
    pairs = zip(lines, lines[1:], strict=False)
    after = [text for frame, text in pairs if frame[:2] == "  " and text[:1].strip()]
    return after[-1] if after and not lines[0].startswith("Fatal") else lines[0]
