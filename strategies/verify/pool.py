"""Starts the processes of a verification on this machine and brings back what each returned.

It is: a fork server with the heavy imports done, one process a rank, a time limit, and the first error of any rank.
It is not: a launcher for training.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed", "lightning.pytorch", "parallax", "parallax.strategies.verify.runs"]


class RankFailed(RuntimeError):
    """A rank raised, ended or was late; `user`: it was a refusal (a ValueError), whose text is for the user."""

    def __init__(self, text: str, user: bool) -> None:
        super().__init__(text)
        self.user = user


class Pool:
    """Runs module-level functions `fn(rank, world, *args)` on processes of this machine.

    Args:
        timeout: seconds for one call of `run`.
        imports: further modules that the processes will need: imported once, in the fork server.
    """

    def __init__(self, timeout: float = 600.0, imports: Sequence[str] = ()) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, *imports])
        self._timeout = timeout

    def run(self, world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What `fn` returned on each rank.

        Raises:
            RankFailed: the first error, or which ranks were not done in time.
        """
        with tempfile.TemporaryDirectory() as folder:
            pipes, processes = {}, []
            work = pickle.dumps((fn, args))  # as bytes: tensors among arguments would each be a file held open
            for rank in range(world):
                here, there = self._context.Pipe(duplex=False)
                process = self._context.Process(
                    target=_child,
                    args=(there, rank, world, str(Path(folder) / "store"), self._timeout, work),
                    daemon=True,
                )
                process.start()
                there.close()
                pipes[here] = rank
                processes.append(process)
            try:
                return self._collect(pipes, world)
            finally:
                for process in processes:
                    process.terminate()
                    process.join(5)
                    if process.is_alive():
                        process.kill()

    def _collect(self, pipes: dict[Any, int], world: int) -> list[Any]:
        results: dict[int, Any] = {}
        end = time.monotonic() + self._timeout
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                late = f"rank(s) {sorted(pipes.values())} of {world} were not done after {self._timeout:.0f} s"
                raise RankFailed(late, user=False)
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    raise RankFailed(f"rank {rank} of {world} ended without a word", user=False) from None
                if not ok:
                    text, user = value
                    raise RankFailed(text if user else f"rank {rank} of {world} raised {text}", user)
                results[rank] = value
        return [results[rank] for rank in range(world)]


def _child(pipe: Any, rank: int, world: int, store: str, timeout: float, work: bytes) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)  # as many processes as ranks on one machine
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)})  # DeepSpeed reads them
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    try:
        if world > 1:
            limit = timedelta(seconds=timeout)
            dist.init_process_group("gloo", store=FileStore(store, world), rank=rank, world_size=world, timeout=limit)
        _silence()
        fn, args = pickle.loads(work)
        value = fn(rank, world, *args)
        pipe.send_bytes(pickle.dumps((True, value)))  # not send(): it would share tensors with a process that ends
    except BaseException as error:
        user = isinstance(error, ValueError)
        trace = "" if user else f"{type(error).__name__}: {error}\n" + "".join(traceback.format_exception(error))
        pipe.send_bytes(pickle.dumps((False, (trace or str(error), user))))
    finally:
        pipe.close()
        os._exit(0)


def _silence() -> None:
    """What the runs print and warn of is not the verdict; their errors come back as exceptions."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
