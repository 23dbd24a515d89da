"""Runs one rank's action list: any schedule, with the user's step as the stage function.

It is: the loop over actions, and what one forward and one backward of a stage are. It is not: the
schedule, the transfers' details, or the optimizer step. One stage (no pipeline) is the same loop with nothing to
send, so micro-batches work alike with and without a pipeline.

Stages wait for each other, so an error on one must not end its list: the stage computes no more, but still receives
and sends what its neighbours count on, up to the end; then it raises. In the first run of a kind (training, evaluation)
the stages compare notes there, and a user mistake that shows on one of them is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from parallax.plugins.pipeline.actions import Action
from parallax.plugins.pipeline.stage import StageOutput, StageState
from parallax.plugins.pipeline.transfer import Incoming, StageFailed, Transfer
from parallax.strategies.agreement import is_refusal, text_of
from parallax.strategies.comm import CommError, Ledger


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
        self._failure: Exception | None = None
        self._compared: set[bool] = set()

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

        Raises:
            Whatever the step raised on this stage; ValueError: a mistake seen on another stage in the first run;
            CommError: another stage has failed or gone.
        """
        self._failure = None
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
                    if self._failure is None and (self._state is None or self._state.is_last):
                        outputs[i] = output
                        if loss_of is not None:
                            with self._holding():
                                flying[i].loss = loss_of(i, output)
            else:
                with self._ledger.during("backward", self._note(note, "backward", i)):
                    incoming = early.pop(action, None) or self._expect(action, keys, flying)
                    self._post_early(following, keys, flying, early)
                    self._backward(flying.pop(i), incoming)
        if self._transfer is not None:
            self._transfer.drain()
            self._compare(self._transfer, training=loss_of is not None)
        return outputs

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Keep an error for the end of the list, unless no stage waits for this one or contact is lost anyway."""
        try:
            yield
        except CommError:
            raise
        except Exception as error:
            if self._transfer is None:
                raise
            self._failure = self._failure or error

    def _compare(self, transfer: Transfer, *, training: bool) -> None:
        """Raise this stage's failure; in the first run of a kind (collective) also what another stage has met."""
        mine = self._failure
        if training in self._compared:
            if isinstance(mine, StageFailed):
                raise CommError(str(mine)) from mine
            if mine is not None:
                raise mine
            return
        self._compared.add(training)
        met = None if mine is None or isinstance(mine, StageFailed) else (text_of(mine), is_refusal(mine))
        failed = {stage: found for stage, found in enumerate(transfer.forward.gather_objects(met)) if found is not None}
        if not failed:
            return
        stage, (text, refusal) = next(iter(failed.items()))
        if met is not None and (not refusal or met == (text, refusal)):
            assert mine is not None
            raise mine
        if refusal:
            raise ValueError(text) from mine
        raise CommError(f"pipeline stage {stage} (rank {transfer.forward.ranks[stage]}) failed: {text}")

    def _note(self, note: str, kind: str, microbatch: int) -> str:
        stage = self._transfer.forward.index if self._transfer else 0
        return f"{note}, {kind} of micro-batch {microbatch} on stage {stage}"

    def _expect(self, action: Action, keys: Sequence[Hashable], flying: dict[int, _InFlight]) -> Incoming | None:
        """Post what `action` needs from a neighbour; None when it needs nothing."""
        state, transfer = self._state, self._transfer
        if state is None or transfer is None:
            return None
        if action.kind == "F" and not state.is_first:
            with self._holding():
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
        output, sent = None, None
        if self._failure is None:
            with self._holding():
                output = self._run_stage(index, step, value)
                sent = None if state.is_last else transfer.send_activation(key, output)
        if not state.is_last:
            sent = transfer.send_nothing(key) if sent is None else sent
            kept.outputs = [t for t in sent if t.requires_grad]
            output = None
        if not keep:
            self._release(kept)
        return kept, output

    def _run_stage(self, index: int, step: Callable[[int], Any], received: Any) -> Any:
        """The user's step up to this stage's end; `received` is what the stage before has sent."""
        assert self._state is not None and self._transfer is not None
        self._state.begin(received)
        try:
            reached_end, output = self._runner.forward(_catch, step, index)
        finally:
            self._state.end()
        if reached_end != self._state.is_last:
            raise ValueError(
                f"the step returned on stage {self._transfer.forward.index} without running all of the stage's layers; "
                f"training_step, validation_step and the like must call the whole model on every batch"
            )
        return output

    def _backward(self, kept: _InFlight, incoming: Incoming | None) -> None:
        grads = incoming.wait() if incoming is not None and kept.outputs else []
        with self._holding():
            if self._failure is None:
                self._run_backward(kept, grads)
        if self._transfer is not None and kept.leaves:
            self._transfer.send_gradients(kept.leaves)
        self._release(kept)

    def _run_backward(self, kept: _InFlight, grads: list[Tensor]) -> None:
        if kept.loss is not None:
            self._runner.backward(kept.loss)
        elif grads:
            self._runner.backward(_Seed.apply(len(grads), *kept.outputs, *grads))
            # A stage that passes its input on makes autograd return the very buffer that was received.
            passed_on = {leaf.grad.data_ptr() for leaf in kept.leaves if leaf.grad is not None}
            for grad in grads:
                if self._transfer is not None and grad.data_ptr() not in passed_on:
                    self._transfer.buffers.give(grad)

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
