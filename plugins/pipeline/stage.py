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

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallax.plugins.pipeline.captured import with_captured, without_captured
from parallax.plugins.pipeline.foreign import Foreign
from parallax.plugins.pipeline.stand_in import explained, made_up
from parallax.strategies.tree import tensors_of

OUTSIDE = (
    "a module of another pipeline stage was called outside a pipelined step; call the model only from training_step, "
    "validation_step, test_step or predict_step when pipeline_parallel_size > 1 (summaries and loggers call one "
    "that has an example_input_array: leave it None)"
)


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
        layers: its name.
        carries: modules before the layers whose outputs travel along to every later stage (`Structure.carried`).

    Attributes:
        lo, hi: layers of the running stage.
        received: output of layer lo-1 as sent by the previous stage, for the running micro-batch.
        running: whether a stage runs at all; recomputation in a backward, for one, is not a run.
        in_layers: whether the running micro-batch has reached the running stage's layers.
        receives_part: whether what a stage receives holds a part of the tokens only; set by who cuts them.
        embedded: whether an embedding's stub has run in it.
        carried, replayed: outputs of the modules of `carries` in it, in order of their calls; how many each has used.
        checking: whether arguments of layers are looked at (see `stand_in.py`).
        stand_ins: modules whose stubs have run in it, while checking.
    """

    def __init__(
        self,
        chunks: Mapping[int, tuple[int, int]],
        num_layers: int,
        layers: str = "layers",
        carries: Sequence[str] = (),
    ) -> None:
        self._ranges = {
            stage: (lo or -1, hi if hi < num_layers else num_layers + 1) for stage, (lo, hi) in chunks.items()
        }
        self.num_layers, self.layers = num_layers, layers
        self.lo, self.hi = -1, num_layers + 1
        self.received: Any = None
        self.running = self.in_layers = self.embedded = self.checking = self.receives_part = False
        self.carries = tuple(carries)
        self.carried: dict[str, list[Any]] = {}
        self.replayed: dict[str, int] = {}
        self.stand_ins: list[str] = []
        self._checked: set[tuple[int, bool]] = set()

    @property
    def is_first(self) -> bool:
        """Whether the running stage begins with the model."""
        return self.lo < 0

    @property
    def is_last(self) -> bool:
        """Whether the running stage ends with the model."""
        return self.hi > self.num_layers

    def begin(self, stage: int, received: Any) -> None:
        """`received` is what the previous stage's `pack` made; None on the first stage."""
        self.lo, self.hi = self._ranges[stage]
        self.running, self.in_layers, self.embedded = True, False, False
        self.received, self.carried = received if self.carries and not self.is_first else (received, {})
        self._mode = (stage, torch.is_grad_enabled())
        self.checking = not self.is_first and self._mode not in self._checked
        self.stand_ins, self.replayed = [], {}

    def end(self) -> None:
        self._checked.add(self._mode)
        self.received, self.carried, self.running = None, {}, False

    def explained(self, error: Exception) -> Exception:
        """What to raise for an error of the user's step: one that stand-ins have caused says so."""
        if not self.checking or self.in_layers:
            return error
        return explained(error, self.stand_ins, self.layers)

    def pack(self, output: Any) -> Any:
        """What the stage hands on when its last layer has returned `output`."""
        output = with_captured(output)
        return (output, self.carried) if self.carries else output

    def hidden(self) -> Tensor:
        """The received activation: the first floating-point tensor the previous stage sent."""
        for tensor in tensors_of(self.received):
            if tensor.is_floating_point():
                return tensor
        raise ValueError(OUTSIDE)


