"""Saved states without the zero rows that a parallel plugin appends (vocabulary padding).

It is: the removal and the return of padding in what a data engine saves. It is not: for flat partitions of ZeRO, in
which padding lies between other things (as DeepSpeed's own does); what has not its parameter's shape stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from parallax.plugins.base import ParamShard

WEIGHTS = {"state_dict", "current_model_state"}
"""Entries that map names of parameters to tensors; the second is that of Lightning's WeightAveraging."""


class Padding:
    """Drops padding from states on their way out, and adds it on their way in.

    Args:
        shard_of: how a parameter sits in the whole one.
    """

    def __init__(self, shard_of: Callable[[str], ParamShard | None]) -> None:
        self._shard_of = shard_of

    def dropped(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Lightning's dictionary without padding; tensors that were one stay one."""
        return _changed(checkpoint, self._drop)

    def added(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The counterpart of `dropped`."""
        return _changed(checkpoint, self._add)

    def _drop(self, fqn: str, value: Any) -> Any:
        shard = self._shard_of(fqn) if isinstance(value, Tensor) else None
        return value if shard is None else shard.without_padding(value)

    def _add(self, fqn: str, value: Any) -> Any:
        shard = self._shard_of(fqn) if isinstance(value, Tensor) else None
        return value if shard is None else shard.with_padding(value)


def _changed(checkpoint: dict[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    out = dict(checkpoint)
    for key in WEIGHTS & out.keys():
        memo: dict[int, Any] = {}
        out[key] = {fqn: memo.setdefault(id(value), change(fqn, value)) for fqn, value in out[key].items()}
    if "optimizer_states" in out:
        out["optimizer_states"] = [_changed_moments(state, change) for state in out["optimizer_states"]]
    return out


def _changed_moments(state: dict[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """`state` is what `MasterWeights.saved` gives, or what knows no names: flat partitions."""
    if "names" not in state:
        return state
    names, optimizer = state["names"], state["optimizer"]
    moments = {at: {k: change(names[at], v) for k, v in kept.items()} for at, kept in optimizer["state"].items()}
    masters = {fqn: change(fqn, master) for fqn, master in state["masters"].items()}
    return {**state, "optimizer": {**optimizer, "state": moments}, "masters": masters}
