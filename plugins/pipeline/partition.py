"""Which layers go to which stage.

It is: an even split by count. It is not: aware of the cost of a layer.
"""

from __future__ import annotations


def split_layers(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """[lo, hi) of every stage, contiguous, sizes differing by at most one; the longer stages come first.

    The last stage also runs norm, head and loss, so it is never the one with more layers.
    """
    if num_stages > num_layers:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} stages")
    size, extra = divmod(num_layers, num_stages)
    bounds, lo = [], 0
    for stage in range(num_stages):
        hi = lo + size + (stage < extra)
        bounds.append((lo, hi))
        lo = hi
    return bounds
