"""All-gather and reduce-scatter over gloo by direct exchange: every rank sends every other its part at once.

It is: one step of (n-1)/n of the tensor each way, what the textbook counts. gloo's own reduce-scatter is a whole
all-reduce of which each rank keeps its part, and its all-gather goes round a ring, in a thread of its own. It is not:
chosen (`collectives.py`), counted or named (`comm.py`), nor for other backends, nor for memory of other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Fill = Callable[[slice], None]
"""Computes some ranks' parts of a tensor, seen as one row for each rank."""
TAG = 1
"""Of these messages, so that none is taken for one of a pipeline or a ring."""


def is_gloo(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Whether a collective of `group` on `tensor` is gloo's."""
    return group is not None and tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"


class Exchange:
    """Messages in flight.

    Args:
        works: to wait for.
        held: tensors they read or fill, which must outlive them.
        sums: (where, addend): to be added when all have arrived.
    """

    def __init__(self, works: list[Any], held: list[Tensor], sums: list[tuple[Tensor, Tensor]]) -> None:
        self._works, self._held, self._sums = works, held, sums

    def is_completed(self) -> bool:
        """Whether everything has arrived and is summed, which only waiting does."""
        return not self._works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        with torch._C.DisableTorchFunction():  # as in `comm.py`
            for where, addend in self._sums:
                where.add_(addend)
        self._works, self._held, self._sums = [], [], []


def all_gather(out: Tensor, part: Tensor, group: Any, index: int) -> Exchange:
    """Fill `out` [ranks, n] with every rank's `part` [n]; this rank is number `index`."""
    peers = _peers(len(out), index)
    works = [dist.irecv(out[peer], group=group, group_src=peer, tag=TAG) for peer in peers]
    works += [dist.isend(part, group=group, group_dst=peer, tag=TAG) for peer in reversed(peers)]
    out[index].copy_(part)
    return Exchange(works, [out, part], [])


def reduce_scatter(out: Tensor, parts: Tensor, group: Any, index: int, fill: Fill | None = None) -> Exchange:
    """Fill `out` [n] with row `index` of the sum over ranks of `parts` [ranks, n]; `fill` computes rows of it."""
    peers = _peers(len(parts), index)
    received = [out, *parts.new_empty(len(peers) - 1, *out.shape)]
    works = [dist.irecv(row, group=group, group_src=peer, tag=TAG) for row, peer in zip(received, peers, strict=True)]
    for rows in others(len(parts), index):
        if fill is not None:
            fill(rows)
        works += [dist.isend(parts[to], group=group, group_dst=to, tag=TAG) for to in range(rows.start, rows.stop)]
    if fill is not None:
        fill(slice(index, index + 1))
    return Exchange(works, [parts], [(out, row) for row in (parts[index], *received[1:])])


def others(ranks: int, index: int) -> list[slice]:
    """Those after rank `index`, and those before it."""
    return [rows for rows in (slice(index + 1, ranks), slice(0, index)) if rows.stop > rows.start]


def _peers(ranks: int, index: int) -> list[int]:
    """The other ranks, from the one before this on; whoever sends takes them in the opposite order, so that nobody is
    everyone's first."""
    return [(index - distance) % ranks for distance in range(1, ranks)]
