"""Sums of gradients that are partial on each rank, once per step.

It is: the list of such parameters with the ranks each is summed over, and the sum, one flat message per group and
dtype. It is not: the averaging over the data axis, or gradients that a region's entry completes already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from parallax.strategies.comm import AxisComm


class GradientSums:
    """Parameters, by FQN, whose gradients are summed over a group of ranks."""

    def __init__(self) -> None:
        self._groups: dict[AxisComm, list[str]] = {}

    def add(self, comm: AxisComm, fqns: Iterable[str]) -> None:
        if found := list(fqns):
            self._groups.setdefault(comm, []).extend(found)

    def __contains__(self, fqn: str) -> bool:
        return any(fqn in names for names in self._groups.values())

    def __bool__(self) -> bool:
        return bool(self._groups)

    def run(self, grads: Mapping[str, Tensor]) -> None:
        """Sum in place those of `grads` that are listed; frozen and unused parameters are not among them."""
        for comm, fqns in self._groups.items():
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for fqn in fqns:
                if (grad := grads.get(fqn)) is not None:
                    by_dtype.setdefault(grad.dtype, []).append(grad)
            for parts in by_dtype.values():
                flat = torch.cat([g.reshape(-1) for g in parts])
                comm.all_reduce(flat)
                for grad, part in zip(parts, torch.split(flat, [g.numel() for g in parts]), strict=True):
                    grad.copy_(part.view_as(grad))
