"""Walking nested containers of tensors: batches, activations, outputs.

It is: a few pure functions over tuples, lists, dicts and dataclass-like outputs. It is not: aware of
what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Every tensor in `tree`, in a fixed order."""
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with `fn` applied to every tensor; everything else stays."""
    return pytree.tree_map(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree)


@dataclass(frozen=True)
class Slot:
    """Where tensor number `index` sits in a skeleton."""

    index: int


def split_tensors(tree: Any) -> tuple[list[Tensor], Any]:
    """The tensors of `tree`, and its skeleton: the same tree with a `Slot` for each tensor, small and picklable."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(len(tensors) - 1)

    return tensors, map_tensors(take, tree)


def join_tensors(tensors: list[Tensor], skeleton: Any) -> Any:
    """The counterpart of `split_tensors`."""
    return pytree.tree_map(lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, skeleton)


def signature(tree: Any) -> tuple[Any, ...]:
    """A hashable summary of structure, shapes and dtypes."""
    leaves, spec = pytree.tree_flatten(tree)
    return (
        str(spec),
        *((tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else type(x).__name__ for x in leaves),
    )