def place(module: nn.Module, index: int, state: StageState, before: Foreign, after: Foreign) -> None:
    """Make `module`, real on this rank, take part in its own stage only (in place, name unchanged).

    While another stage of the rank runs, it behaves as the stub that other stage would have in its place: `before` when
    it comes before that stage's layers, else `after`. The last layer of its stage hands its output to the executor.
    A module that must see what it would have been called with has a `passed_by(args, kwargs)`.

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
            if (passed_by := getattr(self, "passed_by", None)) is not None:
                passed_by(args, kwargs)
            return (before if index < state.lo else after)(*args, **kwargs)
        output = cls.__call__(self, *args, **kwargs)
        if index == state.hi - 1 and not state.is_last:
            raise StageOutput(state.pack(output))
        return output

    names = {"__call__": placed_call, "__module__": cls.__module__, "__doc__": cls.__doc__}
    module.__class__ = type(cls.__name__, (cls,), names)


class ForeignLayer(Foreign):
    """A layer of an earlier stage: returns what the stage before the running one sent."""

    home = "an earlier stage"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.state.hidden()  # refuses a call outside a step, where nothing was received
        if not self.state.in_layers:
            self.state.received = without_captured(self.state.received)
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
                f"use pipeline_parallel_size=1; if the step calls the model twice, call it once, on both inputs joined"
            )
        value = self.value(*args, **kwargs)
        if self.state.checking:
            self.state.stand_ins.append(self.fqn)
            value = made_up(value)
        return value

    def value(self, *args: Any, **kwargs: Any) -> Any:
        found = [t for t in tensors_of((args, kwargs)) if t.is_floating_point()]
        return found[0] if found else self.state.hidden()


class ForeignEmbedding(ForeignBefore):
    """An embedding. The first to run is the tokens': the received activation has its shape, dtype and device.

    Where only a part of the tokens was received (sequence parallelism), something shaped as all of them. A further
    embedding (positions) is added to the first: a zero that broadcasts.
    """

    def value(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden = self.state.hidden()
        first, self.state.embedded = not self.state.embedded, True
        if first and not self.state.receives_part:
            return hidden
        zero = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
        if not first:
            return zero
        ids = next(t for t in tensors_of((args, kwargs)) if not t.is_floating_point())
        return zero.expand(*ids.shape, hidden.shape[-1])


class ForeignCarried(Foreign):
    """A module before the layers whose outputs have come along with the activation: they are the real ones."""

    home = "the first stage"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.state.hidden()  # refuses a call outside a step
        if self.fqn not in self.state.carried:
            raise ValueError(
                f"{self.fqn!r} is to be sent along the pipeline (pp_plan), but it has not run on the first stage "
                f"before its last layer; it must be called before the layers, or be left out of pp_plan"
            )
        outputs = self.state.carried[self.fqn]
        at = self.state.replayed.get(self.fqn, 0)
        self.state.replayed[self.fqn] = at + 1
        if at >= len(outputs):
            raise ValueError(
                f"{self.fqn!r} runs more often on this pipeline stage than on the first ({len(outputs)} times); a "
                f"module whose output is sent along must run before the layers only"
            )
        return outputs[at]


def carry(module: nn.Module, fqn: str, state: StageState) -> None:
    """Let `module`, real on the first stage, put its outputs among what is sent along (in place, name unchanged)."""
    cls = type(module)

    def carried_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = cls.__call__(self, *args, **kwargs)
        if state.running and state.is_first:
            state.carried.setdefault(fqn, []).append(output)
        return output

    names = {"__call__": carried_call, "__module__": cls.__module__, "__doc__": cls.__doc__}
    module.__class__ = type(cls.__name__, (cls,), names)


class ForeignAfter(Foreign):
    """A layer or module of a later stage: never reached, because the gate ends the step before it."""

    home = "a later stage"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.state.running:
            raise ValueError(OUTSIDE)
        raise ValueError(
            f"{self.fqn!r} lives on a later pipeline stage but was called before this stage's last layer. If it runs "
            f"before the layers, name it before them in pp_plan, for example pp_plan = {{{self.fqn!r}: ..., 'layers': "
            f"...}}; if it is used on both sides, make two modules of it or use pipeline_parallel_size=1"
        )
