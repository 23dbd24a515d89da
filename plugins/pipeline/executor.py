"""Runs one rank's route through a schedule: any schedule, with the user's step as the stage function.

It is: the loop over actions, and what one forward and one backward of a stage are. It is not: the
schedule, the transfers' details, or the optimizer step. One stage (no pipeline) is the same loop with nothing to
send, so micro-batches work alike with and without a pipeline.

Ranks wait for each other, so an error on one must not end its list: the rank computes no more, but still receives
and sends what its neighbours count on, up to the end; then it raises. In the first run of a kind (training, evaluation)
the ranks compare notes there, and a user mistake that shows on one of them is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from parallax.plugins.pipeline.actions import Action
from parallax.plugins.pipeline.backward import Postponed, Seed
from parallax.plugins.pipeline.routes import Message, Route, Step
from parallax.plugins.pipeline.stage import StageOutput, StageState
from parallax.plugins.pipeline.timeline import Timeline
from parallax.plugins.pipeline.transfer import StageFailed, Transfer, addresses
from parallax.strategies.agreement import is_refusal, text_of
from parallax.strategies.comm import CommError, Ledger

AHEAD = 1
"""How many actions before it is needed a message is asked for, so that it travels while the rank computes."""


class Runner(Protocol):
    """What runs forwards and backwards: a data engine."""

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any: ...

    def backward(self, loss: Tensor) -> None: ...


@dataclass
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and the end of its backward.

    Attributes:
        leaves: what it received, as far as gradients go back.
        received: the buffers it was received in.
        root: the scalar backward starts from: the scaled loss, or a `Seed` of the outputs.
        grads: where the seed finds the outputs' gradients; None on the last stage.
        postponed: where the weights' gradients wait when the backward is split.
    """

    leaves: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    root: Tensor | None = None
    grads: list[Tensor] | None = None
    postponed: Postponed | None = None


