"""The sequence a step works on, on one of the ranks that share it.

It is: the state behind everything the context axis does inside the user's code: how the batch of this step is cut,
which positions are here, and what takes a shift or a look at the whole sequence. It is not: attention itself, nor how
calls of the user's code come here (`routing.py`, `hf.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from parallax.plugins.context.base import AttentionMethod, AttentionSpec, Documents
from parallax.plugins.context.shards import SequenceShards
from parallax.strategies.comm import AxisComm


class CutSequence:
    """State of one model on one rank; `begin` starts a step.

    Args:
        model: the user's module.
        comm: the context axis.
        order: "zigzag" or "contiguous".
        method: makes the attention of (spec, q, k, v, shards), once per kind of call, and refuses what it cannot do.

    Attributes:
        shards: how the sequences of the running step are cut; None before the first.
        rows: sequences of a micro-batch.
        own: targets at this rank's tokens, by micro-batch.
        microbatch: the one whose step runs.
        masks, tokens: entries of the batch here, those that say which tokens count and the others: a shift fills the
            first with 0 and the others with a label that is ignored.
        documents: packed documents and padding of the sequences that run now, as the model was told.
        normalized: whether the running micro-batch's loss is already that of the whole sequences.
        sums_are_whole: whether a loss that is summed now is divided by a number for the whole batch.
        shortened: whether the running micro-batch's model was given all but the last token.
        shifted: whether the running micro-batch's targets were shifted, so that the last token has none.
        read: counts of tokens the running micro-batch's code has read as numbers, by their value here.
        inside: whether code runs that deals with the cut itself, so that its calls are not routed.
        attentions: attention calls of the running step.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: AxisComm,
        order: str,
        method: Callable[[AttentionSpec, Tensor, Tensor, Tensor, SequenceShards], AttentionMethod],
    ) -> None:
        self._model, self.comm, self.order, self._method = model, comm, order, method
        self.shards: SequenceShards | None = None
        self.rows = self.microbatch = 0
        self.own = torch.ones(1)
        self.masks: list[Tensor] = []
        self.tokens: list[Tensor] = []
        self.documents: Documents | None = None
        self.normalized = self.sums_are_whole = self.shortened = self.shifted = False
        self.read: dict[float, Any] = {}
        self.inside = False
        self.attentions = 0
        self._positions: dict[Any, Tensor] = {}
        self._chunks: dict[Any, Documents] = {}
        self._owned: set[int] = set()

    def __deepcopy__(self, memo: Any) -> CutSequence:
        return self  # a copied module shares the groups: they cannot be copied

    def begin(self, tokens: int, rows: int) -> SequenceShards:
        """Sequences of `tokens` tokens come now, `rows` in a micro-batch."""
        if self.shards is None or self.shards.tokens != tokens:
            self.shards = SequenceShards.of(tokens, self.comm.size, self.order)
            self._positions.clear()
            self._chunks.clear()
        self.rows = rows
        self._owned.clear()
        return self.shards

    def end(self) -> None:
        """The step is over: its batch is let go of."""
        self.masks, self.tokens = [], []

    def begin_microbatch(self, index: int) -> None:
        """The user's step is called now, with micro-batch `index`."""
        self.microbatch = index
        self.documents = None
        self.normalized = self.shortened = self.shifted = False
        self.read.clear()

    @property
    def cut(self) -> SequenceShards:
        if self.shards is None:
            raise ValueError(
                "the model was called outside a step; with context_parallel_size > 1 call it from training_step, "
                "validation_step, test_step or predict_step only"
            )
        return self.shards

    @property
    def local(self) -> int:
        """Tokens of a sequence on this rank, padding included."""
        return self.cut.local_length

    def in_chunks(self, size: int, device: torch.device) -> Documents:
        """The documents of the running step, one without any, in chunks of `size` tokens."""
        if self.documents is not None:
            return self.documents.in_chunks(size)
        if (size, device) not in self._chunks:
            one = Documents(torch.zeros(1, self.cut.length, dtype=torch.int64, device=device))
            self._chunks[size, device] = one.in_chunks(size)
        return self._chunks[size, device]

    @property
    def padded(self) -> bool:
        return self.cut.tokens != self.cut.length

    def positions(self, device: torch.device | str | None) -> Tensor:
        """Global positions of this rank's tokens, int64 [local]; those of padding are the last real one."""
        if device not in self._positions:
            here = self.cut.positions(self.comm.index, device)
            self._positions[device] = here.clamp_(max=max(self.cut.tokens - 1, 0))
        return self._positions[device]

    def real(self, device: torch.device | str | None) -> Tensor:
        """Which of this rank's tokens are not padding, bool [local]."""
        return self.cut.positions(self.comm.index, device) < self.cut.tokens

    def targets(self, device: torch.device | str | None) -> Tensor:
        """Which of this rank's tokens may have a target, bool [local]: no padding, nor the last one after a shift."""
        return self.cut.positions(self.comm.index, device) < self.cut.tokens - self.shifted

    def take(self, whole: Tensor, dim: int, pad: float = 0) -> Tensor:
        """This rank's part of a tensor with all tokens along `dim`; `pad` where there are none."""
        return self.cut.take(self.cut.pad(whole, dim, pad), self.comm.index, dim).contiguous()

    def whole(self, part: Tensor, dim: int) -> Tensor:
        """The tensor with all tokens along `dim`, without padding, of every rank's part. Collective; no gradient."""
        out = part.new_empty((self.comm.size, *part.shape))
        self.comm.all_gather_into(out, part.detach())
        return self.cut.join(out.unbind(0), dim).narrow(dim, 0, self.cut.tokens)

    def next_token(self, part: Tensor, fill: float | Tensor) -> Tensor:
        """What stands one position further in the sequence, for each token here: labels of a causal model. Collective.

        The last token of the sequence gets `fill`.

        Args:
            part: [batch, local].
        """
        whole = self.whole(part, 1)
        end = whole.new_empty((whole.shape[0], 1 + self.cut.length - self.cut.tokens))
        end[:] = fill
        return self.cut.take(torch.cat([whole[:, 1:], end], 1), self.comm.index, 1).contiguous()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention over the whole sequence; shapes as in `AttentionMethod.__call__`."""
        for name, tensor in (("queries", q), ("keys", k)):
            if tensor.shape[2] != self.local:
                raise ValueError(
                    f"attention over {tensor.shape[2]} {name}, but each of the {self.comm.size} context ranks holds "
                    f"{self.local} tokens of a sequence; attention to anything but the sequence itself (another "
                    f"sequence, added tokens, a cache) needs context_parallel_size=1"
                )
        if self.shortened and not spec.causal:
            raise ValueError(
                "the model is given tokens[:, :-1] and its attention is not causal, so the last token, which stays in "
                "a cut sequence, would be seen; leave the tokens whole and mark the last label as ignored, or use "
                "context_parallel_size=1"
            )
        self.attentions += 1
        with self.handling():
            return self._method(spec, q, k, v, self.cut)(q, k, v, spec, self.cut)

    def belongs_to_model(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a parameter, a buffer or a plain attribute of a module."""
        if id(tensor) not in self._owned:
            found = (vars(module) | module._parameters | module._buffers for module in self._model.modules())
            self._owned = {id(value) for values in found for value in values.values() if isinstance(value, Tensor)}
        return id(tensor) in self._owned

    @cached_property
    def numbers(self) -> dict[int, str]:
        """Sizes of the model's own, and their halves, with where they are: attributes, parameters and buffers."""
        found: dict[int, str] = {}
        for name, module in self._model.named_modules():
            for attribute, value in vars(module).items():
                if type(value) is int:
                    found.setdefault(value, f"{name}.{attribute}".lstrip("."))
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            shape = tuple(getattr(tensor, "ds_shape", tensor.shape))  # of a parameter that DeepSpeed keeps in parts
            for size in shape:
                found.setdefault(size, f"{name} of shape {shape}")
        return {size // 2: f"half of {where}" for size, where in found.items() if size % 2 == 0} | found

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Within, calls are not routed."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before
