"""How a module of unchanged code comes to do something more: its class becomes a subclass made on the spot.

It is: that swap, and access to the tensor a layer is called with, wherever its caller has put it. It is not: what the
subclass does. Unlike hooks, an overridden `__call__` stays outside of activation recomputation, and an overridden
`forward` is run again by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


def swap(module: nn.Module, **methods: Callable[..., Any]) -> None:
    """Give `module` a subclass of its class with `methods`; names, hooks and `isinstance` answers stay."""
    cls: type = type(module)
    module.__class__ = type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__, "__doc__": cls.__doc__})


def hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor]:
    """Where the hidden states are among a call's arguments, and the tensor: so named, or the first that is not ids.

    Raises:
        ValueError: there are none.
    """
    found = kwargs.get("hidden_states")
    if isinstance(found, Tensor):
        return "hidden_states", found
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for where, value in given:
        if isinstance(value, Tensor) and value.is_floating_point():
            return where, value
    raise ValueError("a layer was called without hidden states; use sequence_parallel=False")


def replaced(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], where: int | str, value: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another tensor at `where`."""
    if isinstance(where, int):
        return (*args[:where], value, *args[where + 1 :]), dict(kwargs)
    return args, {**kwargs, where: value}


def on_first(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's output with itself, or the first of several, changed."""
    if isinstance(out, tuple):
        return (change(out[0]), *out[1:])
    return change(out)
