"""What a forward, a backward and its halves are on this rank's stages.

It is: the user's step as a stage's function, and the scalar its backward starts from. It is not: the order of actions
or what travels between ranks (`executor.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from parallax.plugins.pipeline.actions import Action
from parallax.plugins.pipeline.backward import Postponed, Seed
from parallax.plugins.pipeline.inflight import InFlight, Run
from parallax.plugins.pipeline.random_state import RandomState
from parallax.plugins.pipeline.routes import Step, incoming
from parallax.plugins.pipeline.stage import StageOutput, StageState
from parallax.plugins.pipeline.transfer import Transfer
from parallax.strategies.tree import map_tensors, tensors_of


class Runner(Protocol):
    """What runs forwards and backwards: a data engine."""

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any: ...

    def backward(self, loss: Tensor) -> None: ...


class Compute:
    """The work of actions.

    Args:
        runner: the data engine.
        state, transfer: the rank's part of the pipeline; None when there is none.
        recompute: keep only what a stage received, and run it once more before its backward. Not the last stage, whose
            run has the user's loss and logs; nor the first micro-batch of a shape, which tells what carries gradient.
    """

    def __init__(self, runner: Runner, state: StageState | None, transfer: Transfer | None, *, recompute: bool) -> None:
        self._runner, self._recompute = runner, recompute
        self._state, self._transfer = state, transfer

    def last_forward(self, run: Run, action: Action, kept: InFlight, tensors: list[Tensor]) -> Any:
        """The last stage: what the user's step returns; `kept` gets the loss."""
        output = self._run_stage(run, action, kept, tensors)
        if run.loss_of is None:
            return output
        kept.root = run.loss_of(action.microbatch, output)
        return map_tensors(Tensor.detach, output)  # its graph would keep what was received until the run's end

    def forward(self, run: Run, way: Step, kept: InFlight, tensors: list[Tensor]) -> list[Tensor]:
        """Any other stage: the tensors for the next; `kept` gets what their backward starts from."""
        assert way.gives is not None and self._transfer is not None
        key = run.keys[way.action.microbatch]
        if self._recompute and run.loss_of is not None and self._transfer.knows(way.gives, key):
            kept.inputs = tensors, RandomState.now(self._transfer.device)
        with nullcontext() if kept.inputs is None else torch.no_grad():
            output = self._run_stage(run, way.action, kept, tensors)
        outputs = self._transfer.pack(way.gives, key, output, graph=kept.inputs is None)
        if kept.inputs is None and run.loss_of is not None:
            _plant(kept, outputs)
        return outputs

    def backward(self, run: Run, action: Action, kept: InFlight, grads: list[Tensor]) -> None:
        """B or I, given the gradients of the stage's outputs."""
        if kept.inputs is not None:
            (tensors, random), kept.inputs = kept.inputs, None
            with random.restored():
                _plant(kept, list(tensors_of(self._run_stage(run, action, kept, tensors))))
        if kept.root is None:
            return
        if kept.grads is not None:
            kept.grads.extend(g.detach() for g in grads)  # aliases, so that who keeps one shows (`Buffers.give`)
        with kept.postponed or nullcontext():
            self._runner.backward(kept.root)

    def finish(self, postponed: Postponed) -> None:
        """W."""
        postponed.finish(self._runner.backward)

    def _run_stage(self, run: Run, action: Action, kept: InFlight, tensors: list[Tensor]) -> Any:
        """The user's step up to the stage's end, on what the stage before has handed on."""
        i, stage = action.microbatch, action.stage
        state, transfer = self._state, self._transfer
        if state is None or transfer is None:
            return self._runner.forward(run.step, i)
        value = None
        if (before := incoming(Action("F", i, stage), run.route.placement)) is not None:
            value, kept.leaves = transfer.unpack(before.edge, run.keys[i], tensors)
        state.begin(stage, value)
        try:
            reached_end, output = self._runner.forward(_catch, run.step, i, kept.postponed or nullcontext())
        except Exception as error:
            if (clearer := state.explained(error)) is not error:
                raise clearer from error
            raise
        finally:
            state.end()
        if reached_end != (stage + 1 == len(run.route.placement)):
            raise ValueError(
                f"the step returned on stage {stage} without running all of the stage's layers; "
                f"training_step, validation_step and the like must call the whole model on every batch"
            )
        return output


def _plant(kept: InFlight, outputs: list[Tensor]) -> None:
    """Let a backward start from the gradients of `outputs`, which are not there yet."""
    carriers = [t for t in outputs if t.requires_grad]
    if carriers:
        kept.grads = []
        kept.root = Seed.apply(kept.grads, *carriers)


def _catch(step: Callable[[int], Any], index: int, around: AbstractContextManager[Any]) -> tuple[bool, Any]:
    """(True, the user's output) when the step ran to its end, (False, the stage's output) when a gate ended it."""
    try:
        with around:
            return True, step(index)
    except StageOutput as stop:
        return False, stop.value
