"""What makes one rank run only its own layers inside the user's unchanged code.

It is: `StageState` (what the running micro-batch receives and which layers are active), the gate put
on real layers and the stubs put in place of foreign modules. It is not: communication or scheduling.

A rank holds one or several virtual stages of the one module, and the executor says which of them runs. A layer before
the running stage's range returns what the previous stage sent, in the structure the real layer would have returned.
The gate on the last layer of the range raises `StageOutput`, which unwinds the user's step and carries that layer's
output to the executor. Real layers are placed by a subclass made on the spot that overrides `__call__`: names (FQNs)
stay, and activation recomputation, which re-runs what is inside `__call__`, never meets the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
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

    Layers are counted through the model; what runs before them counts as layer -1, what runs after them as layer
    `num_layers`. So the ranges of all stages cover the model, and a stage runs layer i if lo <= i < hi.

    Args:
        chunks: for each virtual stage on this rank, its layers [lo, hi).
        num_layers: length of the model's layer list.

    Attributes:
        lo, hi: layers of the running stage.
        received: output of layer lo-1 as sent by the previous stage, for the running micro-batch.
        running: whether a stage runs at all; recomputation in a backward, for one, is not a run.
        in_layers: whether the running micro-batch has reached the running stage's layers.
        receives_part: whether what a stage receives holds a part of the tokens only; set by who cuts them.
    """

    def __init__(self, chunks: Mapping[int, tuple[int, int]], num_layers: int) -> None:
        self._ranges = {
            stage: (lo or -1, hi if hi < num_layers else num_layers + 1) for stage, (lo, hi) in chunks.items()
        }
        self.num_layers = num_layers
        self.lo, self.hi = -1, num_layers + 1
        self.received: Any = None
        self.running = False
        self.in_layers = False
        self.receives_part = False

    @property
    def is_last(self) -> bool:
        """Whether the running stage ends with the model."""
        return self.hi > self.num_layers

    def begin(self, stage: int, received: Any) -> None:
        self.lo, self.hi = self._ranges[stage]
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


def place(module: nn.Module, index: int, state: StageState, before: Foreign, after: Foreign) -> None:
    """Make `module`, real on this rank, take part in its own stage only (in place, name unchanged).

    While another stage of the rank runs, it behaves as the stub that other stage would have in its place: `before` when
    it comes before that stage's layers, else `after`. The last layer of its stage hands its output to the executor.

    Args:
        module: a layer, or a module before or after the layers.
        index: its layer number, as `StageState` counts.
        before, after: stubs for it; kept out of the module tree.
    """
    cls = type(module)

    def placed_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not state.running:
            return cls.__call__(self, *args, **kwargs)
        if not state.lo <= index < state.hi:
            return (before if index < state.lo else after)(*args, **kwargs)
        output = cls.__call__(self, *args, **kwargs)
        if index == state.hi - 1 and not state.is_last:
            raise StageOutput(output)
        return output

    names = {"__call__": placed_call, "__module__": cls.__module__, "__doc__": cls.__doc__}
    module.__class__ = type(cls.__name__, (cls,), names)


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
    """A layer of an earlier stage: returns what the stage before the running one sent."""

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
    """The token embedding: the received activation has its shape, dtype and device.

    Where only a part of the tokens was received (sequence parallelism), something of the shape of all of them.
    """

    def value(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden = self.state.hidden()
        if not self.state.receives_part:
            return hidden
        ids = next(t for t in tensors_of((args, kwargs)) if not t.is_floating_point())
        return torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand(*ids.shape, hidden.shape[-1])


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
