"""Run one function on n ranks, each a process of its own, and get back what every rank returned.

It is: the one way tests in `tests/ranks` and `tests/parity` start processes. A fork server has torch, deepspeed,
lightning and transformers loaded, so a rank starts in a fraction of a second; a hard time limit ends
everything and says where each rank stood. It is not: a launcher users see, and it mocks nothing: the
ranks talk over real gloo.

A rank function is a module-level function `fn(rank, world, *args)`. Arguments and results are pickled. Variables
set in the test process do not reach the ranks: pass `env`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.guards import TEST_ENV, restore_variables
from tests.rank import Job, Outcome, child

PRELOAD = [
    "torch",
    "torch.distributed",
    "deepspeed",
    "lightning.pytorch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "omegaconf",
    "pytest",
    "psutil",
]
AFTER_FIRST_FAILURE = 5.0
"""Seconds the other ranks get to notice that one has failed, so that their errors are seen too."""
STACK_WAIT = 1.0
TAIL = 4000


class RankError(AssertionError):
    """One or more ranks failed. The message starts with the first to fail; `errors` has all of them.

    Attributes:
        errors: rank -> (exception type name, message, traceback), only ranks that reported an exception.
    """

    def __init__(self, message: str, errors: dict[int, tuple[str, str, str]]) -> None:
        super().__init__(message)
        self.errors = errors


class RankTimeout(RankError):
    """The ranks were not done in time; the message has the stack of every rank that was still alive."""


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
    init: bool = True,
    env: Mapping[str, str] | None = None,
    allow_env: tuple[str, ...] = (),
    outputs: list[str] | None = None,
) -> list[Any]:
    """Call `fn(rank, n, *args)` on `n` ranks and return the results by rank.

    Args:
        n: number of ranks.
        fn: module-level function of an importable test module.
        args: picklable, the same on every rank.
        timeout: seconds until everything is killed. A collective gives up after 70 % of it, with an error.
        backend: of the process group made for the ranks.
        init: make the process group. With False nothing is made and `fn` must leave none behind; the ranks
            see the variables torchrun sets, with a store already listening, so that `init_process_group()`
            or a `Trainer` finds its peers.
        env: environment variables of the ranks, on top of the fork server's. "{rank}" is replaced.
        allow_env: variables that `fn` may leave changed.
        outputs: if given, receives what each rank wrote to stdout and stderr.

    Raises:
        RankError: a rank raised, died, or left a process group, an environment variable or a process behind.
        RankTimeout: time ran out.
    """
    context = _warm()
    call = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = None if init else _agent_store()
        ranks = []
        try:
            for rank in range(n):
                variables = _variables(rank, n, store) if store is not None else {}
                variables |= {k: v.replace("{rank}", str(rank)) for k, v in (env or {}).items()}
                job = Job(rank, n, call, timeout, backend if init else None, folder, variables, frozenset(allow_env))
                ranks.append(_Rank.start(context, job))
            _collect(ranks, timeout)
        finally:
            for r in ranks:
                r.kill()
        texts = [r.output() for r in ranks]
        if outputs is not None:
            outputs[:] = texts
        for rank, text in enumerate(texts):
            if text.strip():
                print(f"--- output of rank {rank} ---\n{text.rstrip()}")
        return _results(ranks, timeout)


_warmed: list[Any] = []


def _warm() -> Any:
    """The fork server's context, with everything imported; the first call takes as long as the imports."""
    if not _warmed:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        before = dict(os.environ)
        try:  # the server keeps the environment it is started with
            os.environ.update(TEST_ENV)
            first = context.Process(target=os.getpid)
            first.start()
        finally:
            restore_variables(before)
        first.join()
        _warmed.append(context)
    return _warmed[0]


def _agent_store() -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _variables(rank: int, n: int, store: Any) -> dict[str, str]:
    """What torchrun would set on one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@dataclass
class _Rank:
    """One rank as the test process sees it."""

    job: Job
    process: BaseProcess
    pipe: Connection
    outcome: Outcome | None = None
    stack: str = ""
    order: float = field(default=float("inf"))  # when it reported

    @classmethod
    def start(cls, context: Any, job: Job) -> _Rank:
        ours, theirs = context.Pipe()
        process = context.Process(target=child, args=(job, theirs), name=f"rank-{job.rank}")
        process.start()
        theirs.close()
        return cls(job, process, ours)

    def receive(self) -> None:
        self.order = time.monotonic()
        try:
            self.outcome = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join(2)
            code = self.process.exitcode
            self.outcome = Outcome(False, None, ("ProcessDied", f"the process ended with exit code {code}", ""))

    def release(self) -> None:
        """Let a rank that has reported leave; before that its peers may still need its sockets."""
        try:
            self.pipe.send_bytes(b"go")
        except OSError:
            pass

    def ask_for_stack(self) -> None:
        if self.process.is_alive():
            self._signal(signal.SIGUSR2)

    def _signal(self, number: int, group: bool = False) -> None:
        try:
            (os.killpg if group else os.kill)(self.process.pid or 0, number)
        except (ProcessLookupError, PermissionError):
            pass

    def kill(self) -> None:
        """End the rank and everything it started (it leads a process group of its own)."""
        if self.process.is_alive():
            self._signal(signal.SIGKILL, group=True)
            self.process.kill()
        self.process.join()
        self.pipe.close()

    def output(self) -> str:
        path = Path(self.job.output_file)
        return path.read_text(errors="replace") if path.exists() else ""


def _collect(ranks: list[_Rank], timeout: float) -> None:
    """Wait until every rank has reported and left, or the time is up."""
    deadline = time.monotonic() + timeout
    waiting = list(ranks)
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready = wait([r.pipe for r in waiting], timeout=left)
        for r in [r for r in waiting if r.pipe in ready]:
            r.receive()
            waiting.remove(r)
            if r.outcome is not None and not r.outcome.ok:
                deadline = min(deadline, time.monotonic() + AFTER_FIRST_FAILURE)
    for r in waiting:
        r.ask_for_stack()
    for r in ranks:
        r.release()
    if not waiting:
        for r in ranks:
            r.process.join(max(1.0, deadline - time.monotonic()))
        waiting = [r for r in ranks if r.process.is_alive()]
        for r in waiting:
            r.ask_for_stack()
    if waiting:
        time.sleep(STACK_WAIT)
        for r in waiting:
            r.stack = Path(r.job.stack_file).read_text() if Path(r.job.stack_file).exists() else "(no stack)"


def _results(ranks: list[_Rank], timeout: float) -> list[Any]:
    failed = sorted((r for r in ranks if r.outcome is not None and not r.outcome.ok), key=lambda r: r.order)
    stuck = [r for r in ranks if r.stack]
    errors = {r.job.rank: r.outcome.error for r in failed if r.outcome is not None and r.outcome.error is not None}
    parts = []
    for r in failed:
        kind, message, trace = errors[r.job.rank]
        shown = trace or f"{r.output()[-TAIL:]}"
        parts.append(f"rank {r.job.rank} of {len(ranks)} failed: {kind}: {message}\n{shown}")
    for r in stuck:
        doing = "reported, but its process did not end" if r.outcome is not None else "was still running"
        parts.append(f"rank {r.job.rank} of {len(ranks)} {doing}; its stack:\n{r.stack}")
    if failed:
        raise RankError("\n".join(parts), errors)
    if stuck:
        raise RankTimeout(f"{len(stuck)} of {len(ranks)} ranks not done after {timeout:g} s\n" + "\n".join(parts), {})
    return [r.outcome.value for r in ranks if r.outcome is not None]
