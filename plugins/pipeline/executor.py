"""Runs one rank's route through a schedule: any schedule, with the user's step as the stage function.

It is: the loop over actions, and what each takes from others and gives to them. It is not: the schedule, what a forward
or a backward of a stage is (`compute.py`), the transfers' details, or the optimizer step. One stage (no pipeline) is
the same loop with nothing to send, so micro-batches work alike with and without a pipeline.

Ranks wait for each other, so an error on one must not end its list: the rank computes no more, but still receives
and sends what its neighbours count on, up to the end; then it raises (`failures.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from parallax.plugins.pipeline.actions import Action
from parallax.plugins.pipeline.backward import Postponed
from parallax.plugins.pipeline.compute import Compute, Runner
from parallax.plugins.pipeline.failures import Failures
from parallax.plugins.pipeline.inflight import InFlight, Peak, Run
from parallax.plugins.pipeline.routes import Message, Route, Step
from parallax.plugins.pipeline.stage import StageState
from parallax.plugins.pipeline.timeline import Timeline
from parallax.plugins.pipeline.transfer import Transfer
from parallax.strategies.comm import Ledger

AHEAD = 1
"""How many actions before it is needed a message is asked for, so that it travels while the rank computes."""


class Executor:
    """Runs routes on this rank.

    Args:
        runner: the data engine.
        ledger: told what runs, for counting and error messages.
        state, transfer: the rank's part of the pipeline; None when there is none.
        recompute: keep only what a stage received, see `Compute`.

    Attributes:
        timeline: records when actions run, where one is given.
        peak: what the last run held.
    """

    def __init__(
        self,
        runner: Runner,
        ledger: Ledger,
        state: StageState | None = None,
        transfer: Transfer | None = None,
        *,
        recompute: bool = False,
    ) -> None:
        self._compute = Compute(runner, state, transfer, recompute=recompute)
        self._ledger, self._transfer = ledger, transfer
        self._failures = Failures()
        self.timeline: Timeline | None = None
        self.peak = Peak()

    def run(
        self,
        route: Route,
        step: Callable[[int], Any],
        keys: Sequence[Hashable],
        loss_of: Callable[[int, Any], Tensor] | None = None,
        note: str = "",
    ) -> dict[int, Any]:
        """Run `route`.

        Args:
            route: this rank's.
            step: micro-batch index -> output of the user's step (on the last stage; earlier ones unwind, and may run
                again for the same micro-batch).
            keys: per micro-batch, what its input shapes are (equal keys mean equal shapes).
            loss_of: (micro-batch index, output) -> the scaled scalar to run backward on; None when only forwards run.
            note: prefix for error messages, e.g. "step 12".

        Returns:
            Outputs of the user's step by micro-batch, on the rank of the last stage; empty elsewhere.

        Raises:
            Whatever the step raised on this rank; ValueError: a mistake seen on another rank in the first run;
            CommError: another rank has failed or gone.
        """
        self._failures.start(alone=self._transfer is None)
        self.peak = Peak()
        run = Run(route, step, keys, loss_of)
        for at, way in enumerate(route.steps):
            forward = way.action.kind == "F"
            with self._ledger.during("forward" if forward else "backward", f"{note}, {_words(way.action)}"):
                self._post(run, at)
                if forward:
                    self._forward(run, way)
                elif way.action.kind == "W":
                    self._finish(run, way)
                else:
                    self._backward(run, way)
        if self._transfer is not None:
            self._transfer.finish()
            self._failures.settle(self._transfer.comm, route.placement, training=loss_of is not None)
        return run.outputs

    def _post(self, run: Run, at: int) -> None:
        """Ask for what action `at` needs, and, so that transfers overlap, for what the next one will, if possible."""
        due, receives = run.route.due, run.route.receives
        soon = due[min(at + AHEAD, len(due) - 1)]
        while run.posted < soon:
            message, early = receives[run.posted], run.posted >= due[at]
            assert self._transfer is not None
            with self._failures.held():
                if not self._transfer.post(message, run.keys[message.microbatch], early=early):
                    return
            run.posted += 1

    def _take(self, run: Run, message: Message | None) -> list[Tensor]:
        """The tensors of a message, from another rank or from a stage of this one."""
        if message is None:
            return []
        if not _travels(message):
            return run.handed.pop(message, [])
        assert self._transfer is not None
        return self._transfer.take(message)

    # Forward

    def _forward(self, run: Run, way: Step) -> None:
        i, stage = way.action.microbatch, way.action.stage
        kept = run.flying[stage, i] = InFlight()
        self.peak.in_flight = max(self.peak.in_flight, len(run.flying))
        tensors = self._take(run, way.needs)
        kept.received = tensors if _travels(way.needs) else []
        kept.postponed = Postponed() if way.halves else None
        sent = False
        with self._failures.held():
            if not self._failures:
                if way.gives is None:
                    with self._span(way.action):
                        run.outputs[i] = self._compute.last_forward(run, way.action, kept, tensors)
                else:
                    with self._span(way.action):
                        outputs = self._compute.forward(run, way, kept, tensors)
                    self._hand_on(run, way.gives, outputs)
                    sent = True
        if not sent and way.gives is not None and self._transfer is not None and _travels(way.gives):
            self._transfer.send_nothing(way.gives, run.keys[i])
        if run.loss_of is None:
            self._release(run, way.action)

    def _hand_on(self, run: Run, message: Message, tensors: list[Tensor]) -> None:
        if _travels(message):
            assert self._transfer is not None
            self._transfer.send(message, tensors)
        else:
            run.handed[message] = [t.detach() for t in tensors]

    # Backward

    def _backward(self, run: Run, way: Step) -> None:
        """B, or I: gradients of the stage's input (and of its weights, unless they are postponed)."""
        kept = run.flying[way.action.stage, way.action.microbatch]
        grads = self._take(run, way.needs)
        with self._failures.held():
            if not self._failures:
                with self._span(way.action):
                    self._compute.backward(run, way.action, kept, grads)
        if way.gives is not None:
            self._send_back(run, way.gives, kept)
        kept.root = kept.grads = None
        self._reuse(run, way, kept, grads)
        if way.action.kind == "B":
            self._release(run, way.action)

    def _send_back(self, run: Run, message: Message, kept: InFlight) -> None:
        """Hand the gradients of what was received to the stage it came from."""
        grads = []
        for leaf in kept.leaves:
            grads.append(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf))
            leaf.grad = None
        if not _travels(message):
            run.handed[message] = grads
        elif self._transfer is not None and not self._failures:
            self._transfer.send(message, grads)
        elif self._transfer is not None:
            self._transfer.send_no_gradients(message, run.keys[message.microbatch])
        kept.leaves = []

    def _reuse(self, run: Run, way: Step, kept: InFlight, grads: list[Tensor]) -> None:
        """Give receive buffers back; those that something still needs, what is postponed above all, are kept for W."""
        if self._transfer is None:
            return
        kept.received = self._transfer.buffers.give(kept.received + (grads if _travels(way.needs) else []))
        if kept.postponed is not None:
            run.postponed_bytes += sum(kept.postponed.storages().values())
            self.peak.postponed_bytes = max(self.peak.postponed_bytes, run.postponed_bytes)

    def _finish(self, run: Run, way: Step) -> None:
        """W: the postponed gradients of the stage's weights."""
        kept = run.flying[way.action.stage, way.action.microbatch]
        with self._failures.held():
            if not self._failures and kept.postponed is not None:
                with self._span(way.action):
                    run.postponed_bytes -= sum(kept.postponed.storages().values())
                    self._compute.finish(kept.postponed)
        self._release(run, way.action)

    def _release(self, run: Run, action: Action) -> None:
        kept = run.flying.pop((action.stage, action.microbatch))
        if self._transfer is not None:
            self._transfer.buffers.give(kept.received)

    def _span(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self.timeline is None else self.timeline.span(action)


def _travels(message: Message | None) -> bool:
    """Whether there is a message and it goes to another rank."""
    return message is not None and message.source != message.target


def _words(action: Action) -> str:
    """An action in the words of error messages."""
    kind = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}[action.kind]
    return f"{kind} of micro-batch {action.microbatch} on stage {action.stage}"

