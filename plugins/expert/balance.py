"""The auxiliary load-balancing loss of transformers' models over whole sequences, or over the global batch.

It is: what is put around a model's forward so that its own `load_balancing_loss_func` is given the router logits of
all ranks that count. It is not: the loss, whose formula and coefficient are the model's (Fedus et al. 2021, "Switch
Transformers", equations 4 to 6), or the trip of router logits between stages (`plugins/pipeline/captured.py`).

The loss is a product of two means over tokens, so means over parts are not the mean over the whole. Every rank of
the group computes it from the same logits; the gradients of these are summed back, and the average over the data axis
that follows divides by as much, so that the loss counts once.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from parallax.plugins.context.hf import sequence_of
from parallax.strategies.comm import AxisComm

FUNCTION = "load_balancing_loss_func"


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: AxisComm) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        comm: AxisComm = ctx.comm
        out = grad.new_empty(grad.shape[0] // comm.size, *grad.shape[1:])
        comm.reduce_scatter_into(out, grad.contiguous())
        return out, None


def gather_rows(part: Tensor, comm: AxisComm) -> Tensor:
    """[n, ...] -> [ranks n, ...] in axis order; backward the sum of the ranks' gradients of one's own rows."""
    return part if comm.size == 1 else cast(Tensor, _Gather.apply(part, comm))


def attach(model: nn.Module, comm: AxisComm) -> Callable[[], None]:
    """Let the auxiliary losses in `model` see the tokens of all ranks of `comm`. Returns what takes it back."""
    undo: list[Callable[[], None]] = []
    for module in model.modules() if comm.size > 1 else ():
        home = home_of(module)
        if home is not None:
            vars(module)["forward"] = _balanced(module.forward, module, home, comm)
            undo.append(functools.partial(vars(module).pop, "forward", None))

    def detach() -> None:
        for step in undo:
            step()

    return detach


def home_of(module: nn.Module) -> ModuleType | None:
    """The Python module of a model's code, when the model has an auxiliary loss."""
    if not hasattr(module, "router_aux_loss_coef"):
        return None
    homes = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return next((home for home in homes if home is not None and hasattr(home, FUNCTION)), None)


def _balanced(forward: Callable[..., Any], model: nn.Module, home: ModuleType, comm: AxisComm) -> Callable[..., Any]:
    @functools.wraps(forward)
    def balanced(*args: Any, **kwargs: Any) -> Any:
        with replaced(home, functools.partial(_whole, getattr(home, FUNCTION), model, comm)):
            return forward(*args, **kwargs)

    return balanced


@contextmanager
def replaced(home: ModuleType, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, the models in `home` compute their auxiliary loss by `function`."""
    before = getattr(home, FUNCTION)
    setattr(home, FUNCTION, function)
    try:
        yield
    finally:
        setattr(home, FUNCTION, before)


def arguments_of(loss: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any, Any]:
    """Arguments of a call of `loss` by name, and of these the router logits of each layer (None where there are none)
    and the mask."""
    found = inspect.signature(loss).bind(*args, **kwargs).arguments
    logits = found.get("gate_logits")
    return found, logits if isinstance(logits, tuple) else None, found.get("attention_mask")


def _whole(loss: Callable[..., Any], model: nn.Module, comm: AxisComm, *args: Any, **kwargs: Any) -> Any:
    """`loss` of the logits of all ranks; tokens that only pad a cut sequence do not count."""
    given, logits, mask = arguments_of(loss, *args, **kwargs)
    if logits is None:
        return loss(**given)
    given["gate_logits"] = tuple(gather_rows(one.reshape(-1, one.shape[-1]), comm) for one in logits)
    sequence = sequence_of(model)
    if sequence is not None and sequence.padded:
        real = sequence.real(logits[0].device).expand(sequence.rows, -1)
        mask = real.to(torch.int64) if mask is None else mask * real
    if mask is not None:
        given["attention_mask"] = comm.all_gather(mask.contiguous())
    return loss(**given)
