"""Sequence parallelism: between attention and MLP, norms, dropouts and residuals run on this rank's tokens.

It is: the change of a model, whose trunk `sequence_plan.py` has found, so that its residual stream is a shard from the
first layer's entry to the last norm (Korthikanti et al. 2022, section 4.2.2). It is not: a change of its code: masks,
positions and rotary tables are made before the layers, from whole shapes, and attention sees the whole sequence.

Modules change their class to a subclass that overrides `__call__` (cut, gather at the exit: once per call, outside of
activation recomputation) or `forward` (gather at a block's entry: again in the recomputed forward).

How many tokens there are is known at the entry, and goes along as an argument of each layer and on the tensor that
enters it: so a layer that is recomputed in backward, after other batches of other lengths, knows it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallax.plugins.tensor.chunked import scattered_product
from parallax.plugins.tensor.entry import LastGathered
from parallax.plugins.tensor.head_start import HeadStart
from parallax.plugins.tensor.overlap import GatherAgain, Gathering
from parallax.plugins.tensor.plans import is_foreign
from parallax.plugins.tensor.sequence_functions import (
    Meanwhile,
    Tokens,
    cut,
    gather,
    gather_to_region,
    scatter_from_region,
)
from parallax.plugins.tensor.sequence_plan import Trunk
from parallax.plugins.tensor.streams import Streams
from parallax.plugins.tensor.swap import hidden_states, on_first, replaced, swap
from parallax.plugins.tensor.unsummed import summand, summed
from parallax.plugins.tensor.workspace import Workspace
from parallax.strategies.accumulating import autocast_dtype, products_are_watched
from parallax.strategies.comm import AxisComm

_MARK = "_parallax_tokens"


class Sequence:
    """What the changed modules of one model share: the axis, its buffers, and the tokens that are under way.

    Attributes:
        tokens: of the call of the model that runs, from the trunk's entry to its exit.
        running: of the layer that runs.
        left: of the call of the model that has left the trunk last.
        last: what a block, or the exit, has gathered last.
    """

    def __init__(self, comm: AxisComm, streams: Streams) -> None:
        self.comm, self.streams = comm, streams
        self.space = Workspace()
        self.again = GatherAgain(self.space)
        self.last = LastGathered()
        self.tokens: Tokens | None = None
        self.running: Tokens | None = None
        self.left: Tokens | None = None
        self._keeps = False
        self._head = HeadStart()

    def __deepcopy__(self, memo: dict[int, Any]) -> Sequence:
        return self  # copies of a module run one after the other, on the same ranks

    # The trunk

    def begin(self, hidden: Tensor) -> None:
        self.tokens = Tokens(tuple(hidden.shape[:-1]), self.comm.size)

    def enter(self, hidden: Tensor) -> Tensor:
        """The residual stream on this rank, from a whole one."""
        assert self.tokens is not None
        if (part := summand(hidden)) is not None:  # straight from a vocabulary-parallel embedding
            return scatter_from_region(part, self.tokens, self.comm, self.space)
        return cut(summed(hidden), self.tokens, self.comm)

    def tokens_of(self, hidden: Tensor) -> Tokens:
        """What a layer's input holds: what a first call has noted on it, else the tokens under way."""
        tokens: Tokens | None = getattr(hidden, _MARK, self.tokens)
        if tokens is None:
            raise ValueError(
                "a layer was called outside its model, or a recomputed layer has lost its sequence length: use "
                "torch.utils.checkpoint with use_reentrant=False, call the whole model, or set sequence_parallel=False"
            )
        if tuple(hidden.shape[:-1]) != tokens.shard_shape:
            raise ValueError(
                f"a layer got hidden states of shape {tuple(hidden.shape)}, but {tokens.shape} tokens over "
                f"{self.comm.size} ranks are shards of {tokens.shard_shape}: the model changes the shape of its hidden "
                "states between layers, or a recomputed layer has lost its sequence length (torch.utils.checkpoint "
                "needs use_reentrant=False); set sequence_parallel=False"
            )
        setattr(hidden, _MARK, tokens)
        return tokens

    def exit(self, hidden: Tensor) -> Tensor:
        """The whole residual stream; column layers that read it (the head) send their gradient back as shards."""
        assert self.tokens is not None
        tokens, self.left, self.tokens = self.tokens, self.tokens, None
        whole = gather(hidden, tokens, self.comm, self._meanwhile(hidden, tokens, self._head))
        self.last.mark(whole, hidden, self._gathering(tokens, self._head, keeps=False))
        return whole

    @contextmanager
    def layer(self, tokens: Tokens, *, recomputed: bool) -> Iterator[None]:
        """A layer runs, with random numbers of this rank's own."""
        before = self.running, self._keeps
        self.running, self._keeps = tokens, recomputed
        try:
            with self.streams.local():
                yield
        finally:
            self.running, self._keeps = before

    # What is in a layer

    def gathered(self, shard: Tensor, start: HeadStart) -> Tensor:
        """A block's whole input; its column layers get a head `start`."""
        shard, tokens = shard.to(autocast_dtype(shard)), self._current().as_seen(shard.dim())
        whole = gather_to_region(shard, tokens, self.comm, self.space, self._meanwhile(shard, tokens, start))
        self.last.mark(whole, shard, self._gathering(tokens, start, keeps=self._keeps))
        return whole

    def row(self, x: Tensor, weight: Tensor, pieces: int, *, transposed: bool = False) -> Tensor:
        """A block's output, this rank's tokens of the sum over ranks of x W^T (of x W when `transposed`)."""
        tokens = self._current().as_seen(x.dim())
        if x.shape[:-1].numel() != tokens.count:
            raise ValueError(
                f"a row layer got {tuple(x.shape[:-1])} tokens, but the gathered sequence has {tokens.shape}: "
                "the code between column and row layer changes the sequence; use sequence_parallel=False"
            )
        return scattered_product(
            x, weight, tokens, self.comm, self.space, pieces, self._keeps, transposed=transposed
        )

    def repeated(self, shard: Tensor) -> Tensor:
        """The whole input of a module that every rank runs alike."""
        return gather(shard, self._current(), self.comm)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's tokens of such a module's output."""
        tokens = self._current()
        if tuple(whole.shape[:-1]) != tokens.shape:
            raise ValueError(
                f"a module that got {tokens.shape} tokens returned {tuple(whole.shape)}, of which no shard can be "
                "taken; use sequence_parallel=False"
            )
        return cut(whole, tokens, self.comm)

    def real(self) -> int:
        """How many of this rank's tokens, in their order, are no padding."""
        tokens = self._current()
        return max(0, min(tokens.each, tokens.count - self.comm.index * tokens.each))

    def recorded(self, values: Tensor) -> Tensor:
        """The whole of what a layer has left behind for the model's output, if it is of this rank's tokens."""
        assert self.left is not None
        tokens = self.left.as_seen(values.dim())
        return gather(values, tokens, self.comm) if tuple(values.shape[:-1]) == tokens.shard_shape else values

    def _current(self) -> Tokens:
        if self.running is None:
            raise ValueError(
                "a part of a layer was called by itself; with sequence_parallel=True call the whole model, or use "
                "sequence_parallel=False"
            )
        return self.running

    def _gathering(self, tokens: Tokens, start: HeadStart, *, keeps: bool) -> Gathering:
        return Gathering(tokens, self.comm, self.space, self.again, start, keeps)

    def _meanwhile(self, shard: Tensor, tokens: Tokens, start: HeadStart) -> Meanwhile | None:
        if not (torch.is_grad_enabled() and shard.requires_grad) or products_are_watched():
            return None  # then the layers make their products elsewhere (`entry.py`)
        return lambda shard: start.begin(shard, tokens, self.comm.index)


