"""What makes one rank run only its own layers inside the user's unchanged code.

It is: `StageState` (what the running micro-batch receives and which layers are active), the gate put
on real layers and the stubs put in place of foreign modules. It is not: communication or scheduling.

A foreign layer before this stage's range returns what the previous stage sent, in the structure the real
layer would have returned. The gate on the last active layer raises `StageOutput`, which unwinds the user's
step and carries that layer's output to the executor. The gate overrides `__call__` by a subclass made on the
spot: names (FQNs) stay, and activation recomputation, which re-runs what is inside `__call__`, never meets it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallax.strategies.tree import tensors_of


class StageOutput(BaseException):
    """Unwinds the user's step after the last layer of a stage that is not the last one."""

    def __init__(self, value: Any) -> None:
        super().__init__("the output of a pipeline stage left its executor; this is a bug in Parallax")
        self.value = value


class StageState:
    """The moving parts one rank's gates and stubs share.

    Attributes:
        lo, hi: this stage's layers are [lo, hi) of the model's layer list.
        is_first, is_last: position of the stage.
        received: output of layer lo-1 as sent by the previous stage, for the running micro-batch.
        in_layers: whether the running micro-batch has reached this stage's layers.
    """

    def __init__(self, lo: int, hi: int, *, is_first: bool, is_last: bool) -> None:
        self.lo, self.hi = lo, hi
        self.is_first, self.is_last = is_first, is_last
        self.received: Any = None
        self.running = False
        self.in_layers = False

    def begin(self, received: Any) -> None:
        self.received, self.running, self.in_layers = received, True, False

    def end(self) -> None:
        self.received, self.running = None, False

    def hidden(self) -> Tensor:
        """The received activation: the first floating-point tensor the previous stage sent."""
        for tensor in tensors_of(self.received):
            if tensor.is_floating_point():
                return tensor
        raise ValueError(
            "a module of another pipeline stage was called outside a pipelined step; call the model only from "
            "training_step, validation_step, test_step or predict_step when pipeline_parallel_size > 1"
        )


def gate(layer: nn.Module, state: StageState) -> None:
    """Make `layer`, the last of this stage, hand its output to the executor (in place, name unchanged)."""
    cls = type(layer)

    def gated_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = cls.__call__(self, *args, **kwargs)
        if state.running and not state.is_last:
            raise StageOutput(output)
        return output

    gated = type(cls.__name__, (cls,), {"__call__": gated_call, "__module__": cls.__module__, "__doc__": cls.__doc__})
    layer.__class__ = gated


class Foreign(nn.Module):
    """A module that lives on another stage: no parameters, no state, only a role.

    Args:
        fqn: its name in the model.
        state: shared state of this rank's stage.
        like: the module it stands for; its plain attributes are kept, since some models read them in the
            loop over the layers (`layer.attention_type`).
    """

    is_foreign = True
    home = "another stage"

    def __init__(self, fqn: str, state: StageState, like: nn.Module | None = None) -> None:
        super().__init__()
        for name, value in vars(like).items() if like is not None else ():
            if not name.startswith("_") and isinstance(value, (str, int, float, bool, tuple, type(None))):
                setattr(self, name, value)
        self.fqn = fqn
        self.__dict__["state"] = state  # not a module attribute: shared, never copied into a checkpoint

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"{self.fqn!r} lives on {self.home} of the pipeline, so its attribute {name!r} does not exist here. "
                f"If the model reads it outside the module's own forward, tie it through a module instead "
                f"(head.weight = embedding.weight) or use pipeline_parallel_size=1"
            ) from None

    def extra_repr(self) -> str:
        return f"{self.fqn}, on {self.home}"


class ForeignLayer(Foreign):
    """A layer of an earlier stage: returns what the stage before this one sent."""

    home = "an earlier stage"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.state.hidden()  # refuses a call outside a step, where nothing was received
        self.state.in_layers = True
        return self.state.received


class ForeignBefore(Foreign):
    """A module with parameters that runs before the layers; it lives on the first stage.

    Its result only feeds shapes, masks and position tables here; the value itself is replaced at layer lo-1.
    """

    home = "the first stage"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.in_layers:
            raise ValueError(
                f"{self.fqn!r} is registered before the layers, so it was put on the first pipeline stage, but the "
                f"model uses it after them. Name it after the layers in pp_plan, for example pp_plan = "
                f"{{..., 'layers': ..., {self.fqn!r}: ...}}; if it is used on both sides, make two modules of it or "
                f"use pipeline_parallel_size=1"
            )
        return self.value(*args, **kwargs)

    def value(self, *args: Any, **kwargs: Any) -> Any:
        found = [t for t in tensors_of((args, kwargs)) if t.is_floating_point()]
        return found[0] if found else self.state.hidden()


class ForeignEmbedding(ForeignBefore):
    """The token embedding: the received activation has its shape, dtype and device."""

    def value(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.state.hidden()


class ForeignPositions(ForeignBefore):
    """A further embedding, added to the first one: a zero that broadcasts."""

    def value(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden = self.state.hidden()
        return torch.zeros((), dtype=hidden.dtype, device=hidden.device)


class ForeignAfter(Foreign):
    """A layer or module of a later stage: never reached, because the gate ends the step before it."""

    home = "a later stage"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"{self.fqn!r} lives on a later pipeline stage but was called before this stage's last layer. If it runs "
            f"before the layers, name it before them in pp_plan, for example pp_plan = {{{self.fqn!r}: ..., 'layers': "
            f"...}}; if it is used on both sides, make two modules of it or use pipeline_parallel_size=1"
        )
