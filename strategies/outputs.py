"""What a step returns, put together from its micro-batches.

It is: one rule for outputs of the user's steps, for what they append to lists, and for what they log. It is not: the
loss that is trained (`engine.py`), whose weights are the same.

The result is what the step would have returned for the whole batch, as far as that can be told: rows are joined in
order, means are averaged by valid tokens, counts are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallax.strategies.batch import weighted_mean
from parallax.strategies.tree import flatten, map_tensors, unflatten


def merge(values: Sequence[Any], weights: Tensor, rows: int) -> Any:
    """One value from one per micro-batch.

    Tensors and arrays are joined along dim 0, and so are lists with one entry per sample. 0-dim tensors and Python
    numbers are averaged by `weights` when they are floating-point (losses) and added when they are whole (counts).
    Anything else is kept when all micro-batches agree, else listed in order.

    Args:
        values: by micro-batch.
        weights: (micro-batches,) what each counts in a mean.
        rows: samples of a micro-batch.

    Raises:
        ValueError: the values differ in structure, or tensors in more than dim 0.
    """
    values = [map_tensors(Tensor.detach, value) for value in values]
    if len(values) == 1:
        return values[0]

    def by_sample(node: Any) -> bool:
        if not isinstance(node, list) or len(node) != rows:
            return False
        return not any(isinstance(x, Tensor) and x.dim() and x.shape[0] == rows for x in node)

    flat = [flatten(value, is_leaf=by_sample) for value in values]
    if any(spec != flat[0][1] for _, spec in flat):
        if all(isinstance(value, list) for value in values):
            return [entry for value in values for entry in value]
        raise ValueError(
            f"a step returned values of different structure for two micro-batches of one batch ({flat[0][1]} and "
            f"{next(spec for _, spec in flat if spec != flat[0][1])}); return the same structure every time, or use "
            f"num_microbatches=1"
        )
    leaves = [_merge_leaf(list(column), weights) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    return unflatten(leaves, flat[0][1])


def _merge_leaf(values: list[Any], weights: Tensor) -> Any:
    first = values[0]
    if all(isinstance(v, Tensor) for v in values):
        return _merge_tensors(values, weights)
    if all(isinstance(v, np.ndarray) and v.ndim for v in values):
        return np.concatenate(values)
    if all(isinstance(v, list) for v in values):
        return [entry for v in values for entry in v]
    if all(isinstance(v, float) for v in values):
        return float(weighted_mean(values, weights))
    if all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return sum(values)
    return first if all(type(v) is type(first) and bool(v == first) for v in values) else values


def _merge_tensors(values: list[Tensor], weights: Tensor) -> Tensor:
    first = values[0]
    if first.dim() == 0:
        if first.is_floating_point():
            return weighted_mean(values, weights).to(first.device, first.dtype)
        return torch.stack(values).all() if first.dtype == torch.bool else torch.stack(values).sum()
    if any(v.shape[1:] != first.shape[1:] for v in values):
        raise ValueError(
            f"a step returned tensors of shapes {[tuple(v.shape) for v in values]} for the micro-batches of one batch, "
            f"which cannot be joined along dim 0; return one shape, or use num_microbatches=1"
        )
    return torch.cat(values)
