"""The folder of a sweep: which sweep it belongs to, who runs it now, and one folder for each job.

It is: what makes a sweep that was stopped go on where it was: a job with a record is not run again. It is not: the
contents of a record (`record.py`).

    outputs/sweeps/NAME/
        sweep.json                          which sweep this is
        jobs/tp2_dp4-1f2e3d4c5b6a/
            config.yaml  log.txt            what was run, what the ranks printed
            record.json                     what came of it; there once the job has ended
        results.html  results.csv  *.png    made from the records
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from parallax.plugins.sweep.filter import Point

RECORD = "record.json"


class SweepFolder:
    """One sweep's folder, locked while this object lives; the lock ends with the process, however it ends.

    Args:
        path: the folder; made when missing.
        identity: what makes this sweep another than others: script and arguments.

    Raises:
        ValueError: another sweep's folder, or the same sweep is running now.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path.absolute()
        (self.path / "jobs").mkdir(parents=True, exist_ok=True)
        self._lock = self._take()
        file = self.path / "sweep.json"
        if not file.exists():
            write_json(file, identity)
            return
        there = json.loads(file.read_text())
        if there != dict(identity):
            self._lock.close()
            raise ValueError(
                f"{self.path} holds another sweep ({_describe(there)}), this one is {_describe(identity)}: give each "
                f"its own folder with hydra.sweep.dir=..., or repeat the other's command to go on with it"
            )

    def close(self) -> None:
        """Give the folder free."""
        self._lock.close()

    def _take(self) -> TextIO:
        lock = (self.path / ".lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            who = lock.read().strip() or "another process"
            lock.close()
            raise ValueError(
                f"the sweep in {self.path} is being run by {who}: wait for it, or give this one its own folder with "
                f"hydra.sweep.dir=..."
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()}")
        lock.flush()
        return lock

    def job(self, point: Point) -> Path:
        """The folder of this job; the same whenever the sweep is started."""
        words = re.sub(r"[^A-Za-z0-9.]+", "_", point.words).strip("_")[:60]
        return self.path / "jobs" / f"{words}-{point.digest}"


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record in a job's folder; None while there is none."""
    try:
        found = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        return None
    assert isinstance(found, dict)
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that is there whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1, default=str) + "\n")
    os.replace(part, path)


def _describe(identity: Mapping[str, Any]) -> str:
    return " ".join([str(identity.get("script", "")), *identity.get("arguments", [])]).strip() or "unknown"
