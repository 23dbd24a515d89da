"""The best way to cut the devices of a node into equal groups, by a score that puts the slowest pair first.

It is: an exact search, fast up to 16 devices, and for larger nodes a greedy choice improved by swaps.
It is not: a placement of ranks over several nodes or a prediction of time.

The score of a partition is [sum over groups of the class of the worst pair (`LinkKind.rank`), bonded links inside
groups, groups that lie in one NUMA group], compared in this order. Devices are positions in `Node.devices`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from parallax.plugins.topology.description import Node

EXACT_LIMIT = 16
"""Largest node that is searched exhaustively."""

Score = tuple[int, int, int]


@dataclass(frozen=True)
class Grouping:
    """A partition into groups of one size; devices left over are not listed.

    Attributes:
        groups: each sorted, in order of first member.
        score: see the module.
        exact: whether no other partition can score better.
    """

    groups: tuple[tuple[int, ...], ...]
    score: Score
    exact: bool = True

    def to_answer(self) -> dict[str, Any]:
        """Lists in place of tuples."""
        return {"groups": [list(group) for group in self.groups], "score": list(self.score)}


def best_groups(node: Node, size: int) -> Grouping:
    """Best partition of `node`'s devices into as many groups of `size` as fit.

    Of equal scores the lexicographically smallest list is taken.

    Raises:
        ValueError: `size` is less than 2 or more than the node has.
    """
    n = len(node.devices)
    if not 2 <= size <= n:
        raise ValueError(f"{node.host or 'node'}: groups of {size} from {n} devices; the size must be 2 to {n}")
    value = _scorer(node)
    if n <= EXACT_LIMIT:
        return _exact(n, size, value)
    return _heuristic(n, size, value)


def score_groups(node: Node, groups: Sequence[Sequence[int]]) -> Score:
    """Score of a given partition."""
    value = _scorer(node)
    return _add([value(tuple(group)) for group in groups])


def _scorer(node: Node) -> Callable[[tuple[int, ...]], Score]:
    """Value of one group: its worst pair, its links, whether it lies in one NUMA group."""
    n = len(node.devices)
    numa_of = {i: k for k, group in enumerate(node.numa_groups() or []) for i in group}
    rank = [[0 if i == j else node.link(i, j).kind.rank for j in range(n)] for i in range(n)]
    links = [[node.link(i, j).count if i != j and rank[i][j] >= 5 else 0 for j in range(n)] for i in range(n)]
    known: dict[tuple[int, ...], Score] = {}

    def value(group: tuple[int, ...]) -> Score:
        if group not in known:
            pairs = list(combinations(group, 2))
            together = bool(numa_of) and len({numa_of[i] for i in group}) == 1
            known[group] = (min(rank[i][j] for i, j in pairs), sum(links[i][j] for i, j in pairs), int(together))
        return known[group]

    return value


def _exact(n: int, size: int, value: Callable[[tuple[int, ...]], Score]) -> Grouping:
    """Search by remaining devices: the first of them is grouped in every way or, while some may be left, skipped.

    What remains tells how many were skipped, so each set of remaining devices is solved once.
    """
    best = tuple(max(value(g)[k] for g in combinations(range(n), size)) for k in range(3))
    solved: dict[tuple[int, ...], tuple[Score, tuple[tuple[int, ...], ...]]] = {}

    def solve(rest: tuple[int, ...]) -> tuple[Score, tuple[tuple[int, ...], ...]]:
        count = len(rest) // size
        if count == 0:
            return (0, 0, 0), ()
        if rest in solved:
            return solved[rest]
        bound = tuple(count * part for part in best)
        found: tuple[Score, tuple[tuple[int, ...], ...]] = ((-1, -1, -1), ())
        for others in combinations(rest[1:], size - 1):
            group = (rest[0], *others)
            score, groups = solve(tuple(i for i in rest[1:] if i not in others))
            total = _add([value(group), score])
            if total > found[0]:
                found = (total, (group, *groups))
            if found[0] == bound:
                break
        if found[0] != bound and len(rest) % size:
            skipped = solve(rest[1:])
            if skipped[0] > found[0]:
                found = skipped
        solved[rest] = found
        return found

    score, groups = solve(tuple(range(n)))
    return Grouping(groups, score)


def _heuristic(n: int, size: int, value: Callable[[tuple[int, ...]], Score]) -> Grouping:
    """Grow each group from the first free device by the best next one, then swap members while that helps."""
    free, groups = list(range(n)), []
    while len(free) >= size:
        group = [free.pop(0)]
        while len(group) < size:
            nearest = max(free, key=lambda i: (value(tuple(sorted([*group, i]))), -i))
            free.remove(nearest)
            group.append(nearest)
        groups.append(sorted(group))
    if free:
        groups.append(free)
    improving = True
    while improving:
        improving = any(_swap(a, b, size, value) for a, b in combinations(groups, 2))
    ordered = tuple(sorted(tuple(group) for group in groups if len(group) == size))
    return Grouping(ordered, _add([value(group) for group in ordered]), exact=False)


def _swap(a: list[int], b: list[int], size: int, value: Callable[[tuple[int, ...]], Score]) -> bool:
    """Exchange the first pair of members that improves the two groups; whether there was one."""

    def worth(*groups: list[int]) -> Score:
        return _add([value(tuple(sorted(group))) for group in groups if len(group) == size])

    before = worth(a, b)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            c, d = [*a[:i], y, *a[i + 1 :]], [*b[:j], x, *b[j + 1 :]]
            if worth(c, d) > before:
                a[:], b[:] = sorted(c), sorted(d)
                return True
    return False


def _add(scores: Sequence[Score]) -> Score:
    return sum(s[0] for s in scores), sum(s[1] for s in scores), sum(s[2] for s in scores)