@dataclass
class _Run:
    """One run of a route: its inputs, and what is on its way."""

    route: Route
    step: Callable[[int], Any]
    keys: Sequence[Hashable]
    loss_of: Callable[[int, Any], Tensor] | None
    flying: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    handed: dict[Message, list[Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    posted: int = 0
    postponed_bytes: int = 0


@dataclass
class Peak:
    """The most this rank has held at once in its last run.

    Attributes:
        in_flight: micro-batches of one virtual stage each, from the start of its F to the end of its B or W.
        postponed_bytes: what was held for W, over all of them.
    """

    in_flight: int = 0
    postponed_bytes: int = 0


class Executor:
    """Runs routes on this rank.

    Args:
        runner: the data engine.
        ledger: told what runs, for counting and error messages.
        state, transfer: the rank's part of the pipeline; None when there is none.

    Attributes:
        timeline: records when actions run, where one is given.
        peak: what the last run held.
    """

    def __init__(
        self, runner: Runner, ledger: Ledger, state: StageState | None = None, transfer: Transfer | None = None
    ) -> None:
        self._runner, self._ledger = runner, ledger
        self._state, self._transfer = state, transfer
        self._failure: Exception | None = None
        self._compared: set[bool] = set()
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
            step: micro-batch index -> output of the user's step (on the last stage; earlier ones unwind).
            keys: per micro-batch, what its input shapes are (equal keys mean equal shapes).
            loss_of: (micro-batch index, output) -> the scaled scalar to run backward on; None when only forwards run.
            note: prefix for error messages, e.g. "step 12".

        Returns:
            Outputs of the user's step by micro-batch, on the rank of the last stage; empty elsewhere.

        Raises:
            Whatever the step raised on this rank; ValueError: a mistake seen on another rank in the first run;
            CommError: another rank has failed or gone.
        """
        self._failure, self.peak = None, Peak()
        run = _Run(route, step, keys, loss_of)
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
            self._compare(self._transfer, route, training=loss_of is not None)
        return run.outputs

    def _post(self, run: _Run, at: int) -> None:
        """Ask for what action `at` needs, and, so that transfers overlap, for what the next one will, if possible."""
        due, receives = run.route.due, run.route.receives
        soon = due[min(at + AHEAD, len(due) - 1)]
        while run.posted < soon:
            message, early = receives[run.posted], run.posted >= due[at]
            assert self._transfer is not None
            with self._holding():
                if not self._transfer.post(message, run.keys[message.microbatch], early=early):
                    return
            run.posted += 1

    def _take(self, run: _Run, message: Message | None) -> list[Tensor]:
        """The tensors of a message, from another rank or from a stage of this one."""
        if message is None:
            return []
        if message.source == message.target:
            return run.handed.pop(message, [])
        assert self._transfer is not None
        return self._transfer.take(message)

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

    def _compare(self, transfer: Transfer, route: Route, *, training: bool) -> None:
        """Raise this rank's failure; in the first run of a kind (collective) also what another rank has met."""
        mine = self._failure
        if training in self._compared:
            if isinstance(mine, StageFailed):
                raise CommError(str(mine)) from mine
            if mine is not None:
                raise mine
            return
        self._compared.add(training)
        met = None if mine is None or isinstance(mine, StageFailed) else (text_of(mine), is_refusal(mine))
        failed = {index: found for index, found in enumerate(transfer.comm.gather_objects(met)) if found is not None}
        if not failed:
            return
        index, (text, refusal) = next(iter(failed.items()))
        if met is not None and (not refusal or met == (text, refusal)):
            assert mine is not None
            raise mine
        if refusal:
            raise ValueError(text) from mine
        stages = [str(stage) for stage, at in enumerate(route.placement) if at == index]
        who = f"pipeline stage{'s' if len(stages) > 1 else ''} {', '.join(stages)} (rank {transfer.comm.ranks[index]})"
        raise CommError(f"{who} failed: {text}")

    # Forward

    def _forward(self, run: _Run, way: Step) -> None:
        i, stage = way.action.microbatch, way.action.stage
        kept = run.flying[stage, i] = _InFlight()
        self.peak.in_flight = max(self.peak.in_flight, len(run.flying))
        tensors = self._take(run, way.needs)
        kept.received = tensors if way.needs is not None and way.needs.source != way.needs.target else []
        kept.postponed = Postponed() if way.halves else None
        sent = False
        with self._holding():
            if self._failure is None:
                with self._span(way.action):
                    output = self._run_stage(run, way, kept, tensors)
                    if way.gives is not None:
                        self._hand_on(run, way.gives, kept, output)
                        sent = True
                    else:
                        run.outputs[i] = output
                        kept.received = _not_in(kept.received, output)
                        kept.root = None if run.loss_of is None else run.loss_of(i, output)
        if not sent and way.gives is not None and self._transfer is not None and way.gives.source != way.gives.target:
            self._transfer.send_nothing(way.gives, run.keys[i])
        if run.loss_of is None:
            self._release(run, way.action)

    def _run_stage(self, run: _Run, way: Step, kept: _InFlight, tensors: list[Tensor]) -> Any:
        """The user's step up to the stage's end, on what the stage before has handed on."""
        i, stage = way.action.microbatch, way.action.stage
        state, transfer = self._state, self._transfer
        if state is None or transfer is None:
            return self._runner.forward(run.step, i)
        value = None
        if way.needs is not None:
            value, kept.leaves = transfer.unpack(way.needs.edge, run.keys[i], tensors)
        state.begin(stage, value)
        try:
            reached_end, output = self._runner.forward(_catch, run.step, i, kept.postponed or nullcontext())
        except Exception as error:
            if (clearer := state.explained(error)) is not error:
                raise clearer from error
            raise
        finally:
            state.end()
        if reached_end != (way.gives is None):
            raise ValueError(
                f"the step returned on stage {stage} without running all of the stage's layers; "
                f"training_step, validation_step and the like must call the whole model on every batch"
            )
        return output

    def _hand_on(self, run: _Run, message: Message, kept: _InFlight, output: Any) -> None:
        assert self._transfer is not None
        tensors = self._transfer.pack(message, run.keys[message.microbatch], output)
        carriers = [t for t in tensors if t.requires_grad]
        if carriers and run.loss_of is not None:
            kept.grads = []
            kept.root = Seed.apply(kept.grads, *carriers)
        if message.source == message.target:
            run.handed[message] = [t.detach() for t in tensors]
            kept.received = _not_in(kept.received, tensors)
        else:
            self._transfer.send(message, tensors)

    # Backward

    def _backward(self, run: _Run, way: Step) -> None:
        """B, or I: gradients of the stage's input (and of its weights, unless they are postponed)."""
        kept = run.flying[way.action.stage, way.action.microbatch]
        grads = self._take(run, way.needs)
        with self._holding():
            if self._failure is None and kept.root is not None:
                with self._span(way.action), kept.postponed or nullcontext():
                    if kept.grads is not None:
                        kept.grads.extend(grads)
                    self._runner.backward(kept.root)
        if way.gives is not None:
            self._send_back(run, way.gives, kept)
        self._reuse(run, way, kept, grads)
        kept.root = kept.grads = None
        if way.action.kind == "B":
            self._release(run, way.action)

    def _send_back(self, run: _Run, message: Message, kept: _InFlight) -> None:
        """Hand the gradients of what was received to the stage it came from."""
        grads = []
        for leaf in kept.leaves:
            grads.append(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf))
            leaf.grad = None
        if message.source == message.target:
            run.handed[message] = grads
        elif self._transfer is not None and self._failure is None:
            self._transfer.send(message, grads)
        elif self._transfer is not None:
            self._transfer.send_no_gradients(message, run.keys[message.microbatch])
        kept.leaves = []

    def _reuse(self, run: _Run, way: Step, kept: _InFlight, grads: list[Tensor]) -> None:
        """Give receive buffers back, except those that what is postponed still needs; these are kept for W.

        A stage that passes its input on makes autograd return the very buffer its gradient was received in.
        """
        if self._transfer is None:
            return
        remote = way.needs is not None and way.needs.source != way.needs.target
        used = kept.received + (grads if remote else [])
        if way.gives is not None:
            used = _not_in(used, run.handed.get(way.gives, []))
        postponed: dict[int, int] = {}
        if kept.postponed is not None:
            postponed = kept.postponed.storages()
            run.postponed_bytes += sum(postponed.values())
            self.peak.postponed_bytes = max(self.peak.postponed_bytes, run.postponed_bytes)
        kept.received = [t for t in used if t.untyped_storage().data_ptr() in postponed]
        self._transfer.give(t for t in used if t.untyped_storage().data_ptr() not in postponed)

    def _finish(self, run: _Run, way: Step) -> None:
        """W: the postponed gradients of the stage's weights."""
        kept = run.flying[way.action.stage, way.action.microbatch]
        with self._holding():
            if self._failure is None and kept.postponed is not None:
                with self._span(way.action):
                    run.postponed_bytes -= sum(kept.postponed.storages().values())
                    kept.postponed.finish(self._runner.backward)
        self._release(run, way.action)

    def _release(self, run: _Run, action: Action) -> None:
        kept = run.flying.pop((action.stage, action.microbatch))
        if self._transfer is not None:
            self._transfer.give(kept.received)

    def _span(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self.timeline is None else self.timeline.span(action)


def _not_in(buffers: list[Tensor], value: Any) -> list[Tensor]:
    """Those of `buffers` whose memory is no part of `value`, which lives on beyond the stage's backward."""
    if not buffers:
        return buffers
    taken = addresses(value)
    return [t for t in buffers if t.untyped_storage().data_ptr() not in taken]


def _words(action: Action) -> str:
    """An action in the words of error messages."""
    kind = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}[action.kind]
    return f"{kind} of micro-batch {action.microbatch} on stage {action.stage}"


def _catch(step: Callable[[int], Any], index: int, around: AbstractContextManager[Any]) -> tuple[bool, Any]:
    """(True, the user's output) when the step ran to its end, (False, the stage's output) when a gate ended it."""
    try:
        with around:
            return True, step(index)
    except StageOutput as stop:
        return False, stop.value