def install(model: nn.Module, trunk: Trunk, sequence: Sequence) -> None:
    """Change the modules of `model` that are on this rank."""
    modules = dict(model.named_modules())
    for stub in filter(is_foreign, modules.values()):
        if (stage := getattr(stub, "state", None)) is not None:
            stage.receives_part = True
    for i in range(trunk.depth):
        layer = modules[f"{trunk.layers}.{i}"]
        ends = i == trunk.depth - 1 and trunk.exit is None
        if not is_foreign(layer):
            _become_layer(layer, sequence, first=i == 0, last=ends)
        elif i == 0:
            _become_foreign_entry(layer, sequence)
    for fqns, become in ((trunk.blocks, _become_block), (trunk.opaque, _become_opaque)):
        for fqn in fqns:
            if fqn in modules and not is_foreign(modules[fqn]):
                become(modules[fqn], sequence)
    for experts in (modules[fqn] for fqn in trunk.experts if fqn in modules):
        experts.__dict__["real"] = sequence.real
    _become_owner(modules[trunk.owner], sequence)
    last = modules.get(trunk.exit or "")
    if trunk.exit and last is not None and not is_foreign(last):
        _become_exit(last, sequence)


def _become_layer(layer: nn.Module, sequence: Sequence, *, first: bool, last: bool) -> None:
    cls: Any = type(layer)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        where, hidden = hidden_states(args, kwargs)
        if first:
            sequence.begin(hidden)
            hidden = sequence.enter(hidden)
        args, kwargs = replaced(args, kwargs, where, hidden)
        kwargs[_MARK] = sequence.tokens_of(hidden)
        out = cls.__call__(self, *args, **kwargs)
        return on_first(out, sequence.exit) if last else out

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens: Tokens = kwargs.pop(_MARK)
        recomputed = bool(getattr(self, "gradient_checkpointing", False)) and self.training
        with sequence.layer(tokens, recomputed=recomputed):
            return cls.forward(self, *args, **kwargs)

    swap(layer, __call__=call, forward=forward)
    if first:  # while another stage of this rank runs, the layer is only passed by, and the shape is still to be seen
        layer.__dict__["passed_by"] = lambda args, kwargs: sequence.begin(hidden_states(args, kwargs)[1])


