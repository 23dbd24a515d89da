"""Puts the ranks' parts of a run together into one.

It is: the assembly of whole tensors by `ParamShard`, with every disagreement between replicas noted. It is not: the
comparison with one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallax.plugins.base import ParamShard

Named = Mapping[str, Tensor]
Shards = Mapping[str, ParamShard | None]


@dataclass
class Assembled:
    """Whole tensors of a run.

    Attributes:
        tensors: FQN -> whole tensor; elements no rank holds are nan.
        disagree: FQN -> (rank, largest difference from the first rank that holds the same elements).
        parts: FQN -> (rank, how its part sits in the whole, the part) of each that holds one.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    disagree: dict[str, tuple[int, float]] = field(default_factory=dict)
    parts: dict[str, list[tuple[int, ParamShard, Tensor]]] = field(default_factory=dict)

    def each(self, name: str, right: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each rank that holds a part of `name`, and `right` with that part in its place."""
        for rank, shard, local in self.parts.get(name, ()):
            whole = right.clone()
            shard.put(whole, local.to(whole.dtype))
            yield rank, whole


def assemble_whole(
    parts: Sequence[tuple[Named, Shards]], like: Named, tied: Mapping[str, str] | None = None
) -> Assembled:
    """`parts` by rank -> whole tensors shaped as `like`.

    Args:
        parts: (local tensors, how they sit in the whole) of each rank.
        like: the reference's tensors, for names and shapes.
        tied: further name of a tensor -> the name `like` knows it by.
    """
    out = Assembled({n: torch.full_like(t, float("nan")) for n, t in like.items()})
    for rank, (tensors, shards) in enumerate(parts):
        for fqn, local in tensors.items():
            name = (tied or {}).get(fqn, fqn)
            if name not in out.tensors:
                continue
            whole = out.tensors[name]
            shard = shards.get(fqn) or ParamShard(tuple(whole.shape))
            before = whole.clone()
            shard.put(whole, local.to(whole.dtype))
            out.parts.setdefault(name, []).append((rank, shard, local))
            twice = ~before.isnan() & (before != whole)
            if twice.any():
                size = float((before - whole)[twice].abs().max())
                if size > out.disagree.get(name, (0, 0.0))[1]:
                    out.disagree[name] = (rank, size)
    return out
