"""What a pipeline rank does with an error: hold it until its list is done, then settle with the others what to raise.

It is: the error held back, and the comparison at the end of a run. It is not: what is sent in the meantime so that
nobody waits in vain (`executor.py`).

In the first run of a kind (training, evaluation) the ranks compare notes, and a user mistake that shows on one of them
is raised on all. Later runs compare nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from parallax.plugins.pipeline.transfer import StageFailed
from parallax.strategies.agreement import is_refusal, text_of
from parallax.strategies.comm import AxisComm, CommError


class Failures:
    """The first error of this rank in a run; true when there is one."""

    def __init__(self) -> None:
        self._first: Exception | None = None
        self._alone = False
        self._compared: set[bool] = set()

    def __bool__(self) -> bool:
        return self._first is not None

    def start(self, *, alone: bool) -> None:
        """A run begins; `alone`: no rank waits for this one, and errors need not be held."""
        self._first, self._alone = None, alone

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep an error for the end of the list, unless no rank waits for this one or contact is lost anyway."""
        try:
            yield
        except CommError:
            raise
        except Exception as error:
            if self._alone:
                raise
            self._first = self._first or error

    def settle(self, comm: AxisComm, placement: Sequence[int], *, training: bool) -> None:
        """Raise this rank's error; in the first run of a kind (collective) also what another rank has met.

        Args:
            comm: the pipeline axis.
            placement: rank of each virtual stage.
        """
        mine = self._first
        if training in self._compared:
            if isinstance(mine, StageFailed):
                raise CommError(str(mine)) from mine
            if mine is not None:
                raise mine
            return
        self._compared.add(training)
        met = None if mine is None or isinstance(mine, StageFailed) else (text_of(mine), is_refusal(mine))
        failed = {index: found for index, found in enumerate(comm.gather_objects(met)) if found is not None}
        if not failed:
            return
        index, (text, refusal) = next(iter(failed.items()))
        if met is not None and (not refusal or met == (text, refusal)):
            assert mine is not None
            raise mine
        if refusal:
            raise ValueError(text) from mine
        stages = [str(stage) for stage, at in enumerate(placement) if at == index]
        who = f"pipeline stage{'s' if len(stages) > 1 else ''} {', '.join(stages)} (rank {comm.ranks[index]})"
        raise CommError(f"{who} failed: {text}")