def _become_foreign_entry(layer: nn.Module, sequence: Sequence) -> None:
    """The first layer lives on another pipeline stage: its stub sees the whole shape, and returns a shard."""
    cls: Any = type(layer)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        sequence.begin(hidden_states(args, kwargs)[1])
        return cls.__call__(self, *args, **kwargs)

    swap(layer, __call__=call)


def _become_block(block: nn.Module, sequence: Sequence) -> None:
    cls: Any = type(block)
    start = HeadStart()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        where, shard = hidden_states(args, kwargs)
        args, kwargs = replaced(args, kwargs, where, sequence.gathered(shard, start))
        return cls.forward(self, *args, **kwargs)

    swap(block, forward=forward)


def _become_opaque(module: nn.Module, sequence: Sequence) -> None:
    cls: Any = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        where, shard = hidden_states(args, kwargs)
        args, kwargs = replaced(args, kwargs, where, sequence.repeated(shard))
        with sequence.streams.shared():
            out = cls.forward(self, *args, **kwargs)
        return on_first(out, sequence.part)

    swap(module, forward=forward)


def _become_exit(norm: nn.Module, sequence: Sequence) -> None:
    cls: Any = type(norm)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = cls.__call__(self, *args, **kwargs)
        return out if sequence.tokens is None else sequence.exit(out)

    swap(norm, __call__=call)


def _become_owner(owner: nn.Module, sequence: Sequence) -> None:
    """What transformers' recorders have collected from shards, on request, leaves the model whole."""
    cls: Any = type(owner)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = cls.__call__(self, *args, **kwargs)
        for name in ("hidden_states", "router_logits"):
            collected = getattr(out, name, None)
            if isinstance(collected, tuple):
                setattr(out, name, tuple(map(sequence.recorded, collected)))
        return out

    swap(owner, __call__=call)
