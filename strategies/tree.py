"""Walking nested containers of tensors: batches, activations, outputs.

It is: a few pure functions over tuples, lists, dicts and dataclass-like outputs. It is not: aware of
what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Every tensor in `tree`, in a fixed order."""
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with `fn` applied to every tensor; everything else stays."""
    return pytree.tree_map(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def split_tensors(tree: Any) -> tuple[list[Tensor], Any]:
    """The tensors of `tree`, and a picklable skeleton to put them back with `join_tensors`."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rest = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
    return tensors, (rest, spec)


def join_tensors(tensors: list[Tensor], skeleton: Any) -> Any:
    rest, spec = skeleton
    source = iter(tensors)
    return pytree.tree_unflatten([next(source) if kept is None else kept[0] for kept in rest], spec)


def signature(tree: Any) -> tuple[Any, ...]:
    """A hashable summary of structure, shapes and dtypes."""
    leaves, spec = pytree.tree_flatten(tree)
    return (
        str(spec),
        *((tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else type(x).__name__ for x in leaves),
    )
