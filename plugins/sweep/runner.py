"""Runs jobs, one after the other or several when they fit, and sees to it that each leaves a record.

It is: the loop over waiting and running jobs. It is not: a job (`job.py`), or the choice of which to run (`filter.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from parallax.plugins.launch.watchdog import Limits
from parallax.plugins.sweep.filter import Point
from parallax.plugins.sweep.folder import RECORD, SweepFolder, read_record, write_json
from parallax.plugins.sweep.job import Job, Program, failed_record, failure
from parallax.plugins.sweep.places import Places
from parallax.plugins.sweep.progress import Progress

POLL = 0.1
"""Seconds between two looks at the running jobs."""


class Runner:
    """Jobs of one sweep.

    Args:
        folder, program, limits: of every job.
        places: how many ranks and jobs run at the same time.
        progress: told of each start and end.
    """

    def __init__(
        self, folder: SweepFolder, program: Program, limits: Limits, places: Places, progress: Progress
    ) -> None:
        self._folder, self._program, self._limits = folder, program, limits
        self._places, self._progress = places, progress

    def run(self, jobs: Sequence[tuple[int, Point]]) -> None:
        """Run (number, point) for each; afterwards each has a record. A failed job does not end the others.

        An exception in this process, Ctrl-C included, ends the running jobs and leaves them without a record.
        """
        waiting, running = list(jobs), list[Job]()
        self._progress.left = len(waiting)
        try:
            while waiting or running:
                self._start(waiting, running)
                for job in [job for job in running if job.poll() is not None]:
                    running.remove(job)
                    self._close(job, len(running))
                time.sleep(POLL)
        finally:
            for job in running:
                job.end()

    def _start(self, waiting: list[tuple[int, Point]], running: list[Job]) -> None:
        while waiting:
            number, point = waiting[0]
            devices = self._places.take(number, point.ranks)
            if devices is None:
                return
            self._progress.started(number, point)
            folder = self._folder.job(point)
            running.append(Job(number, point, folder, self._program, self._limits, devices))
            waiting.pop(0)
            self._progress.left, self._progress.running = len(waiting), len(running)

    def _close(self, job: Job, running: int) -> None:
        job.end()
        self._places.give_back(job.number)
        status = job.poll()
        assert status is not None
        own: dict[str, Any] = {
            "overrides": list(job.point.overrides),
            "digest": job.point.digest,
            "seconds": round(job.seconds, 3),
            "exit_status": status,
        }
        record = read_record(job.folder)
        if record is None or status:
            kind, reason = failure(status, (job.folder / "log.txt").read_text(errors="replace"), self._limits)
            record = failed_record(job.point, kind, reason, own)
        else:
            record |= own
        write_json(job.folder / RECORD, record)
        self._progress.done, self._progress.running = self._progress.done + 1, running
        self._progress.ended(job.number, job.point, record, self._places.most)
