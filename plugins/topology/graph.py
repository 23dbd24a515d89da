"""Two questions about small undirected graphs: which vertices hang together, and which are pairwise joined.

It is: plain functions on adjacency sets (`near[i]` holds the neighbours of vertex i; symmetric, without i itself).
It is not: a graph library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet


def components(near: Sequence[AbstractSet[int]]) -> list[list[int]]:
    """Connected components, each sorted, in order of their first vertex; a vertex without neighbours is its own."""
    seen: set[int] = set()
    found = []
    for start in range(len(near)):
        if start in seen:
            continue
        group, waiting = {start}, [start]
        while waiting:
            fresh = near[waiting.pop()] - group
            group |= fresh
            waiting.extend(fresh)
        seen |= group
        found.append(sorted(group))
    return found


def maximal_cliques(near: Sequence[AbstractSet[int]]) -> list[list[int]]:
    """Maximal sets of pairwise joined vertices, each sorted, in lexicographic order.

    Bron and Kerbosch 1973 with Tomita's pivot (2006): fast on the graphs met here, exponential on contrived ones.
    """
    return sorted(sorted(clique) for clique in _extend(near, frozenset(), set(range(len(near))), set()))


def _extend(
    near: Sequence[AbstractSet[int]], clique: frozenset[int], open_: set[int], closed: set[int]
) -> Iterator[frozenset[int]]:
    if not open_ and not closed:
        if clique:
            yield clique
        return
    pivot = max(open_ | closed, key=lambda v: len(near[v] & open_))
    for vertex in sorted(open_ - near[pivot]):
        yield from _extend(near, clique | {vertex}, open_ & near[vertex], closed & near[vertex])
        open_ = open_ - {vertex}
        closed = closed | {vertex}
