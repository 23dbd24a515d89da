"""The valid layouts nearest to an impossible one.

It is: an enumeration of every way to factor the world size, and an order on them. It is not: a planner;
it knows nothing of the model, of memory or of speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import gcd

Sizes = dict[str, int]
"""Axis ("tp", "pp", "cp", "dp", "ep") -> size."""


def divisors(n: int) -> list[int]:
    """All divisors of `n`, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def valid_sizes(world: int, folded: bool, etp: int | None = None) -> Iterator[Sizes]:
    """Every way to write `world` as tp x pp x cp x dp; with `folded`, also every ep that divides dp x cp x tp/etp.

    Where tp is no multiple of `etp`, etp is their greatest common divisor; None is tp.
    """
    for tp in divisors(world):
        for pp in divisors(world // tp):
            for cp in divisors(world // tp // pp):
                dp = world // tp // pp // cp
                beside = tp // gcd(tp, etp or tp)
                for ep in divisors(dp * cp * beside) if folded else [1]:
                    yield {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep}


def nearest_layouts(
    asked: Mapping[str, int | None], world: int, limit: int = 3, etp: int | None = None
) -> list[Sizes]:
    """The `limit` valid layouts of `world` ranks nearest to `asked`, nearest first.

    Nearest is, in this order: the fewest axes changed; the fewest axes set to a size that does not divide the one
    asked for (a model that can be cut in 4 can be cut in 2, but perhaps not in 3); the smallest factor of change.

    Args:
        asked: size per axis; "dp" is None when it was left to the rest of the world, and then costs nothing.
        world: number of ranks there are.
        limit: how many to return at most.
        etp: as for `valid_sizes`.
    """

    def cost(sizes: Sizes) -> tuple[int, int, Fraction, list[int]]:
        changed = [axis for axis in sizes if asked[axis] not in (None, sizes[axis])]
        risky = [axis for axis in changed if axis != "dp" and (asked[axis] or 1) % sizes[axis]]
        factor = Fraction(1)
        for axis in changed:
            ratio = Fraction(sizes[axis], asked[axis] or 1)
            factor *= max(ratio, 1 / ratio)
        return len(changed), len(risky), factor, [-sizes[axis] for axis in ("tp", "pp", "cp", "ep")]

    return sorted(valid_sizes(world, folded=asked["ep"] != 1, etp=etp), key=cost)[:limit]
