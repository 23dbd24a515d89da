"""Runs the program of one rank: a name before every line it prints, its end reported, and no process left behind.

It is: the program that mpirun starts on every host for `parallax launch`, by its path: `python guard.py [--beat S] --
program arguments`. It needs nothing but the standard library, so it is there in 20 ms and also names what goes wrong
while the program imports. It is not: the judge of what is read from it (`ranklog.py`, `watchdog.py`).

On its output, where R is the launcher's rank (also where Parallax gives the rank another number) and H the host:
- `[rank R H] text`: a line of the program; of a line that is redrawn (progress bars) at most two states a second, each
  ended by a carriage return;
- `[rank R H ended] with status 3 at 12:00:01`: it failed, on standard error; not after SIGTERM, when others caused it;
- `[rank R H alive]`: with --beat, every S seconds unless the program is stopped.

The program dies with its guard, and the guard with mpirun or its daemon (Linux), however those end.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK")
"""Variables of Open MPI, of MPICH and Intel MPI, of PMIx alone, and of torchrun; as in `detect.py`, not imported from
there."""
REDRAW_WAIT = 0.5
"""Seconds between two states of a redrawn line, and after which a line without an end is shown."""
DRAIN = 1.0
"""Seconds to read on after the program's end: its own children may hold the pipe open."""
TERM_WAIT = 3.0
"""Seconds between SIGTERM, when passed on to the program, and SIGKILL."""
LONGEST = 3000
"""Bytes of one line; longer ones are cut, so that mpirun hands each on in one piece."""
_END = re.compile(rb"(\r\n|\n|\r)")
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux."""


class Labeller:
    """Turns what one stream of the program delivers into labelled lines on a descriptor.

    Args:
        label: put before every line.
        descriptor: written to, one line at a time.
    """

    def __init__(self, label: str, descriptor: int) -> None:
        self._label = label.encode()
        self._descriptor = descriptor
        self._rest = b""
        self._state = b""
        self._fed = self._drawn = 0.0

    def feed(self, data: bytes) -> None:
        """Take what was read."""
        data, keep = self._rest + data, b""
        if data.endswith(b"\r"):
            data, keep = data[:-1], b"\r"  # perhaps the first half of a line's end
        *parts, rest = _END.split(data)
        for text, end in zip(parts[::2], parts[1::2], strict=True):
            if end == b"\r":
                self._redraw(text)
            else:
                self._write(text, b"\n")
        while len(rest) > LONGEST:
            self._write(rest[:LONGEST], b"\n")
            rest = rest[LONGEST:]
        self._rest = rest + keep
        self._fed = time.monotonic()

    def tick(self) -> None:
        """Show a line that has waited for its end."""
        if self._rest and time.monotonic() - self._fed > REDRAW_WAIT:
            self._redraw(self._rest.rstrip(b"\r"))

    def close(self) -> None:
        """The stream has ended."""
        last = self._rest.rstrip(b"\r")
        if last:
            self._write(last, b"\n")
        self._rest = b""

    def _redraw(self, state: bytes) -> None:
        now = time.monotonic()
        if state.strip() and state != self._state and now - self._drawn >= REDRAW_WAIT:
            self._write(state, b"\r")
            self._state, self._drawn = state, now

    def _write(self, line: bytes, end: bytes) -> None:
        for start in range(0, max(1, len(line)), LONGEST):
            write_all(self._descriptor, self._label + line[start : start + LONGEST] + end)


def write_all(descriptor: int, data: bytes) -> None:
    """Write; a reader that has gone is no reason to stop the program."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass


class Guard:
    """One run of a program.

    Args:
        program: program and arguments.
        rank: the launcher's.
        host: of this process.
        beat: seconds between signs of life; None for none.
    """

    def __init__(self, program: Sequence[str], rank: int, host: str, beat: float | None) -> None:
        self._program = list(program)
        self._name = f"rank {rank} {host}"
        self._beat = beat
        self._status: int | None = None
        self._stopped = False
        self._told_to_end: float | None = None

    def run(self) -> int:
        """Run it; the exit status as `os.wait` gives it."""
        wake, waker = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end_program)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)  # mpirun signals the whole process group: the program has it already
        die_with_parent(signal.SIGTERM)
        outputs = [os.pipe(), os.pipe()]
        self._pid = os.fork()
        if self._pid == 0:
            _become(self._program, [write for _, write in outputs])
        for _, write in outputs:
            os.close(write)
        label = f"[{self._name}] "
        streams = {read: Labeller(label, target) for (read, _), target in zip(outputs, (1, 2), strict=True)}
        self._forward(streams, wake)
        for stream in streams.values():
            stream.close()
        assert self._status is not None
        if self._status and self._told_to_end is None:
            self._say(2, f"ended] {describe(self._status)} at {time.strftime('%H:%M:%S')}")
        return self._status

    def _forward(self, streams: Mapping[int, Labeller], wake: int) -> None:
        """Until the program has ended and its output is read."""
        open_ = set(streams)
        next_beat, last_read = 0.0, float("inf")
        while open_ or self._status is None:
            ready = select.select([*open_, wake], [], [], 0.25)[0]
            for descriptor in ready:
                data = os.read(descriptor, 65536)
                if descriptor == wake:
                    continue
                if data:
                    streams[descriptor].feed(data)
                else:
                    open_.discard(descriptor)
            for stream in streams.values():
                stream.tick()
            now = time.monotonic()
            self._watch(now)
            if self._status is not None:
                last_read = min(last_read, now + DRAIN)
                if now > last_read:
                    return
            elif self._beat is not None and now >= next_beat:
                self._say(1, "stopped]" if self._stopped else "alive]")
                next_beat = now + self._beat

    def _watch(self, now: float) -> None:
        """Note whether the program was stopped, continued or ended."""
        while self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                self._stopped = True
            elif os.WIFCONTINUED(status):
                self._stopped = False
            else:
                self._status = status
        if self._status is None and self._told_to_end is not None and now > self._told_to_end + TERM_WAIT:
            os.kill(self._pid, signal.SIGKILL)

    def _end_program(self, number: int, frame: object) -> None:
        if self._status is None:
            self._told_to_end = self._told_to_end or time.monotonic()
            os.kill(self._pid, number)

    def _say(self, descriptor: int, text: str) -> None:
        write_all(descriptor, f"[{self._name} {text}\n".encode())


def die_with_parent(number: int) -> None:
    """Have the kernel send this process signal `number` when its parent ends. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(number))


def describe(status: int) -> str:
    """How a process ended, from its status: "with status 3", "by signal 9 (SIGKILL)"."""
    if not os.WIFSIGNALED(status):
        return f"with status {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    try:
        return f"by signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"by signal {number}"


def _become(program: Sequence[str], outputs: Sequence[int]) -> None:
    """Turn this (forked) process into the program."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with_parent(signal.SIGKILL)
        for target, descriptor in enumerate(outputs, 1):
            os.dup2(descriptor, target)
        os.execvp(program[0], list(program))
    except OSError as error:
        write_all(2, f"{program[0]} cannot be started: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _end_like(status: int) -> int:
    """End as the program did, so that mpirun sees it; returns the exit code if it ended by itself."""
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv` is "[--beat S] -- program arguments"."""
    options, program = list(argv[: argv.index("--")]), list(argv[argv.index("--") + 1 :])
    beat = float(options[options.index("--beat") + 1]) if "--beat" in options else None
    rank = next((int(environ[name]) for name in RANKS if name in environ), 0)
    return _end_like(Guard(program, rank, socket.gethostname().split(".")[0], beat).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
