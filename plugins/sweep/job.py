"""One job of a sweep: its command, its process, and why it failed.

It is: the script of the sweep, started again with one point's arguments under mpirun or torchrun, its output in a file,
labelled by rank. It is not: the order of jobs (`runner.py`) or what a good run measured (`record.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from parallax.conf.reading import without_hydra
from parallax.plugins.launch.guard import die_with_parent
from parallax.plugins.launch.hosts import allot, read_hostfile
from parallax.plugins.launch.launch_command import guarded, hint_names
from parallax.plugins.launch.mpirun import find_launcher, mpirun_command, rank_program
from parallax.plugins.launch.watchdog import TIMED_OUT, Limits
from parallax.plugins.sweep.filter import Point

OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|can't allocate memory|MemoryError|Cannot allocate memory")
END_WAIT = 15.0
"""Seconds a job gets to end in order before it is killed."""


@dataclass
class Program:
    """What a sweep runs again for each job.

    Attributes:
        script: "train.py" or "-m", "package.train".
        flags: of Hydra that every job needs too: --config-name and the like.
    """

    script: list[str]
    flags: list[str] = field(default_factory=list)


def job_arguments(program: Program, point: Point, folder: Path) -> list[str]:
    """The script and its arguments for one point; results go to `folder`."""
    where = _quoted(str(folder))
    own = ["hydra.mode=RUN", f"hydra.run.dir={where}"]
    if "output_dir" in point.config:
        own.append(f"output_dir={where}")
    return [*program.script, *program.flags, *point.overrides, *own]


def job_command(program: Program, point: Point, folder: Path, limits: Limits) -> tuple[list[str], dict[str, str]]:
    """The whole line, and the variables it runs under.

    Raises:
        ValueError: the starter is missing, or the hostfile does not serve.
    """
    ranks = guarded(rank_program(job_arguments(program, point, folder), "-u"), limits)
    cluster = OmegaConf.select(point.config, "cluster") or {}
    variables = {**os.environ, "OMP_NUM_THREADS": str(cluster.get("threads", 1))}
    if cluster.get("starter") == "torchrun":
        return torchrun_command(point.ranks, ranks), variables
    hosts = cluster.get("hostfile")
    launcher = find_launcher()
    command = mpirun_command(
        point.ranks,
        ranks,
        None if hosts is None else allot(read_hostfile(str(hosts)), point.ranks),
        launcher=launcher,
        names=hint_names(variables),
    )
    return command, launcher.environ(variables)


def torchrun_command(ranks: int, program: Sequence[str]) -> list[str]:
    """torchrun on this machine, which picks a free port by itself."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1", "--nproc-per-node"]
    return [*run, str(ranks), "--no-python", *program]


class Job:
    """A running job. `poll` tells when it has ended, `end` ends it.

    Args:
        number: in the order of the sweep.
        point, folder, program, limits: as above; the folder is emptied first.
        devices: GPUs it may see; none for all.
    """

    def __init__(
        self, number: int, point: Point, folder: Path, program: Program, limits: Limits, devices: Sequence[str] = ()
    ) -> None:
        self.number, self.point, self.folder, self.limits = number, point, folder, limits
        shutil.rmtree(folder, ignore_errors=True)  # what a stopped sweep has left
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(without_hydra(point.config), resolve=True))
        command, variables = job_command(program, point, folder, limits)
        if devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        watch = [sys.executable, "-m", "parallax.plugins.sweep.watch", "--ranks", str(point.ranks)]
        for flag, seconds in (("--time-limit", limits.timeout), ("--hang-limit", limits.hang)):
            watch += [] if seconds is None else [flag, f"{seconds:g}"]
        with (folder / "log.txt").open("w") as log:
            self._process = subprocess.Popen(
                [*watch, "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
                preexec_fn=_end_with_sweep,
            )
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._started

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End it and all of its ranks."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_WAIT)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def failure(status: int, log: str, limits: Limits) -> tuple[str, str]:
    """(kind, reason) of a job that ended with `status` and printed `log`, without leaving a record.

    Kinds: "oom", "timeout", "killed", "error".
    """
    if status == TIMED_OUT:
        return "timeout", f"it was ended after its time limit of {limits.timeout:g} s"
    first = re.search(r"^first error: (.*)((?:\n    .*)*)", log, re.MULTILINE)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reason = first[1] if first else (lines[-1] if lines else "it printed nothing")
    if OUT_OF_MEMORY.search(first[0] if first else "\n".join(lines[-50:])):
        return "oom", reason
    if "SIGKILL" in reason:
        return "killed", f"{reason}; the system does so when memory runs out"
    if status == 0:
        return "error", f"it left no record: the script's Trainer needs the callback RunRecord ({reason})"
    return "error", reason


def failed_record(point: Point, kind: str, reason: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a job that has none of its own."""
    keys = point.layout.to_dict() if point.layout is not None else {}
    return {"status": kind, "reason": reason, "layout": point.words, "layout_keys": keys, "ranks": point.ranks, **extra}


def _quoted(text: str) -> str:
    """`text` as a value of Hydra's command line."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + "'"


def _end_with_sweep() -> None:
    die_with_parent(signal.SIGTERM)
