"""A backward with a torch function mode left on.

It is: what a mode calls for a backward it is asked about. It is not: a mode. Torch leaves a mode while the mode's own
code runs, and so during a backward that the mode passes on; but layers that are recomputed in backward call again what
the mode is there for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})


def backward_inside(mode: TorchFunctionMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    """`func`, one of `BACKWARDS`, called with these arguments and with `mode` on."""
    if func is Tensor.backward:
        return _backward(mode, torch.autograd.backward, *args, **kwargs)
    return _backward(mode, func, *args, **kwargs)


def _backward(
    mode: TorchFunctionMode, func: Any, outputs: Any, *args: Any, inputs: Any = None, **kwargs: Any
) -> Any:
    if func is torch.autograd.grad and inputs is None:
        inputs, *args = args  # type: ignore[assignment]
    if "gradient" in kwargs:  # as `Tensor.backward` calls it
        args = (kwargs.pop("gradient"), *args)
    with mode:
        return func(_edges(outputs), *args, inputs=_edges(inputs), **kwargs)


def _edges(tensors: Any) -> Any:
    """Tensors by their place in the graph: torch gives a call on tensors back to the mode, one on edges it runs."""
    if isinstance(tensors, Tensor):
        return get_gradient_edge(tensors)
    return None if tensors is None else tuple(map(_edges, tensors))
