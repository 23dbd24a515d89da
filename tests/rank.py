"""What happens inside one rank of `run_ranks`: set up, call, check what was left behind, report.

It is: the body of a child process. It is not imported by tests directly.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.guards import problems

GROUP_SHARE = 0.7
"""A collective gives up after this share of the hard limit, so that its error is seen before the kill."""
ORPHAN_GRACE = 15.0
"""Seconds after the hard limit at which a rank ends itself, should the test process be gone."""


@dataclass(frozen=True)
class Job:
    """What one rank is told. `call` is the pickled function and its arguments; `backend` None: no process group."""

    rank: int
    world: int
    call: bytes
    timeout: float
    backend: str | None
    folder: str
    env: dict[str, str]
    allow_env: frozenset[str]

    @property
    def stack_file(self) -> str:
        return f"{self.folder}/stack-{self.rank}.txt"

    @property
    def output_file(self) -> str:
        return f"{self.folder}/output-{self.rank}.txt"


@dataclass(frozen=True)
class Outcome:
    """What one rank reports: the value, or (exception type, message, traceback)."""

    ok: bool
    value: Any
    error: tuple[str, str, str] | None


class Leak(AssertionError):
    """The function left something behind that it should have cleaned up."""


def child(job: Job, pipe: Connection) -> None:
    """Entry point of the process."""
    os.setsid()  # so that killing the rank kills what it started
    faulthandler.dump_traceback_later(job.timeout + ORPHAN_GRACE, exit=True)
    with open(job.stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        _redirect(job.output_file)
        outcome = _call(job)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pipe.send_bytes(_pack(outcome))
            if outcome.ok:
                pipe.recv_bytes()  # a peer may still be reading from our sockets
                _close_group()
        except (EOFError, OSError):
            pass  # the test process is gone
    os._exit(0)  # no exit handlers: after a failure they may wait for peers


def _redirect(path: str) -> None:
    """Send file descriptors 1 and 2, and so everything printed from C too, to a file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _call(job: Job) -> Outcome:
    try:
        import lightning_utilities.core.rank_zero as rank_zero
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        rank_zero.rank_zero_only.rank = job.rank  # read from the environment at import, which was before the fork
        os.environ.update(job.env)
        group = _make_group(job)
        before = dict(os.environ)
        fn, args = pickle.loads(job.call)
        value = fn(job.rank, job.world, *args)
        if left := problems(before, group=group, allow=job.allow_env):
            raise Leak(f"{fn.__name__} left something behind on rank {job.rank}: " + "\n".join(left))
        return Outcome(True, value, None)
    except BaseException as error:
        return Outcome(False, None, (type(error).__name__, str(error), traceback.format_exc()))


def _make_group(job: Job) -> Any:
    if job.backend is None:
        return None
    import torch.distributed as dist

    dist.init_process_group(
        job.backend,
        store=dist.FileStore(str(Path(job.folder) / "store"), job.world),
        rank=job.rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout * GROUP_SHARE),
    )
    return dist.group.WORLD


def _close_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _pack(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        text = f"the result cannot be pickled: {error}"
        return pickle.dumps(Outcome(False, None, (type(error).__name__, text, traceback.format_exc())))
