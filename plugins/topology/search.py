"""Candidates for an order of the ranks: blocks of axes packed into islands, then devices arranged inside a node.

It is: `tiles` (which part of which axis lies inside an island), `pack` (fill islands with such blocks, the left-overs
of uneven islands together), and two searches over small orders, one exact and one by swaps. It is not: the choice
among the candidates (`placement.py`).

An order is written `slot_at`: the slot of each mesh rank. *Digits* say how a line of slots becomes a mesh: pairs (axis,
factor) from the innermost outwards, where the factors of an axis multiply to its size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, product
from math import prod

import torch
from torch import Tensor

from parallax.plugins.topology.cost import Prediction, Shape

Digits = tuple[tuple[str, int], ...]
Judge = Callable[[Tensor], Prediction]
"""Predicts a batch of orders, int64 [B, ranks]."""

EXACT_LIMIT = 8
"""Ranks up to which every order is tried: 8! = 40,320, fewer after symmetry."""
TOLERANCE = 1e-9
"""Relative difference below which two times are the same: sums in another order differ by less."""
INNER = ("tp", "cp", "dp", "pp")


def tiles(shape: Shape, capacity: int) -> list[Digits]:
    """Every way to put as much of the axes as fits into an island of `capacity` slots; most tp first, then cp, dp.

    The low digits of an axis are the ones inside: consecutive stages, and the runs of dp x cp that share experts.
    """
    sizes = {"tp": shape.tp, "cp": shape.cp, "dp": shape.dp, "pp": shape.pp}
    ways = [_divisors(sizes[axis], capacity) for axis in INNER]
    fits = {inside for inside in product(*ways) if prod(inside) <= capacity}

    def grows(inside: tuple[int, ...]) -> bool:
        return any(
            (*inside[:k], larger, *inside[k + 1 :]) in fits
            for k, way in enumerate(ways)
            for larger in way
            if larger > inside[k] and larger % inside[k] == 0
        )

    found = sorted((inside for inside in fits if not grows(inside)), reverse=True)
    return [
        tuple(zip(INNER, inside, strict=True))
        + tuple((axis, sizes[axis] // n) for axis, n in zip(INNER, inside, strict=True))
        for inside in found
    ]


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def spread(line: Tensor, digits: Digits, shape: Shape) -> Tensor:
    """`slot_at` of a line of slots: int64 [ranks] -> int64 [ranks]."""
    position = torch.arange(shape.size)
    at = {axis: torch.zeros_like(position) for axis in INNER}
    done = dict.fromkeys(INNER, 1)
    for axis, factor in digits:
        at[axis] += position % factor * done[axis]
        position = position // factor
        done[axis] *= factor
    rank = ((at["pp"] * shape.dp + at["dp"]) * shape.cp + at["cp"]) * shape.tp + at["tp"]
    slot_at = torch.empty_like(line)
    slot_at[rank] = line
    return slot_at


def pack(islands: Sequence[Sequence[int]], digits: Digits) -> list[int]:
    """A line of slots in which the blocks of `digits` cross islands as rarely as the left-overs allow.

    Level by level, from the innermost digit outwards, an island gives as many whole blocks as it can; what is left over
    is joined with the left-overs of other islands, the largest first and each with the largest that still fits.
    """
    inside, outside = digits[: len(INNER)], digits[len(INNER) :]
    blocks = [[] if _in_step(len(island), inside) else [[slot] for slot in island] for island in islands]
    for _, factor in inside:
        blocks = _join(blocks, factor)
    size = prod(factor for _, factor in inside)
    for mine, island in zip(blocks, islands, strict=True):
        if _in_step(len(island), inside):  # such an island leaves nothing over: its blocks are its slots in order
            mine[:0] = [list(island[i : i + size]) for i in range(0, len(island), size)]
    for _, factor in outside:
        blocks = _join(blocks, factor)
    return [slot for island in blocks for block in island for slot in block]


def _in_step(size: int, inside: Digits) -> bool:
    """Whether an island of `size` slots is made of whole blocks of every level."""
    return size % prod(factor for _, factor in inside) == 0


def _join(blocks: list[list[list[int]]], factor: int) -> list[list[list[int]]]:
    """One level: `factor` blocks become one. Entry i of the result belongs to island i."""
    if factor == 1:
        return blocks
    joined: list[list[list[int]]] = []
    left: dict[int, deque[tuple[int, list[list[int]]]]] = {}
    for island, mine in enumerate(blocks):
        whole = len(mine) - len(mine) % factor
        joined.append([list(chain.from_iterable(mine[i : i + factor])) for i in range(0, whole, factor)])
        if len(mine) > whole:
            left.setdefault(len(mine) - whole, deque()).append((island, mine[whole:]))
    while left:
        home, got = _take(left, max(left))
        while len(got) < factor:
            need = factor - len(got)
            fitting = [size for size in left if size <= need]
            if fitting:
                got = got + _take(left, max(fitting))[1]
                continue
            island, more = _take(left, min(left))
            got = got + more[:need]
            left.setdefault(len(more) - need, deque()).appendleft((island, more[need:]))
        joined[home].append(list(chain.from_iterable(got)))
    return joined


def _take(left: dict[int, deque[tuple[int, list[list[int]]]]], size: int) -> tuple[int, list[list[int]]]:
    island, mine = left[size].popleft()
    if not left[size]:
        del left[size]
    return island, mine


def best_of(prediction: Prediction) -> int:
    """Index of the order with the least time, then the least work, then the first."""
    total = prediction.seconds.sum(1)
    near = total <= total.min() * (1 + TOLERANCE)
    work = torch.where(near, prediction.work, float("inf"))
    return int((work <= work.min() * (1 + TOLERANCE)).nonzero()[0])


def exhaustive(shape: Shape, judge: Judge) -> Tensor:
    """The best of all orders of at most `EXACT_LIMIT` slots, the lexicographically first of equals. int64 [ranks].

    Orders that differ by a renaming of tp or dp indices are the same; one of each is judged.
    """
    orders = _permutations(shape.size)
    plane = orders.view(-1, shape.pp, shape.dp, shape.cp, shape.tp)[:, 0, :, 0, :]
    alike = shape.ep == 1 or shape.tensor == shape.tp  # else experts tell ranks of tp apart
    keep = (plane[:, 0, 1:] > plane[:, 0, :-1]).all(1) if alike else torch.ones(len(orders), dtype=torch.bool)
    if shape.ep == 1:  # with experts, runs of dp are not alike
        keep &= (plane[:, 1:, 0] > plane[:, :-1, 0]).all(1)
        keep &= plane[:, 0, 0] == plane.flatten(1).amin(1)
    orders = orders[keep]
    return orders[best_of(judge(orders))]


def _permutations(n: int) -> Tensor:
    """All of them in lexicographic order: int64 [n!, n]."""
    if n == 1:
        return torch.zeros(1, 1, dtype=torch.int64)
    rest = _permutations(n - 1)
    first = torch.arange(n).repeat_interleave(len(rest))[:, None]
    rest = rest.repeat(n, 1)
    return torch.cat((first, rest + (rest >= first)), 1)


def descend(slot_at: Tensor, judge: Judge, limit: int = 64) -> Tensor:
    """Exchange the two slots that gain most, until no exchange gains or `limit` were made. int64 [ranks]."""
    n = len(slot_at)
    i, j = torch.triu_indices(n, n, 1)
    rows = torch.arange(len(i))
    for _ in range(limit):
        orders = slot_at.repeat(len(i) + 1, 1)  # the last one stays as it is: it loses against any equal, being last
        orders[rows, i], orders[rows, j] = slot_at[j], slot_at[i]
        found = judge(orders)
        best = best_of(found)
        time, now = float(found.seconds[best].sum()), float(found.seconds[-1].sum())
        less_work = float(found.work[best]) < float(found.work[-1]) * (1 - TOLERANCE)
        if not (time < now * (1 - TOLERANCE) or (time <= now and less_work)):
            return slot_at
        slot_at = orders[best]
    return slot_at
