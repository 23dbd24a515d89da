"""What happens when a rank fails: user mistakes shown once, crashes end the whole job at once.

It is: the mark of an error that all ranks share (`mark_shared`, `same_on_every_rank`), and an excepthook that
prints such an error on rank 0 only, and that calls MPI_Abort for any other error, because under mpirun a failed
rank otherwise waits for ever in MPI_Finalize. The same for a script that one rank leaves by `sys.exit`
(`leave_together`). It is not: a watchdog for lost nodes (`watchdog.py`).
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from parallax.plugins.launch.detect import launched_rank
from parallax.plugins.launch.rank_zero import printing_rank
from parallax.strategies.comm import CommError

_SHARED = "_parallax_shared"
QUIET_EXIT_WAIT = 3.0
"""Seconds a rank with a shared error waits for rank 0 to print it: launchers kill all when the first one ends."""
BLAME_WAIT = 3.0
"""Seconds a rank that only lost contact with a peer waits before it speaks, so that the culprit speaks first."""
EXIT_WAIT = 5.0
"""Seconds a rank that left by `sys.exit(1)` waits for the others to do the same before it ends the job."""
GATHER_WAIT = 10.0
"""Seconds the ranks wait for each other, under MPI, before they conclude that an error is not shared after all."""
FORWARD_WAIT = 0.2
"""Seconds for mpirun to read the traceback before MPI_Abort."""
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout")

E = TypeVar("E", bound=BaseException)
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def mark_shared(error: E) -> E:
    """Mark an error that every rank raises with the same text, so that it is printed once. Returns it."""
    setattr(error, _SHARED, True)
    return error


def is_shared(error: BaseException) -> bool:
    return getattr(error, _SHARED, False) is True


@contextmanager
def same_on_every_rank() -> Iterator[None]:
    """A ValueError raised inside depends on nothing that differs between ranks: print it once.

    For checks made without communication, such as a layout that does not divide the number of ranks.
    """
    try:
        yield
    except ValueError as error:
        raise mark_shared(error)  # noqa: B904 - the same object, no second traceback


def install_excepthook() -> None:
    """Install the excepthook, once. Without a launcher it does what the hook before it did."""
    if getattr(sys.excepthook, _SHARED, False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _handle(before, kind, error, trace)

    setattr(hook, _SHARED, True)
    sys.excepthook = hook


@contextmanager
def leave_together() -> Iterator[None]:
    """SystemExit with a failure inside ends the job, under MPI, unless all ranks leave.

    The excepthook does not see it. Ranks that leave together end in order, each with its own status.
    """
    try:
        yield
    except SystemExit as error:
        comm = _mpi_world()
        if comm is not None and error.code not in (None, 0) and not _meet(comm, EXIT_WAIT):
            status = error.code if isinstance(error.code, int) else 1
            place = launched_rank() or (0, None)
            _say(f"\n{_title(place)}\nSystemExit: {error.code}")
            time.sleep(FORWARD_WAIT)
            comm.Abort(status & 255 or 1)
        raise


def _handle(before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    place = launched_rank()
    if place is None or place[1] == 1 or isinstance(error, KeyboardInterrupt):
        before(kind, error, trace)
        return
    comm = _mpi_world()
    if is_shared(error):
        rank = printing_rank()
        if rank == 0:
            _show(before, kind, error, trace)
        if comm is None:
            time.sleep(0 if rank == 0 else QUIET_EXIT_WAIT)
        elif not _meet(comm, GATHER_WAIT):
            comm.Abort(1)
        return
    if lost_peer(error):
        time.sleep(BLAME_WAIT)
    _show(before, kind, error, trace, f"\n{_title(place)}")
    if comm is not None:
        time.sleep(FORWARD_WAIT)
        comm.Abort(1)


def _title(place: tuple[int, int | None]) -> str:
    """Which rank failed; `parallax launch` reads it (`ranklog.py`)."""
    rank, (launched, size) = printing_rank(), place  # its rank now: the launcher's may have been reordered
    of = "" if size is None else f" of {size}"
    also = "" if rank == launched else f" (started as rank {launched})"
    return f"rank {rank}{of}{also} on {socket.gethostname()} failed at {time.strftime('%H:%M:%S')}:"


def _say(text: str) -> None:
    print(text, file=sys.__stderr__ or sys.stderr, flush=True)


def _show(
    before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None, title: str = ""
) -> None:
    """Print now. torch wraps the excepthook and holds back what it prints until it returns; Abort never returns."""
    held = sys.stderr
    sys.stderr = sys.__stderr__ or held
    try:
        if title:
            print(title, file=sys.stderr)
        before(kind, error, trace)
        sys.stderr.flush()
    finally:
        sys.stderr = held


def _mpi_world() -> Any:
    """MPI.COMM_WORLD if this process has MPI running, None otherwise. Starts nothing."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module.COMM_WORLD if module.COMM_WORLD.size > 1 else None


def _meet(comm: Any, seconds: float) -> bool:
    """Whether all ranks come here in this time; then MPI_Finalize at exit does not wait in vain."""
    request = comm.Ibarrier()
    deadline = time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def lost_peer(error: BaseException | None) -> bool:
    """Whether the error only says that another rank has gone."""
    while error is not None:
        if isinstance(error, CommError) or any(sign in str(error) for sign in _LOST_PEER):
            return True
        error = error.__cause__ or error.__context__
    return False
