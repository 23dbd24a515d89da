"""Finds arguments of layers that cannot be right on a later stage, before they train anything.

It is: a tensor type that remembers that its values are made up. On a later stage a module that runs before the layers
is a stub; what it returns has the right shape, dtype and device, which is all that masks and position tables read,
but not the right values. Whatever is computed from those values is a `StandIn` too; a real layer that is given one is
refused. It is not: on in every step; the first micro-batch of a stage, with and without autograd, is looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from parallax.strategies.agreement import is_refusal
from parallax.strategies.tree import map_tensors

SHAPE_ONLY = frozenset(
    {
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        torch.empty_like,
        torch.rand_like,
        torch.randn_like,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_full,
        Tensor.new_empty,
        Tensor.new_tensor,
    }
)
"""What reads a tensor's shape, dtype and device, but not its values."""


class StandIn(Tensor):
    """A tensor whose values are made up."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        return map_tensors(real, out) if func in SHAPE_ONLY else out


def made_up(value: Any) -> Any:
    """`value` with its tensors marked."""
    return map_tensors(lambda t: t.as_subclass(StandIn), value)


def real(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor) if isinstance(tensor, StandIn) else tensor


def refuse(layer: nn.Module, fqn: str, args: Any, kwargs: Any, sources: Sequence[str], layers: str) -> None:
    """Refuse a call of a real layer that is given made-up values.

    Args:
        layer: the layer.
        fqn: its name.
        args, kwargs: of the call.
        sources: modules whose stubs have run in this micro-batch.
        layers: name of the layer list.

    Raises:
        ValueError: naming the argument and the entries of pp_plan that have its values sent along.
    """
    wrong = [str(at) for at, value in enumerate(args) if _holds_stand_in(value)]
    wrong += [name for name, value in kwargs.items() if _holds_stand_in(value)]
    if not wrong:
        return
    name = wrong[0]
    if name.isdigit():
        names = list(inspect.signature(layer.forward).parameters)
        name = names[int(name)] if int(name) < len(names) else f"number {name}"
    raise ValueError(
        f"layer {fqn!r} takes the argument {name!r}, which is computed from the output of a module before the layers "
        f"({_listed(sources)}). {_fix(sources, name, layers)}"
    )


def explained(error: Exception, sources: Sequence[str], layers: str) -> Exception:
    """`error`, raised before the layers of a later stage, or what it comes from: stubs' outputs have one shape only."""
    if not sources or is_refusal(error):
        return error
    return ValueError(
        f"{type(error).__name__} before the layers {layers!r}: {error}. It may come from the output of a module before "
        f"the layers ({_listed(sources)}), of which only a stand-in is known here. {_fix(sources, 'extra', layers)}"
    )


def _listed(sources: Sequence[str]) -> str:
    return ", ".join(repr(source) for source in sources)


def _fix(sources: Sequence[str], name: str, layers: str) -> str:
    return (
        f"That module lives on the first pipeline stage. Name its output in pp_plan, also among the inputs of the "
        f"layers, and it is sent along: pp_plan = {{{sources[-1]!r}: ([...], [{name!r}]), {layers!r}: "
        f"(['hidden_states', {name!r}], ['hidden_states']), ...}}; or use pipeline_parallel_size=1"
    )


def _holds_stand_in(value: Any) -> bool:
    return any(isinstance(leaf, StandIn) for leaf in pytree.tree_leaves(value))
