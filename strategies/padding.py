"""Saved states without the zero rows that a parallel plugin appends (vocabulary padding).

It is: the removal and the return of padding in what a data engine saves. It is not: for flat partitions of ZeRO, in
which padding lies between other things (as DeepSpeed's own does); what has not its parameter's shape stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from parallax.plugins.base import ParamShard


class Padding:
    """Drops padding from states on their way out, and adds it on their way in.

    Args:
        shard_of: how a parameter sits in the whole one.
    """

    def __init__(self, shard_of: Callable[[str], ParamShard | None]) -> None:
        self._shard_of = shard_of

    def dropped_from_weights(self, state: dict[str, Any]) -> dict[str, Any]:
        """A module's state dict without padding; tensors that were one stay one."""
        memo: dict[int, Any] = {}
        return {fqn: memo.setdefault(id(value), self._drop(fqn, value)) for fqn, value in state.items()}

    def added_to_weights(self, state: dict[str, Any]) -> dict[str, Any]:
        return {fqn: self._add(fqn, value) for fqn, value in state.items()}

    def dropped_from_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        """What `MasterWeights.saved` gives, without padding; anything else as it is."""
        return _changed(state, self._drop)

    def added_to_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        return _changed(state, self._add)

    def _drop(self, fqn: str, value: Any) -> Any:
        shard = self._shard_of(fqn) if isinstance(value, Tensor) else None
        return value if shard is None else shard.without_padding(value)

    def _add(self, fqn: str, value: Any) -> Any:
        shard = self._shard_of(fqn) if isinstance(value, Tensor) else None
        return value if shard is None else shard.with_padding(value)


def _changed(state: dict[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    if "names" not in state:
        return state
    names, optimizer = state["names"], state["optimizer"]
    moments = {at: {k: change(names[at], v) for k, v in kept.items()} for at, kept in optimizer["state"].items()}
    masters = {fqn: change(fqn, master) for fqn, master in state["masters"].items()}
    return {**state, "optimizer": {**optimizer, "state": moments}, "masters": masters}
