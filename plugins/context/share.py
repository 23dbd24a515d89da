"""Results of the user's step put together from the ranks that share the sequences.

It is: what a loss that each rank has of its own tokens counts, and outputs as one process would have them. It is not:
cross entropy, which is common when it is computed (`losses.py`), or the weights between batches (`engine.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from parallax.plugins.context.losses import padding_counts
from parallax.plugins.context.sequence import CutSequence
from parallax.plugins.context.tracked import as_whole, plain
from parallax.strategies.tree import map_leaves


def whole_output(sequence: CutSequence, output: Any) -> Any:
    """An output of the user's step as one process would have it, on every rank of the context axis. Collective.

    Tensors [batch, tokens, ...] are gathered in order, without padding. Single numbers with a fraction are means, which
    count by the targets at this rank's tokens, as between data ranks, also in the backward; whole ones are added.

    Raises:
        ValueError: a tensor whose tokens are not seen in its shape; a loss in which padding counts.
    """

    def whole(leaf: Any) -> Any:
        leaf = plain(leaf)
        if isinstance(leaf, float):
            return float(_mean(sequence, torch.tensor(leaf, dtype=torch.float64))[0])
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() == 0:
            return _number(sequence, leaf)
        if leaf.dim() >= 2 and tuple(leaf.shape[:2]) == (sequence.rows, sequence.local):
            return sequence.whole(leaf, 1)
        if not leaf.is_floating_point():
            return leaf
        raise ValueError(
            f"the step returns a tensor of shape {tuple(leaf.shape)}; on a sequence cut over {sequence.comm.size} "
            f"context ranks a result must have one row per sequence and one entry per token here, [{sequence.rows}, "
            f"{sequence.local}, ...], or be one number. Return it in this shape, or use context_parallel_size=1"
        )

    return map_leaves(whole, output)


def _number(sequence: CutSequence, number: Tensor) -> Tensor:
    if not number.is_floating_point():
        total = number.detach().to(torch.int64)
        sequence.comm.all_reduce(total, ReduceOp.MIN if number.dtype == torch.bool else ReduceOp.SUM)
        return total.to(number.dtype)
    if not number.requires_grad:
        return _mean(sequence, number)[0].to(number)
    if sequence.normalized:  # cross entropy counts as it is, and what is added to it is a mean over ranks
        mean, share = _mean(sequence, number, by_targets=False)
        return as_whole(number, mean, share * sequence.comm.size)
    mean, share = _mean(sequence, number)
    if sequence.padded:
        raise padding_counts(sequence, "it is not cross entropy")
    return as_whole(number, mean, share * sequence.comm.size)


def _mean(sequence: CutSequence, number: Tensor, by_targets: bool = True) -> tuple[Tensor, Tensor]:
    """(mean over ranks, this rank's share in it), by targets or all ranks alike; 0 where there are no targets."""
    own = sequence.own[sequence.microbatch].to(number.device)
    weight = own if by_targets else torch.ones_like(own)
    sums = torch.stack([torch.where(weight > 0, number.detach().double(), 0.0) * weight, own])
    sequence.comm.all_reduce(sums)
    total = sums[1].clamp(min=1) if by_targets else weight * sequence.comm.size
    return torch.where(sums[1] > 0, sums[0] / total, 0.0), weight / total
