"""Which dims of a batch's tensors are the sequence.

It is: the reading of a batch, by the user's `cp_plan` or by what the shapes and names say, into a `BatchPlan`. It is
not: the cutting (`batch.py`).

A `cp_plan` maps entries of the batch to the dim of their tokens, e.g. `{"ids": 1, "labels": 1}`; entries of a tuple
are named by their place ("0", "1"), nested ones with a dot ("inputs.ids"). Entries it does not name stay whole.

Without one the sequence is dim 1 of the tokens (`input_ids`, else the first tensor of integers with two dims, else the
first tensor with two dims or more), and every tensor with as many rows and tokens in its first two dims is cut there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parallax.strategies.batch import IGNORE_INDEX
from parallax.strategies.names import unknown_name
from parallax.strategies.tree import named_leaves

FIRST = ("input_ids", "inputs_embeds", "shift_labels")
"""Entries that are known to have the sequence at dim 1."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a batch that is cut.

    Attributes:
        name: as in `cp_plan`.
        at: its place among the batch's leaves.
        dim: of its tokens.
        pad: what comes behind the last token: a label that is ignored, a mask of 0, token 0.
        is_mask: whether it says which tokens count.
    """

    name: str
    at: int
    dim: int
    pad: int
    is_mask: bool


@dataclass(frozen=True)
class BatchPlan:
    """How one batch is cut.

    Attributes:
        tokens: length of its sequences.
        rows: number of sequences.
        entries: what is cut.
    """

    tokens: int
    rows: int
    entries: tuple[Entry, ...]


def carried_plan(model: nn.Module) -> Mapping[str, int] | None:
    """The `cp_plan` of the outermost module that has one."""
    plans = (getattr(module, "cp_plan", None) for module in model.modules())
    return next((plan for plan in plans if isinstance(plan, Mapping) and plan), None)


def read_batch(batch: Any, plan: Mapping[str, int] | None) -> BatchPlan:
    """How `batch` is to be cut.

    Raises:
        ValueError: the plan does not fit the batch; no sequence can be seen in it; a mask of tokens against tokens.
    """
    leaves = {name: (at, leaf) for at, (name, leaf) in enumerate(named_leaves(batch)) if isinstance(leaf, Tensor)}
    if plan is not None:
        dims = {name: _planned(name, dim, leaves) for name, dim in plan.items()}
        tokens, rows = _agreed(dims, leaves)
    else:
        tokens, rows = _inferred(leaves)
        dims = {name: 1 for name, (_, x) in leaves.items() if x.dim() > 1 and _fits(x, rows, tokens)}
        _refuse_square(leaves, tokens)
    ints = [name for name in dims if not leaves[name][1].is_floating_point()]
    entries = [
        Entry(name, leaves[name][0], dim, _pad_of(name, leaves[name][1], ints), "mask" in name.lower())
        for name, dim in dims.items()
    ]
    return BatchPlan(tokens, rows, tuple(entries))


def _planned(name: str, dim: Any, leaves: Mapping[str, tuple[int, Tensor]]) -> int:
    if name not in leaves:
        raise unknown_name("entry of the batch in cp_plan", name, leaves)
    tensor = leaves[name][1]
    if type(dim) is not int or not 0 <= dim < tensor.dim():
        raise ValueError(
            f"cp_plan gives {name!r} dim {dim!r} for its tokens, but it has shape {tuple(tensor.shape)}; use 0 to "
            f"{tensor.dim() - 1}"
        )
    return dim


def _agreed(dims: Mapping[str, int], leaves: Mapping[str, tuple[int, Tensor]]) -> tuple[int, int]:
    """(tokens, rows): the same in all entries of a plan."""
    if not dims:
        raise ValueError("cp_plan names no entry of the batch; name those that have one value per token")
    sizes = {name: leaves[name][1].shape[dim] for name, dim in dims.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"cp_plan names dims of different lengths: {sizes}; all of them must be the tokens")
    name, dim = next(iter(dims.items()))
    shape = leaves[name][1].shape
    return sizes[name], shape[0 if dim else 1] if len(shape) > 1 else 1


def _inferred(leaves: Mapping[str, tuple[int, Tensor]]) -> tuple[int, int]:
    tensors = {name: tensor for name, (_, tensor) in leaves.items() if tensor.dim() > 1}
    known = [t for name, t in tensors.items() if name.rpartition(".")[2] in FIRST]
    whole_numbers = [t for t in tensors.values() if t.dim() == 2 and not t.is_floating_point()]
    found = [*known, *whole_numbers, *tensors.values()]
    if not found:
        raise ValueError(
            "context_parallel_size > 1 cuts sequences, but the batch has no tensor with a batch and a sequence dim; "
            "name the entries that have one value per token, e.g. cp_plan={'ids': 1, 'labels': 1}, or use "
            "context_parallel_size=1"
        )
    return found[0].shape[1], found[0].shape[0]


def _fits(tensor: Tensor, rows: int, tokens: int) -> bool:
    return tensor.shape[1] == tokens and tensor.shape[0] in (rows, 1)


def _refuse_square(leaves: Mapping[str, tuple[int, Tensor]], tokens: int) -> None:
    for name, (_, tensor) in leaves.items():
        if tensor.dim() > 2 and tuple(tensor.shape[-2:]) == (tokens, tokens):
            raise ValueError(
                f"{name!r} of the batch has shape {tuple(tensor.shape)}: a mask of tokens against tokens cannot be cut "
                f"over the context ranks. Give padding as attention_mask [batch, tokens], packed documents as "
                f"position_ids that start anew, or use context_parallel_size=1"
            )


def _pad_of(name: str, tensor: Tensor, ints: Sequence[str]) -> int:
    """What a sequence is filled up with: an ignored label in labels, and in what follows the first entry of a tuple."""
    last = name.rpartition(".")[2].lower()
    if tensor.is_floating_point() or "mask" in last:
        return 0
    named = "label" in last or "target" in last
    return IGNORE_INDEX if named or (last.isdigit() and name != ints[0]) else 0
