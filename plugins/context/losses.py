"""The loss of the user's code over whole sequences.

It is: cross entropy with mean reduction, whose sum and number of targets are added up over the ranks that share the
sequences, so that each of them has the number one process would have. It is not: other losses, which are averaged over
ranks by their tokens (`share.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn._reduction import legacy_get_string

from parallax.plugins.context.sequence import CutSequence
from parallax.plugins.context.tracked import PerToken, as_whole, plain, summed, track
from parallax.strategies.batch import IGNORE_INDEX


def cross_entropy(
    sequence: CutSequence,
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of this rank's tokens as the loss of the whole sequences."""

    def summed(logits: Tensor, labels: Tensor, how: str) -> Tensor:
        return F.cross_entropy(
            logits, labels, weight, ignore_index=ignore_index, reduction=how, label_smoothing=label_smoothing
        )

    how = reduction if size_average is None and reduce is None else legacy_get_string(size_average, reduce)
    return _whole_loss(sequence, summed, input, target, weight, ignore_index, how)


def nll_loss(
    sequence: CutSequence,
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`F.nll_loss`, likewise."""

    def summed(scores: Tensor, labels: Tensor, how: str) -> Tensor:
        return F.nll_loss(scores, labels, weight, ignore_index=ignore_index, reduction=how)

    how = reduction if size_average is None and reduce is None else legacy_get_string(size_average, reduce)
    return _whole_loss(sequence, summed, input, target, weight, ignore_index, how)


def _whole_loss(
    sequence: CutSequence,
    loss: Callable[[Tensor, Tensor, str], Tensor],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    target = plain(target)
    if not target.is_floating_point():
        target = _ignoring(sequence, target, ignore_index)
    elif sequence.padded:
        raise padding_counts(sequence, "its targets are probabilities")
    if reduction == "none":
        per_token: Tensor = track(PerToken, loss(input, target, "none"), sequence)
        return per_token
    share = loss(input, target, "sum")
    if reduction == "sum":
        whole = summed(sequence, share)
        return plain(whole) if sequence.sums_are_whole else whole
    sequence.normalized = True
    totals = torch.stack([share.detach().double(), _count(target, weight, ignore_index)])
    sequence.comm.all_reduce(totals)
    number = torch.where(totals[1] > 0, totals[1], 1)
    return as_whole(share, totals[0] / totals[1], sequence.comm.size / number)


def _count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What torch divides the sum by: the number of targets, or the sum of their classes' weights."""
    if target.is_floating_point():
        return torch.tensor(target.numel() / target.shape[-1 if target.dim() < 2 else 1], dtype=torch.float64).to(
            target.device
        )
    valid = target != ignore_index
    if weight is None:
        return valid.sum().double()
    return torch.where(valid, weight[torch.where(valid, target, 0)], 0).sum().double()


def _ignoring(sequence: CutSequence, target: Tensor, ignore_index: int) -> Tensor:
    """Targets with those of padding, and those a shift has filled in, marked as the code marks what it ignores."""
    if ignore_index != IGNORE_INDEX:
        target = target.masked_fill(target == IGNORE_INDEX, ignore_index)
    if not sequence.padded:
        return target
    rows, n = sequence.rows, sequence.local
    if target.numel() != rows * n:
        raise padding_counts(sequence, f"its targets are {target.numel()} of the {rows} x {n} tokens here")
    padding = ~sequence.real(target.device).expand(rows, n)
    return target.masked_fill(padding.reshape(target.shape), ignore_index)


def padding_counts(sequence: CutSequence, why: str) -> ValueError:
    """The error of a loss that would count padding."""
    cut = sequence.cut
    multiple = cut.multiple_of(cut.size, cut.order)
    return ValueError(
        f"sequences of {cut.tokens} tokens were padded to {cut.length} to be cut over {cut.size} context ranks, and "
        f"padding cannot be left out of the loss: {why}. Use lengths that are a multiple of {multiple}, or cross "
        f"entropy with reduction='mean' over all tokens"
    )
