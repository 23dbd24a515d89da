"""Walking nested containers of tensors: batches, activations, outputs.

It is: a few pure functions over tuples, lists, dicts, and the containers Lightning moves to a device as well: any other
mapping (transformers' `BatchEncoding`, subclasses of dict) and dataclasses that hold tensors. It is not: aware of what
the tensors mean.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

Spec = pytree.TreeSpec


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Spec]:
    """Leaves of `tree` in a fixed order, and its structure. `is_leaf` stops at nodes."""
    return pytree.tree_flatten(_opened(tree), is_leaf)


def unflatten(leaves: list[Any], spec: Spec) -> Any:
    """The counterpart of `flatten`, with containers of the types they were."""
    return pytree.tree_unflatten(leaves, spec)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(name, leaf) of everything in `tree`: keys, fields and places joined by dots, in the order of `flatten`."""
    found, _ = pytree.tree_flatten_with_path(_opened(tree))

    def text(key: Any) -> str:
        return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))

    return [(".".join(map(text, path)), leaf) for path, leaf in found]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `fn` applied to every leaf."""
    return pytree.tree_map(fn, _opened(tree))


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Every tensor in `tree`, in a fixed order."""
    return (leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor))


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with `fn` applied to every tensor; everything else stays."""
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree)


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
    return map_leaves(lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, skeleton)


def signature(tree: Any) -> tuple[Any, ...]:
    """A hashable summary of structure, shapes and dtypes."""
    leaves, spec = flatten(tree)
    return (
        str(spec),
        *((tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else type(x).__name__ for x in leaves),
    )


# Containers torch's pytree takes for leaves


@dataclass(frozen=True)
class _Kind:
    """What a container is rebuilt from: its type and keys, and the one it was."""

    type: Any
    keys: tuple[Any, ...]
    like: Any = field(compare=False, repr=False)

    def build(self, values: Any) -> Any:
        content = dict(zip(self.keys, values, strict=True))
        if not is_dataclass(self.type) and not issubclass(self.type, UserDict):
            return self.type(content)
        made: Any = copy.copy(self.like)  # keeps what it has beside its content, as BatchEncoding does
        if isinstance(made, UserDict):
            made.data = content
        else:
            for name, value in content.items():
                object.__setattr__(made, name, value)  # also where it is frozen
        return made


@dataclass(frozen=True)
class _Opened:
    """Stands for a container in a tree that torch walks; unflattened it is the container again."""

    kind: _Kind
    values: list[Any]


pytree.register_pytree_node(
    _Opened,
    lambda node: (node.values, node.kind),
    lambda values, kind: kind.build(values),
    flatten_with_keys_fn=lambda node: (
        [(pytree.MappingKey(key), value) for key, value in zip(node.kind.keys, node.values, strict=True)],
        node.kind,
    ),
)


def _opened(tree: Any) -> Any:
    """`tree` with every container that torch would take for a leaf as an `_Opened`."""
    return pytree.tree_map(_open, tree)


def _open(leaf: Any) -> Any:
    if isinstance(leaf, Mapping):
        content = dict(leaf)
    elif is_dataclass(leaf) and not isinstance(leaf, type | Slot):
        content = {f.name: getattr(leaf, f.name) for f in fields(leaf) if hasattr(leaf, f.name)}
    else:
        return leaf
    values = [_opened(value) for value in content.values()]
    if not isinstance(leaf, Mapping) and not any(isinstance(x, Tensor | Slot) for x in pytree.tree_leaves(values)):
        return leaf
    return _Opened(_Kind(type(leaf), tuple(content), leaf), values)
