"""This rank's part of a batch, and how many targets are in it.

It is: cutting every tensor that has tokens, as a `BatchPlan` says. It is not: the reading of a batch (`plans.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parallax.plugins.context.plans import read_batch
from parallax.plugins.context.sequence import CutSequence
from parallax.strategies.batch import valid_targets
from parallax.strategies.tree import flatten, unflatten


def cut_batch(batch: Any, sequence: CutSequence, plan: Mapping[str, int] | None) -> Any:
    """`batch` with this rank's tokens; the sequences are padded to what can be cut evenly.

    Raises:
        ValueError: see `read_batch`.
    """
    found = read_batch(batch, plan)
    sequence.begin(found.tokens, found.rows)
    leaves, spec = flatten(batch)
    for entry in found.entries:
        part = sequence.take(leaves[entry.at], entry.dim, entry.pad)
        leaves[entry.at] = part
        (sequence.masks if entry.is_mask else sequence.tokens).append(part)
    return unflatten(leaves, spec)


def own_targets(whole: Any, sequence: CutSequence, *, shifted: bool) -> Tensor:
    """Number of targets at this rank's tokens of the batch `whole`; of its tokens, where the batch has no labels.

    Args:
        whole: before it was cut.
        sequence: begun with it.
        shifted: as in `valid_targets`.
    """
    valid = valid_targets(whole, shifted=shifted)
    if valid is not None and valid.dim() > 1 and valid.shape[1] == sequence.cut.tokens:
        return sequence.take(valid, 1).sum()
    tokens = int(sequence.real("cpu").sum()) * sequence.rows
    return torch.tensor(tokens, device=None if valid is None else valid.device)
