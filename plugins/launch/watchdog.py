"""The process above mpirun: shows what the ranks print, and ends the job when mpirun would not.

mpirun alone waits for ever for a stopped rank, for a node whose cable is out, and for ranks that wait for a dead one.
It is: one loop that reads mpirun's output, and the order to end: SIGTERM to mpirun's process group, SIGKILL `KILL_WAIT`
seconds later; ranks die with it (`guard.py`). It is not: the finder of the culprit (`ranklog.py`), nor a detector of
ranks that run but make no progress: a collective that nobody completes ends by the time limit of its process group.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, TextIO

from parallax.plugins.launch.guard import die_with_parent
from parallax.plugins.launch.ranklog import Failure, FailureLog, Line, LineReader

FAIL_WAIT = 4.0
"""Seconds that mpirun gets to end the job by itself after a rank has failed."""
KILL_WAIT = 3.0
"""Seconds between SIGTERM and SIGKILL."""
START_WAIT = 60.0
"""Seconds beyond the limit in which a rank must show its first sign of life."""
DRAIN = 1.0
"""Seconds to read on after mpirun's end: somebody may hold the pipe open."""
REDRAW_WAIT = 10.0
"""Seconds between two states of a progress bar where the output is no terminal."""
TIMED_OUT = 124
"""Exit status after the time limit, as of timeout(1)."""


@dataclass(frozen=True)
class Limits:
    """When to give up.

    Attributes:
        timeout: seconds for the whole job.
        hang: seconds a rank may go without a sign of life.
    """

    timeout: float | None = None
    hang: float | None = None

    @property
    def beat(self) -> float | None:
        """Seconds between signs of life."""
        return None if self.hang is None else min(5.0, self.hang / 4)


