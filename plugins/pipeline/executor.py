"""Runs one rank's action list: any schedule, with the user's step as the stage function.

It is: the loop over actions, and what one forward and one backward of a stage are. It is not: the
schedule, the transfers' details, or the optimizer step. One stage (no pipeline) is the same loop with nothing to
send, so micro-batches work alike with and without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from parallax.plugins.pipeline.schedules import Action
from parallax.plugins.pipeline.stage import StageOutput, StageState
from parallax.plugins.pipeline.transfer import Incoming, Transfer
from parallax.strategies.comm import Ledger


class Runner(Protocol):
    """What runs forwards and backwards: a data engine."""

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any: ...

    def backward(self, loss: Tensor) -> None: ...


class _Seed(torch.autograd.Function):
    """A scalar whose backward hands given gradients to given outputs, at no arithmetic cost.

    DeepSpeed's engine takes only scalars; `(output * grad).sum()` would be the same at the price of two passes.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.grads = tensors[count:]
        return torch.zeros((), dtype=torch.float32, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, ()
        return (None, *grads, *(None for _ in grads))


@dataclass
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    leaves: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None


class Executor:
    """Runs action lists on this rank.

    Args:
        runner: the data engine.
        ledger: told what runs, for counting and error messages.
        state, transfer: the rank's stage; None when there is one stage only.
    """

    def __init__(
        self, runner: Runner, ledger: Ledger, state: StageState | None = None, transfer: Transfer | None = None
    ) -> None:
        self._runner, self._ledger = runner, ledger
        self._state, self._transfer = state, transfer

    def run(
        self,
        actions: Sequence[Action],
        step: Callable[[int], Any],
        keys: Sequence[Hashable],
        loss_of: Callable[[int, Any], Tensor] | None = None,
        note: str = "",
    ) -> dict[int, Any]:
        """Run `actions`.

        Args:
            actions: this stage's list.
            step: micro-batch index -> output of the user's step (on the last stage; earlier ones unwind).
            keys: per micro-batch, what its input shapes are (equal keys mean equal shapes).
            loss_of: (micro-batch index, output) -> the scaled scalar to run backward on; None when only forwards run.
            note: prefix for error messages, e.g. "step 12".

        Returns:
            Outputs of the user's step by micro-batch, on the last stage; empty elsewhere.
        """
        flying: dict[int, _InFlight] = {}
        outputs: dict[int, Any] = {}
        early: dict[Action, Incoming] = {}
        for at, action in enumerate(actions):
            following = actions[at + 1] if at + 1 < len(actions) else None
            i = action.microbatch
            if action.kind == "F":
                with self._ledger.during("forward", self._note(note, "forward", i)):
                    incoming = early.pop(action, None) or self._expect(action, keys, flying)
                    self._post_early(following, keys, flying, early)
                    flying[i], output = self._forward(i, step, keys[i], incoming, keep=loss_of is not None)
                    if self._state is None or self._state.is_last:
                        outputs[i] = output
                        if loss_of is not None:
                            flying[i].loss = loss_of(i, output)
            else:
                with self._ledger.during("backward", self._note(note, "backward", i)):
                    incoming = early.pop(action, None) or self._expect(action, keys, flying)
                    self._post_early(following, keys, flying, early)
                    self._backward(flying.pop(i), incoming)
        if self._transfer is not None:
            self._transfer.drain()
        return outputs

    def _note(self, note: str, kind: str, microbatch: int) -> str:
        stage = self._transfer.forward.index if self._transfer else 0
        return f"{note}, {kind} of micro-batch {microbatch} on stage {stage}"

    def _expect(self, action: Action, keys: Sequence[Hashable], flying: dict[int, _InFlight]) -> Incoming | None:
        """Post what `action` needs from a neighbour; None when it needs nothing."""
        state, transfer = self._state, self._transfer
        if state is None or transfer is None:
            return None
        if action.kind == "F" and not state.is_first:
            transfer.describe(keys[action.microbatch])
            return transfer.expect_activation(keys[action.microbatch])
        if action.kind == "B" and not state.is_last:
            return transfer.expect_gradients(flying[action.microbatch].outputs)
        return None

    def _post_early(
        self,
        action: Action | None,
        keys: Sequence[Hashable],
        flying: dict[int, _InFlight],
        early: dict[Action, Incoming],
    ) -> None:
        """Post the receives of the next action before computing this one, so that the transfer overlaps."""
        state, transfer = self._state, self._transfer
        if action is None or state is None or transfer is None or action in early:
            return
        incoming = None
        if action.kind == "F" and not state.is_first:
            incoming = transfer.expect_activation(keys[action.microbatch])
        elif action.kind == "B" and not state.is_last and action.microbatch in flying:
            incoming = transfer.expect_gradients(flying[action.microbatch].outputs)
        if incoming is not None:
            early[action] = incoming

    def _forward(
        self, index: int, step: Callable[[int], Any], key: Hashable, incoming: Incoming | None, *, keep: bool
    ) -> tuple[_InFlight, Any]:
        state, transfer = self._state, self._transfer
        kept = _InFlight()
        if state is None or transfer is None:
            return kept, self._runner.forward(step, index)
        value = None
        if incoming is not None:
            kept.received = incoming.wait()
            value, kept.leaves = transfer.activation(key, kept.received)
        state.begin(value)
        try:
            reached_end, output = self._runner.forward(_catch, step, index)
        finally:
            state.end()
        if reached_end != state.is_last:
            raise ValueError(
                f"the step returned on stage {transfer.forward.index} without running all of the stage's layers; "
                f"training_step, validation_step and the like must call the whole model on every batch"
            )
        if not state.is_last:
            tensors = transfer.send_activation(key, output)
            kept.outputs = [t for t in tensors if t.requires_grad]
            output = None
        if not keep:
            self._release(kept)
        return kept, output

    def _backward(self, kept: _InFlight, incoming: Incoming | None) -> None:
        if kept.loss is not None:
            self._runner.backward(kept.loss)
        elif incoming is not None and kept.outputs:
            grads = incoming.wait()
            self._runner.backward(_Seed.apply(len(grads), *kept.outputs, *grads))
            # A stage that passes its input on makes autograd return the very buffer that was received.
            passed_on = {leaf.grad.data_ptr() for leaf in kept.leaves if leaf.grad is not None}
            for grad in grads:
                if self._transfer is not None and grad.data_ptr() not in passed_on:
                    self._transfer.buffers.give(grad)
        if self._transfer is not None and kept.leaves:
            self._transfer.send_gradients(kept.leaves)
        self._release(kept)

    def _release(self, kept: _InFlight) -> None:
        if self._transfer is not None:
            for tensor in kept.received:
                self._transfer.buffers.give(tensor)
        kept.received, kept.outputs, kept.leaves, kept.loss = [], [], [], None


def _catch(step: Callable[[int], Any], index: int) -> tuple[bool, Any]:
    """(True, the user's output) when the step ran to its end, (False, the stage's output) when a gate ended it."""
    try:
        return True, step(index)
    except StageOutput as stop:
        return False, stop.value
