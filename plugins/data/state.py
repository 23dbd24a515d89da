"""Copies of states that can be saved: every tensor on its own storage.

It is: what the data engines share about saving. It is not: a file format, or a change of layout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def cloned(state: Any, memo: dict[int, Tensor] | None = None) -> Any:
    """`state` with every tensor cloned, so that a view does not drag its whole flat buffer into a file.

    A tensor that occurs twice is cloned once. Containers are dicts, lists and tuples; anything else is kept.
    """
    memo = {} if memo is None else memo
    if isinstance(state, Tensor):
        if id(state) not in memo:
            memo[id(state)] = state.detach().clone()
        return memo[id(state)]
    if isinstance(state, dict):
        return type(state)((k, cloned(v, memo)) for k, v in state.items())
    if isinstance(state, (list, tuple)):
        return type(state)(cloned(v, memo) for v in state)
    return state


def trained_names(module: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """FQN -> parameter, for every trainable parameter the optimizer holds, in the module's order.

    Raises:
        ValueError: the optimizer holds a trainable parameter that is not part of the module, or holds one twice.
    """
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    ids = {id(p) for p in held}
    if len(ids) != len(held):
        raise ValueError(
            f"the optimizer holds {len(held) - len(ids)} parameter(s) twice; give every parameter to one group only"
        )
    names = {name: p for name, p in module.named_parameters() if id(p) in ids}
    if len(names) != len(held):
        known = {id(p) for p in names.values()}
        shapes = [tuple(p.shape) for p in held if id(p) not in known]
        raise ValueError(
            f"the optimizer holds {len(shapes)} parameter(s) that are not part of the module, of shapes "
            f"{shapes[:5]}; create the optimizer from self.parameters() in configure_optimizers"
        )
    return names


def load_tensors(module: nn.Module, current: dict[str, Any], state: dict[str, Any]) -> None:
    """Copy `state` into the tensors of `current` (same keys and shapes); extra states go to their modules.

    Raises:
        ValueError: keys or shapes differ.
    """
    missing, unknown = sorted(current.keys() - state.keys()), sorted(state.keys() - current.keys())
    if missing or unknown:
        raise ValueError(
            f"the saved weights do not fit the module: {len(missing)} missing {missing[:5]}, "
            f"{len(unknown)} unknown {unknown[:5]}"
        )
    for name, value in state.items():
        own = current[name]
        if not isinstance(own, Tensor):
            module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        elif own.shape != value.shape:
            raise ValueError(f"the saved {name} has shape {tuple(value.shape)}, this rank's has {tuple(own.shape)}")
        else:
            own.detach().copy_(value)
