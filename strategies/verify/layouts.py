"""All layouts up to a number of ranks.

It is: an enumeration of axis sizes and ZeRO stages that are possible as such. It is not: what a model allows (its
refusals are part of a verification's result).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from parallax.strategies.layout import Layout


def all_layouts(ranks: int, *, experts: bool, zero: tuple[int, ...] = (0, 1, 2, 3)) -> Iterator[str]:
    """Every (tp, pp, cp, dp, ep, ZeRO stage) whose product of sizes is at most `ranks`, smallest worlds first.

    Args:
        experts: whether to vary ep as well.
        zero: stages to try where there is more than one data rank.
    """
    sizes = list(range(1, ranks + 1))
    combinations = sorted(
        (c for c in product(sizes, repeat=4) if 1 < c[0] * c[1] * c[2] * c[3] <= ranks),
        key=lambda c: (c[0] * c[1] * c[2] * c[3], c),
    )
    for tp, pp, cp, dp in combinations:
        for ep in sizes if experts else [1]:
            if (dp * cp) % ep:
                continue
            for stage in zero if dp * cp > 1 else (0,):
                layout = Layout(
                    tensor_parallel_size=tp,
                    pipeline_parallel_size=pp,
                    context_parallel_size=cp,
                    data_parallel_size=dp,
                    expert_parallel_size=ep,
                    zero_stage=stage,
                )
                yield str(layout)