@dataclass
class _Job:
    """A running mpirun.

    Attributes:
        process: it.
        ranks: how many it starts.
        limits: when to give up.
        log: failures seen.
        seen: last sign of life of each rank; of the start, `START_WAIT` ahead, for one that has shown none.
        stopped: ranks whose last sign was that they are stopped.
        ending: why it is being ended: a sentence; None while it is not.
        next_signal: what to send when, `time.monotonic()`.
        killed: SIGKILL was sent.
    """

    process: subprocess.Popen[bytes]
    ranks: int
    limits: Limits
    started: float = field(default_factory=time.monotonic)
    log: FailureLog = field(default_factory=FailureLog)
    seen: dict[int, float] = field(default_factory=dict)
    stopped: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    ending: str | None = None
    next_signal: float | None = None
    told: bool = False
    killed: bool = False
    code: int | None = None

    def see(self, line: Line, now: float, on_stderr: bool) -> None:
        """Take one line in."""
        if line.rank is not None:
            self.hosts[line.rank] = line.host
            if line.kind == "stopped":
                self.stopped[line.rank] = line.host
            else:
                self.seen[line.rank] = now
                self.stopped.pop(line.rank, None)
        self.log.see(line, now, on_stderr)

    def end(self, why: str, code: int, wait: float = 0.0) -> None:
        """Order the end, `wait` seconds from now; the first order counts."""
        if self.ending is None:
            self.ending, self.code, self.next_signal = why, code, time.monotonic() + wait

    def tick(self, now: float) -> None:
        """Check the limits, and send what is due."""
        if self.ending is None:
            self._check(now)
        if self.next_signal is None or now < self.next_signal:
            return
        number = signal.SIGKILL if self.told else signal.SIGTERM
        self.killed = self.told
        self.next_signal = None if self.told else now + KILL_WAIT
        self.told = True
        self._signal(number)

    def sweep(self) -> None:
        """End what mpirun has left of its process group."""
        self._signal(signal.SIGKILL)

    def _check(self, now: float) -> None:
        if self.log.any:
            self.end("a rank has failed", 1, FAIL_WAIT)
        if self.limits.timeout is not None and now - self.started > self.limits.timeout:
            self.end(f"the time limit of {self.limits.timeout:g} s is over", TIMED_OUT)
        if self.limits.hang is None:
            return
        for rank in range(self.ranks):
            last = self.seen.get(rank, self.started + START_WAIT)
            if now - last > self.limits.hang:
                why = "it is stopped" if rank in self.stopped else "hung, or its node is lost"
                reason = f"no sign of life for {self.limits.hang:g} s: {why}"
                host = self.hosts.get(rank, "an unknown host")
                self.log.add(Failure(rank, host, last, time.strftime("%H:%M:%S"), reason))
                self.end(f"rank {rank} on {host} gave {reason}", 1)
                return

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def supervise(
    command: Sequence[str],
    ranks: int,
    limits: Limits | None = None,
    environ: Mapping[str, str] | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Run mpirun, whose ranks run under `guard.py`, to its end. Call it in the main thread.

    Args:
        command: the whole line.
        ranks: how many it starts.
        limits: when to give up.
        environ: of mpirun.
        out, err: where the ranks' output goes; default: this process's.

    Returns:
        0; or mpirun's exit status; 124 after the time limit; 128 + number when this process got a signal to end; 1
        when a rank failed and mpirun did not tell.
    """
    out, err = out or sys.stdout, err or sys.stderr
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        start_new_session=True,  # a group of its own: this process survives what ends the job
        preexec_fn=_die_with_us,
    )
    assert process.stdout is not None and process.stderr is not None
    job = _Job(process, ranks, limits or Limits())
    try:
        with _signals(job):
            _read(job, {process.stdout: _Screen(out, job, False), process.stderr: _Screen(err, job, True)})
    finally:
        job.sweep()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    return _verdict(job, process.returncode, err)


class _Screen:
    """Shows one of mpirun's streams."""

    def __init__(self, target: TextIO, job: _Job, on_stderr: bool) -> None:
        self._target, self._job, self._on_stderr = target, job, on_stderr
        self._reader = LineReader()
        self._terminal = target.isatty()
        self._drawn: dict[int | None, float] = {}

    def feed(self, data: bytes) -> None:
        self._show(self._reader.feed(data))

    def close(self) -> None:
        self._show(self._reader.close())

    def _show(self, lines: Iterator[Line]) -> None:
        now = time.monotonic()
        for line in lines:
            self._job.see(line, now, self._on_stderr)
            if line.kind in ("alive", "stopped"):
                continue
            if not line.redrawn:
                self._target.write(line.labelled + ("\x1b[K\n" if self._terminal else "\n"))
            elif self._terminal:
                self._target.write(line.labelled + "\x1b[K\r")
            elif now - self._drawn.get(line.rank, self._job.started) > REDRAW_WAIT:
                self._drawn[line.rank] = now
                self._target.write(line.labelled + "\n")
        self._target.flush()


def _read(job: _Job, screens: Mapping[IO[bytes], _Screen]) -> None:
    """Until mpirun has ended and its output is read."""
    last_read = float("inf")
    with selectors.DefaultSelector() as selector:
        for stream, screen in screens.items():
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, screen)
        while selector.get_map() or job.process.poll() is None:
            if job.process.poll() is not None:
                last_read = min(last_read, time.monotonic() + DRAIN)
                if time.monotonic() > last_read:
                    break
            for key, _ in selector.select(0.1) if selector.get_map() else _pause():
                data = os.read(key.fd, 65536)
                if data:
                    key.data.feed(data)
                else:
                    selector.unregister(key.fileobj)
            job.tick(time.monotonic())
    for screen in screens.values():
        screen.close()


def _pause() -> list[tuple[selectors.SelectorKey, int]]:
    time.sleep(0.05)
    return []


def _verdict(job: _Job, code: int, err: TextIO) -> int:
    """Say why the job ended, the first failure last, where people look; the exit status."""
    first = job.log.first()
    if first is not None or job.ending is not None or code:
        words = ["\nparallax launch: the job has failed"]
        if job.ending is not None and (first is None or job.told):
            words[0] += f": {job.ending}; it was ended{' by SIGKILL' if job.killed else ''}"
        elif first is None:
            words[0] += f": mpirun ended with status {code}, and no rank told why"
        if first is not None:
            words.append(f"first error: {first.describe()}")
            words.extend(f"    {line}".rstrip() for line in first.lines)
        print("\n".join(words), file=err, flush=True)
    if job.told and job.code is not None:
        return job.code
    if code:
        return 128 - code if code < 0 else code
    return 1 if first is not None else 0


@contextmanager
def _signals(job: _Job) -> Iterator[None]:
    """A signal to this process ends the job in order."""

    def handle(number: int, frame: FrameType | None) -> None:
        job.end(f"this process got {signal.Signals(number).name}", 128 + number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_us() -> None:
    die_with_parent(signal.SIGTERM)
