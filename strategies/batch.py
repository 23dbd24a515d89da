"""Splitting a batch into micro-batches, and how much each of them counts in the loss.

It is: pure functions on the user's batch, whatever its containers. It is not: sharding over an axis (the
data axis is the sampler's work, the sequence a plugin's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallax.strategies.comm import AxisComm
from parallax.strategies.tree import flatten, tensors_of, unflatten

IGNORE_INDEX = -100
"""Label of a token that does not count (torch's and transformers' default)."""


def batch_size(batch: Any) -> int:
    """Length of dim 0 of the batch's first tensor with dims.

    Raises:
        ValueError: the batch holds no such tensor.
    """
    for tensor in tensors_of(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise ValueError(f"cannot split a batch of type {type(batch).__name__} that holds no tensor with a batch dim")


def split(batch: Any, count: int) -> list[Any]:
    """`count` micro-batches of equal size, in order; tensors are views.

    Every tensor (and every list) whose dim 0 is as long as the batch is cut; anything else goes whole to each.

    Raises:
        ValueError: `count` does not divide the batch.
    """
    if count == 1:
        return [batch]
    size = batch_size(batch)
    if size % count:
        valid = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
        raise ValueError(
            f"num_microbatches={count} does not divide the batch of {size} on each data rank; use one of {valid}, or "
            f"change the batch size (drop_last=True keeps the last batch from being shorter)"
        )
    each = size // count

    def part(leaf: Any, i: int) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size:
            return leaf[i * each : (i + 1) * each]
        return leaf

    def is_rows(node: Any) -> bool:
        return isinstance(node, list) and len(node) == size and not any(True for _ in tensors_of(node))

    leaves, spec = flatten(batch, is_leaf=is_rows)
    return [
        unflatten(
            [leaf[i * each : (i + 1) * each] if is_rows(leaf) else part(leaf, i) for leaf in leaves], spec
        )
        for i in range(count)
    ]


def shifts_labels(module: nn.Module) -> bool:
    """Whether a transformers model in `module` takes the label at t+1 for its target at t."""
    models = (m for m in module.modules() if hasattr(m, "loss_type"))
    return any(m.loss_type == "ForCausalLM" or type(m).__name__.endswith("LMHeadModel") for m in models)


def valid_targets(batch: Any, *, shifted: bool) -> Tensor | None:
    """Where in `batch` a target counts, as a bool tensor in the shape of the labels; None when it has none.

    Args:
        batch: a mapping or dataclass with "shift_labels" or "labels", whose ignored entries are -100;
            anything else gives None.
        shifted: the model predicts token t+1 at t from "labels": the target at t is the label at t+1.
    """
    if is_dataclass(batch):
        batch = {f.name: getattr(batch, f.name, None) for f in fields(batch)}
    if not isinstance(batch, Mapping):
        return None
    if isinstance(labels := batch.get("shift_labels"), Tensor):
        return labels != IGNORE_INDEX
    if not isinstance(labels := batch.get("labels"), Tensor):
        return None
    valid = labels != IGNORE_INDEX
    if shifted and labels.dim() > 1:
        valid = torch.cat([valid[..., 1:], torch.zeros_like(valid[..., :1])], -1)
    return valid


def valid_tokens(batch: Any, *, shifted: bool) -> Tensor | None:
    """Number of targets that count in `batch`, as a 0-dim tensor; None when it has no labels. See `valid_targets`."""
    valid = valid_targets(batch, shifted=shifted)
    return None if valid is None else valid.sum()


def largest_divisor(size: int, at_most: int) -> int:
    """The largest divisor of `size` that is not above `at_most`."""
    return next(d for d in range(min(size, at_most), 0, -1) if size % d == 0)


def weighted_mean(values: Sequence[Any], counts: Tensor, along: AxisComm | None = None) -> Tensor:
    """Mean of one number per micro-batch by its valid tokens, in fp64, on the device of `counts`.

    With `along` also over its ranks, which have counts of their own; collective. A micro-batch without valid tokens has
    no loss (a mean over nothing is nan) and does not count.
    """
    numbers = torch.stack([torch.as_tensor(v, device=counts.device).double().reshape(()) for v in values])
    share = counts.double()
    sums = torch.stack([(torch.where(share > 0, numbers, 0.0) * share).sum(), share.sum()])
    if along is not None:
        along.all_reduce(sums)
    return sums[0] / sums[1].clamp(min=1)
