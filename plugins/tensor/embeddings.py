"""The parallel embeddings: over the vocabulary, or over the features of every vector.

It is: subclasses of the embeddings they replace, transformers' scaled ones among them. It is not: the layers of a
region (`layers.py`), or the tensor whose sum over ranks waits (`unsummed.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallax.plugins.tensor.functions import gather_last_dim, reduce_from_region
from parallax.plugins.tensor.unsummed import unsummed
from parallax.strategies.comm import AxisComm


class VocabParallelEmbedding(nn.Embedding):
    """`nn.Embedding` with this rank's rows [start, stop) of the vocabulary, padded to equal length.

    Foreign ids give zero vectors here and their own rank's row in the sum over ranks. An id outside the whole
    vocabulary fails as it does in `nn.Embedding`.

    Attributes:
        waits: whether the sum may wait, for layers that need a shard of it alone.
    """

    comm: AxisComm
    start: int
    stop: int
    waits: bool

    def forward(self, input: Tensor) -> Tensor:
        mine = (input >= self.start) & (input < self.stop)
        known = (input >= 0) & (input < self.num_embeddings)
        fallback = torch.where(known, torch.zeros_like(input), torch.full_like(input, -1))  # -1 fails the look-up
        local = torch.where(mine, input - self.start, fallback)
        out = F.embedding(local, self.weight, self._local_padding_idx())
        out = out.masked_fill(~mine.unsqueeze(-1), 0)
        return out if self.waits else reduce_from_region(out, self.comm)

    def _local_padding_idx(self) -> int | None:
        index = self.padding_idx
        return index - self.start if index is not None and self.start <= index < self.stop else None


class WidthParallelEmbedding(nn.Embedding):
    """`nn.Embedding` with this rank's part of every vector, padded to equal length: ids -> [..., width], gathered."""

    comm: AxisComm
    width: int

    def forward(self, input: Tensor) -> Tensor:
        return gather_last_dim(F.embedding(input, self.weight, self.padding_idx), self.comm, self.width)


class _Waiting(nn.Module):
    """Mixin around embeddings whose sum over ranks may wait; scaling it commutes with the sum."""

    comm: AxisComm

    def forward(self, input: Tensor) -> Tensor:
        return unsummed(super().forward(input), self.comm)


@cache
def _embedding_class(base: type, waits: bool) -> type[nn.Module]:
    """`VocabParallelEmbedding`, below the forward of `base` when that is a scaled embedding."""
    if base is nn.Embedding and not waits:
        return VocabParallelEmbedding
    bases = (*([_Waiting] if waits else []), *([] if base is nn.Embedding else [base]), VocabParallelEmbedding)
    return type(f"VocabParallel{base.__name__}", bases, {})


@cache
def _width_class(base: type) -> type[nn.Module]:
    """`WidthParallelEmbedding`, likewise."""
    if base is nn.Embedding:
        return WidthParallelEmbedding
    return type(f"WidthParallel{base.__name__}", (base, WidthParallelEmbedding), {})


def become_width_parallel(module: nn.Module, comm: AxisComm) -> None:
    """Turn an embedding whose weight is already local along its vectors into one that gathers them."""
    width, base = int(module.embedding_dim), cast(type, type(module))  # type: ignore[arg-type]
    module.__class__ = _width_class(base)
    parts: Any = module
    parts.comm, parts.width = comm, width


def become_vocab_parallel(module: nn.Module, comm: AxisComm, rows: tuple[int, int], *, waits: bool = False) -> None:
    """Turn an embedding whose weight is already local into a vocabulary-parallel one holding `rows`."""
    base: type = type(module)
    module.__class__ = _embedding_class(base, waits)
    parts: Any = module
    parts.comm, parts.waits = comm, waits
    parts.start, parts.stop = rows
