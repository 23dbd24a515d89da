"""All ranks end with the same error, even when only some of them have met it.

It is: what stands around set-up, around the first step of each kind, and around later steps once they have failed. It
is not: the excepthook that prints (`plugins/launch/errors.py`), and it costs nothing in a step that goes well after the
first.

Ranks report to the job's store, not to a process group: a group may be in the middle of a collective that will never
be complete, and a rank that waits for such a collective cannot answer. So nobody here waits for longer than `GRACE`
once a rank has failed.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from parallax.plugins.launch.errors import lost_peer, mark_shared
from parallax.strategies.comm import CommError
from parallax.strategies.names import name_ranks

GRACE = 5.0
"""Seconds a rank with a refusal waits for the others to report, before it speaks for itself."""
CRASH_GRACE = 1.0
"""The same for any other error: shorter than ranks that only lost contact stay silent (`BLAME_WAIT`)."""
SLOWEST_POLL = 0.05


def is_refusal(error: BaseException) -> bool:
    """Whether `error` is Parallax's or Lightning's answer to a user mistake, which no traceback explains better."""
    if isinstance(error, MisconfigurationException):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return isinstance(error, ValueError) and module.partition(".")[0] == "parallax"


def text_of(error: BaseException) -> str:
    """One text for an error that another rank has: a refusal as it is, else with its type and where it was raised."""
    if is_refusal(error):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"


@dataclass(frozen=True)
class Report:
    """What a failed rank tells the others."""

    text: str
    refusal: bool


class Agreement:
    """One rank's link to the others' errors.

    Args:
        rank, world: of this process.
        nonce: the same on every rank, and of this agreement alone: keys in the store are never removed.
        patience: how long a rank without an error waits for the others to come to the same point.
        store: None uses the store the default process group was made with.
    """

    def __init__(self, rank: int, world: int, nonce: str, patience: timedelta, store: Any = None) -> None:
        self._rank, self._world, self._nonce = rank, world, nonce
        self._patience = patience.total_seconds()
        self._given = store
        self._rounds: dict[str, int] = {}

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Whatever is raised inside on some ranks is raised on all. Collective: every rank enters and leaves.

        Raises:
            the error raised inside, on every rank that met it, when all have met the same or when it is not a refusal;
            ValueError: on every rank, naming ranks and texts, when only some have met a refusal;
            CommError: when another rank has failed otherwise, or did not come.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if lost_peer(raised):
                raise  # the rank that is to blame reports
            error = raised
        if self._world > 1:
            arrived, reports = self._exchange(what, error)
            self._conclude(what, error, arrived, reports)
        elif error is not None:
            raise error

    @contextmanager
    def if_all(self, what: str) -> Iterator[None]:
        """An error that all ranks meet inside counts as one. Ranks without an error do nothing and wait for nobody."""
        try:
            yield
        except Exception as error:
            if self._world > 1 and not lost_peer(error):
                arrived, reports = self._exchange(what, error)
                self._conclude(what, error, arrived, reports)
            raise

    # The exchange

    @property
    def _store(self) -> Any:
        return self._given if self._given is not None else dist.distributed_c10d._get_default_store()

    def _exchange(self, what: str, error: Exception | None) -> tuple[int, dict[int, Report]]:
        """(how many ranks came, reports by rank). Gives up early when some rank has failed; nothing without a store."""
        number = self._rounds[what] = self._rounds.get(what, 0) + 1
        key = f"parallax/{self._nonce}/{what}/{number}"
        try:
            return self._meet(key, error)
        except RuntimeError as lost:  # the store has gone with the process that held it
            if error is None:
                raise CommError(f"rank {self._rank} lost contact with the job's store after {what}: {lost}") from lost
        return 0, {}

    def _meet(self, key: str, error: Exception | None) -> tuple[int, dict[int, Report]]:
        store, grace = self._store, GRACE
        if error is not None:
            refusal = is_refusal(error)
            grace = GRACE if refusal else CRASH_GRACE
            store.set(f"{key}/{self._rank}", pickle.dumps(Report(text_of(error), refusal)))
            store.add(f"{key}/failed", 1)
        arrived, failed = store.add(f"{key}/arrived", 1), 0
        deadline = time.monotonic() + (self._patience if error is None else grace)
        pause = 0.0005
        while arrived < self._world and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST_POLL)
            arrived = store.add(f"{key}/arrived", 0)
            if not failed and (failed := store.add(f"{key}/failed", 0)):
                deadline = min(deadline, time.monotonic() + grace)
        if not store.add(f"{key}/failed", 0):
            return arrived, {}
        keys = {rank: f"{key}/{rank}" for rank in range(self._world)}
        return arrived, {rank: pickle.loads(store.get(k)) for rank, k in keys.items() if store.check([k])}

    def _conclude(self, what: str, error: Exception | None, arrived: int, reports: Mapping[int, Report]) -> None:
        if not reports:
            if error is not None:
                raise error
            if arrived < self._world:
                raise CommError(
                    f"rank {self._rank} waited {self._patience:g} s after {what} for all ranks; {arrived} of "
                    f"{self._world} came"
                )
            return
        texts = {report.text for report in reports.values()}
        if error is not None and len(reports) == self._world and len(texts) == 1:
            raise mark_shared(error)
        if arrived == self._world and all(report.refusal for report in reports.values()):
            raise mark_shared(ValueError(_merged(reports, self._world))) from None  # its text is in there already
        if error is None:
            first = min(reports)
            raise CommError(f"rank {first} of {self._world} failed in {what}: {reports[first].text}")
        lower = [rank for rank, report in reports.items() if report.text == text_of(error) and rank < self._rank]
        raise mark_shared(error) if lower else error  # the lowest of those with one text prints it


def _merged(reports: Mapping[int, Report], world: int) -> str:
    by_text: dict[str, list[int]] = {}
    for rank in sorted(reports):
        by_text.setdefault(reports[rank].text, []).append(rank)
    lines = []
    for text, ranks in by_text.items():
        lines.append(text if len(ranks) == world else f"on {name_ranks(ranks)} of {world}: {text}")
    return "\n".join(lines)
