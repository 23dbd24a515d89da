"""Numbers and arguments of a module in which heads or widths are counted, made those of this rank.

It is: `local_size` (an integer attribute, or one of the module's config) and `local_heads` (an argument of the forward)
carried out. It is not: layers with parameters (`layers.py`).
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import Tensor, nn

from parallax.strategies.comm import AxisComm

CONFIG = "config."


def read_size(module: nn.Module, path: str) -> int | None:
    """The integer `path` ("num_heads", "config.num_attention_heads") of a module; None when it has none."""
    owner: Any = getattr(module, "config", None) if path.startswith(CONFIG) else module
    value = getattr(owner, path.removeprefix(CONFIG), None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def write_size(module: nn.Module, path: str, value: int) -> None:
    """Set it for this module only: a config, which others share, is copied first."""
    if not path.startswith(CONFIG):
        setattr(module, path, value)
        return
    config = copy.copy(module.config)
    setattr(config, path.removeprefix(CONFIG), value)
    module.config = config


def cut_argument(module: nn.Module, name: str, heads: int, comm: AxisComm) -> None:
    """Give the forward of `module` this rank's heads of argument `name` (of `heads` heads in all)."""
    place = list(inspect.signature(type(module).forward).parameters).index(name) - 1

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if name in kwargs:
            return args, {**kwargs, name: local_heads(kwargs[name], heads, comm)}
        if len(args) > place:
            return (*args[:place], local_heads(args[place], heads, comm), *args[place + 1 :]), kwargs
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def local_heads(value: Any, heads: int, comm: AxisComm) -> Any:
    """This rank's heads of [batch, heads, ...] (4 dims; one head broadcasts and stays) or [batch x heads, ...] (3)."""
    if not isinstance(value, Tensor) or value.dim() < 3:
        return value
    mine = slice(comm.index * (heads // comm.size), (comm.index + 1) * (heads // comm.size))
    if value.dim() == 3:
        return value.view(-1, heads, *value.shape[1:])[:, mine].flatten(0, 1)
    return value[:, mine] if value.shape[1] == heads else value
