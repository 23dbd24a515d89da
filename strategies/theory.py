"""What one optimizer step should send, stated by whoever sends it: what statements are made from and collected in.

It is: `Case` (the sizes a closed formula may use: layout, mesh, the whole model, and what one process saw of one
micro-batch) and `Expected` (calls and payload bytes by axis, kind and phase, in the ledger's terms). It is not: a
formula (`plugins/*/traffic.py`, `step_traffic.py`), a count (`comm.py`) or the comparison (`verify/bytes.py`).

A formula reads shapes, the layout and plans; never a ledger, and it asks no code that sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from torch import nn

from parallax.strategies.comm import Traffic
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh

if TYPE_CHECKING:
    from parallax.plugins.base import ParamShard

Key = tuple[str, str, str]
"""(axis, kind, phase), as in the ledger."""


@dataclass(frozen=True)
class Seen:
    """A tensor that went into or came out of a module.

    Attributes:
        shape: its own.
        element: bytes per element.
        grad: whether gradients go back through it.
        number: the same for the same tensor and for views of all of it.
        floating: whether it holds fractions.
    """

    shape: tuple[int, ...]
    element: int
    grad: bool
    number: int
    floating: bool = True

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.element


@dataclass(frozen=True)
class Call:
    """One call of a module: tensors in its arguments and in its result, in order."""

    inputs: tuple[Seen, ...]
    outputs: tuple[Seen, ...]

    @property
    def hidden(self) -> Seen:
        """The first input with fractions: the activation."""
        return next(x for x in self.inputs if x.floating)


@dataclass(frozen=True)
class Loss:
    """One cross-entropy: `rows` targets over `classes`, from scores of `element` bytes; how it is reduced."""

    rows: int
    classes: int
    element: int
    smoothed: bool
    mean: bool


@dataclass(frozen=True)
class Attention:
    """One attention call: the module around it, and sizes as in `plugins/context/traffic.py`."""

    module: nn.Module
    batch: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    element: int
    causal: bool


@dataclass(frozen=True)
class Log:
    """One `self.log`: bytes of the number, and whether it is reduced over data ranks in each step (`sync_dist`)."""

    element: int
    synced: bool


@dataclass
class Trace:
    """What one process saw of one forward of the user's step on one micro-batch, with as many tokens as a rank has.

    Attributes:
        calls: module -> its calls, in order.
        handed: module -> what travels on when a pipeline is cut after it, call by call.
        last_save: module -> the one in it, or it itself, that was the last to save a tensor for backward, in the order
            in which ranks run.
        losses, attentions: in order.
        numbers: single numbers with a fraction that the step returned; `tensors`: bytes of each other tensor in it.
        balanced: what each auxiliary loss was given: router logits of every layer, and a mask or None.
        logs: numbers that were logged.
        shifted: bytes of each tensor of labels that is shifted by one.
        tokens: of a whole sequence.
    """

    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)
    handed: dict[nn.Module, list[tuple[Seen, ...]]] = field(default_factory=dict)
    last_save: dict[nn.Module, nn.Module] = field(default_factory=dict)
    balanced: list[tuple[tuple[Seen, ...], Seen | None]] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    numbers: int = 0
    tensors: list[int] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    shifted: list[int] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True)
class Stages:
    """Which virtual stage a module belongs to, which rank of the pipeline runs it, and how its backwards run.

    Attributes:
        placement: rank on "pp" of each stage; (0,) without a pipeline.
        ends: module after which each stage but the last ends.
        stage: FQN of a module or parameter -> its stage.
        halved: stage -> micro-batches whose backward runs in two halves.
    """

    placement: tuple[int, ...] = (0,)
    ends: tuple[nn.Module, ...] = ()
    stage: Callable[[str], int] = lambda fqn: 0
    halved: Callable[[int], int] = lambda stage: 0


@dataclass(frozen=True)
class Case:
    """What formulas of one rank's step are made from.

    Attributes:
        layout: resolved.
        mesh: sizes and indices of this rank; without process groups.
        model: the whole module, as one process has it.
        trace: of one micro-batch of this rank.
        microbatches: how many of them a step has, all of these shapes.
        shards: this rank's parameters -> how each sits in the whole one.
        averaged_over: parameter -> "data" or "edp".
        stages: see `Stages`.
        sharded: whether what a pipeline hands on is this rank's share of the tokens (sequence parallelism).
        experts: names of the experts modules that are called with shares of the tokens, and so is what scores them.
        first: whether ranks have never seen such shapes: descriptions travel once.
        step: from 0.
        groups: names of the parameters in each group of the user's optimizer.
        recomputed: names of the layers that are computed again in backward.
    """

    layout: Layout
    mesh: Mesh
    model: nn.Module
    trace: Trace
    microbatches: int
    shards: Mapping[str, ParamShard | None]
    averaged_over: Mapping[str, str]
    stages: Stages = Stages()
    sharded: bool = False
    experts: frozenset[str] = frozenset()
    first: bool = False
    step: int = 0
    groups: tuple[frozenset[str], ...] = ()
    recomputed: frozenset[str] = frozenset()

    def here(self, fqn: str) -> bool:
        """Whether this rank runs module `fqn`."""
        return self.stages.placement[self.stages.stage(fqn)] == self.mesh.index("pp")

    @property
    def ends_here(self) -> bool:
        """Whether this rank runs the last stage, and with it the loss."""
        return self.stages.placement[-1] == self.mesh.index("pp")

    def halved(self, fqn: str) -> int:
        """Micro-batches whose backward through `fqn` runs in two halves."""
        return self.stages.halved(self.stages.stage(fqn))

    def again(self, fqn: str, *, ending: bool = False) -> int:
        """Micro-batches in whose backward the forward of `fqn` runs once more, and with it what that sends.

        A recomputed layer runs until all that backward needs is there: what a module sends after the layer's last saved
        tensor (`ending`: when its own work is done) is not sent again. A recomputed pipeline stage runs to its end; the
        last one never does, nor the first micro-batch of a shape.
        """
        if self.layout.recompute == "stage":
            last = self.stages.stage(fqn) + 1 == len(self.stages.placement)
            return 0 if last else self.microbatches - self.first
        layer = self.recomputed_layer(fqn)
        saved = None if layer is None else self.trace.last_save.get(self.model.get_submodule(layer))
        if saved is None or (ending and saved in self.model.get_submodule(fqn).modules()):
            return 0
        return self.microbatches

    def recomputed_layer(self, fqn: str) -> str | None:
        """The recomputed layer that `fqn` is in, or is."""
        return next((name for name in self.recomputed if f"{fqn}.".startswith(f"{name}.")), None)

    def calls(self, module: nn.Module) -> list[Call]:
        return self.trace.calls.get(module, [])

    def scores(self) -> set[int]:
        """Numbers of what is computed of shares of the tokens beside experts."""
        blocks = (self.model.get_submodule(fqn.rpartition(".")[0]) for fqn in self.experts)
        calls = (call for block in blocks for child in block.children() for call in self.calls(child))
        return {seen.number for call in calls for seen in call.outputs}

    def elements(self, fqn: str) -> int:
        """Elements of this rank's part of a parameter."""
        shard = self.shards[fqn]
        return prod(self.model.get_parameter(fqn).shape if shard is None else shard.local_shape)

    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters on this rank that are trained, as the whole model has them."""
        found = {fqn: self.model.get_parameter(fqn) for fqn in self.shards}
        return {fqn: param for fqn, param in found.items() if param.requires_grad}


class Expected:
    """Calls and payload bytes of one rank in one step.

    Attributes:
        counts: (axis, kind, phase) -> Traffic.
        pooled: rows of which only the sum over the group is known: how it is spread depends on values.
        missing: who has no formula, in words.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.counts: dict[Key, Traffic] = {}
        self.pooled: set[Key] = set()
        self.missing: list[str] = []

    def add(self, axis: str, kind: str, phase: str, nbytes: int, calls: int = 1) -> None:
        """`calls` calls of `nbytes` each; nothing on an axis of one rank."""
        self.add_all({(axis, kind, phase): Traffic(1, nbytes)}, calls)

    def add_all(self, found: Mapping[Key, Traffic], times: int) -> None:
        """Every row of `found`, `times` times."""
        for (axis, kind, phase), traffic in found.items():
            if times and self._mesh.size(axis) > 1:
                old = self.counts.get((axis, kind, phase), Traffic())
                calls, nbytes = old.calls + times * traffic.calls, old.bytes + times * traffic.bytes
                self.counts[axis, kind, phase] = Traffic(calls, nbytes)

    def pool(self, axis: str, kind: str, phase: str) -> None:
        """Only the group's sum of bytes is known for this row."""
        self.pooled.add((axis, kind, phase))
