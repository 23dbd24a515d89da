"""Counted bytes against closed formulas, row by row.

It is: the comparison, for every rank and step, of calls and payload bytes by axis, kind, phase and group. It is not: a
formula or a count. An extra byte is a difference, and so is a missing one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parallax.strategies.comm import Traffic
from parallax.strategies.verify.expect import Theory
from parallax.strategies.verify.runs import RankResult

SETTLED = 2
"""Steps after which ranks have told each other all they ever do."""


@dataclass(frozen=True)
class Row:
    """One line of the table: what the ranks of a group sent over an axis in one step, and what they should have.

    Attributes:
        group: global ranks; those that counted and expected the same are one row.
        counted, expected: of one rank; of the whole group where only its sum is known (`pooled`).
    """

    step: int
    axis: str
    kind: str
    phase: str
    group: tuple[int, ...]
    rank: int
    counted: Traffic
    expected: Traffic
    pooled: bool = False

    @property
    def right(self) -> bool:
        return self.counted == self.expected

    def __str__(self) -> str:
        who = f"the ranks {self.group} together" if self.pooled else f"rank {self.rank} of {self.group}"
        return (
            f"step {self.step}, {self.phase}: {self.kind} on axis {self.axis!r}: {who} sent {self.counted.bytes:,} "
            f"bytes in {self.counted.calls:,} call(s), by formula {self.expected.bytes:,} in {self.expected.calls:,}"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_bytes(ranks: Sequence[RankResult], theories: Sequence[Sequence[Theory]]) -> list[Row]:
    """Every row of every rank and step. In the first steps messages without bytes (objects that ranks agree by) are
    left out; after them there are none."""
    return [row for step, of_step in enumerate(theories) for row in _step(ranks, of_step, step)]


def _step(ranks: Sequence[RankResult], theories: Sequence[Theory], step: int) -> Iterator[Row]:
    nothing = Traffic()
    keys = sorted({k for t in theories for k in t.counts} | {k for r in ranks for k in r.seen.traffic[step]})
    pooled = {key for theory in theories for key in theory.pooled}
    for key in keys:
        counted = [Traffic(*r.seen.traffic[step].get(key, (0, 0))) for r in ranks]
        expected = [theory.counts.get(key, nothing) for theory in theories]
        if step < SETTLED and not any(t.bytes for t in (*counted, *expected)):
            continue
        for rank, result in enumerate(ranks):
            group = result.groups.get(key[0], tuple(range(len(ranks))))
            if key in pooled:
                if rank == group[0]:
                    yield Row(step, *key, group, rank, _sum(counted, group), _sum(expected, group), pooled=True)
            elif counted[rank] != nothing or expected[rank] != nothing:
                yield Row(step, *key, group, rank, counted[rank], expected[rank])


def _sum(traffic: Sequence[Traffic], group: Sequence[int]) -> Traffic:
    return Traffic(sum(traffic[r].calls for r in group), sum(traffic[r].bytes for r in group))
