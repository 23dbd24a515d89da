"""The tensors of a module by name: parameters, buffers, and tensors kept as plain attributes.

It is: enumeration, and replacement of every occurrence of a tensor. It is not: what the new values are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_iter, tree_map_only

_REGISTRIES = frozenset(vars(nn.Module()))
"""Attributes every module has for torch's own use: `_parameters`, `_buffers`, `_modules`, hooks."""


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every (FQN, tensor): parameters, then buffers, then plain attributes; tied ones under each of their names.

    A tensor inside a list, tuple or dict attribute is named by its position: `rope.tables.0`.
    """
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, value in _attributes(owner):
            for path, leaf in tree_flatten_with_path(value)[0]:
                if isinstance(leaf, Tensor):
                    steps = [str(getattr(key, "idx", getattr(key, "key", key))) for key in path]
                    yield ".".join([*([prefix] if prefix else []), name, *steps]), leaf


def replace_tensors(module: nn.Module, new: Callable[[Tensor], Tensor]) -> None:
    """Put `new(tensor)` in the place of every tensor of `module`, in all its owners.

    `new` is called for each occurrence, and must return the same object for the same object.
    """
    for owner in module.modules():
        for registry in (owner._parameters, owner._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    registry[name] = new(tensor)  # type: ignore[assignment]
        for name, value in list(_attributes(owner)):
            changed = tree_map_only(Tensor, new, value)
            pairs = zip(tree_iter(value), tree_iter(changed), strict=True)
            if any(old is not made for old, made in pairs):
                vars(owner)[name] = changed


def _attributes(owner: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if name not in _REGISTRIES and isinstance(value, Tensor | list | tuple | dict):
            yield name, value
