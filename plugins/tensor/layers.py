"""The parallel layers: what a plain linear or embedding becomes on one rank.

It is: subclasses of the layers they replace, so that a module changes its class and keeps its place, name,
hooks and `isinstance` answers. It is not: the decision which layer becomes what (`plans.py`, `plugin.py`).

Size attributes say what the forward shows: a column layer's `out_features` is this rank's slice unless it
gathers, a row layer's `in_features` likewise, and a vocabulary-parallel embedding still takes every id.

Weights and gradients: a cut weight's gradient is this rank's part and complete. A row layer's bias is added
after the reduction, sees whole gradients and is the same on every rank. Padded rows start at zero, take part
in nothing and get exactly zero gradients.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallax.plugins.tensor.functions import (
    SharedInput,
    copy_to_region,
    gather_last_dim,
    reduce_from_region,
    split_last_dim,
)
from parallax.plugins.tensor.logits_ops import head_output
from parallax.plugins.tensor.styles import Kind, Style
from parallax.strategies.comm import AxisComm


class Column(nn.Module):
    """Mixin of layers whose output features are cut: [..., in] -> [..., out / size], or [..., out] when gathered.

    Attributes:
        comm: the tensor axis.
        entry: shared with the other column layers of the block; `member` is this layer's number in it.
        gathered: whole output width when the output is gathered, else None.
        is_head: whether the output is logits, which stay cut and only look whole (`logits.py`).
    """

    comm: AxisComm
    entry: SharedInput
    member: int
    gathered: int | None
    is_head: bool

    def forward(self, x: Tensor) -> Tensor:
        out = _product(self, self.entry.enter(x, self.member), self.get_parameter("bias") if _has_bias(self) else None)
        if self.gathered is None:
            return out
        if self.is_head:
            return head_output(out, self.comm, self.gathered)
        return gather_last_dim(out, self.comm, self.gathered)


class Row(nn.Module):
    """Mixin of layers whose input features are cut: [..., in / size] (or [..., in], split here) -> [..., out].

    Attributes:
        comm: the tensor axis.
        splits: whether the input arrives whole.
    """

    comm: AxisComm
    splits: bool

    def forward(self, x: Tensor) -> Tensor:
        if self.splits:
            x = split_last_dim(x, self.comm)
        out = reduce_from_region(_product(self, x, None), self.comm)
        return out + self.get_parameter("bias").to(out.dtype) if _has_bias(self) else out


def _has_bias(module: nn.Module) -> bool:
    return module._parameters.get("bias") is not None


def _product(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b; transformers' Conv1D stores W transposed."""
    weight = module.get_parameter("weight")
    return F.linear(x, weight if isinstance(module, nn.Linear) else weight.t(), bias)


class ColumnParallelLinear(Column, nn.Linear):
    """`nn.Linear` with weight [out / size, in] and bias [out / size]."""


class RowParallelLinear(Row, nn.Linear):
    """`nn.Linear` with weight [out, in / size] and a whole bias."""


@cache
def _class_on(base: type, kind: Kind) -> type[nn.Module]:
    """The column or row version of transformers' `Conv1D` (weight [in, out]) or of its own linears."""
    mixin = Column if kind is Kind.COLUMN else Row
    return type(f"{mixin.__name__}Parallel{base.__name__}", (mixin, base), {})


class VocabParallelEmbedding(nn.Embedding):
    """`nn.Embedding` with this rank's rows [start, stop) of the vocabulary, padded to equal length.

    Foreign ids give zero vectors here and their own rank's row after the all-reduce. An id outside the whole
    vocabulary fails as it does in `nn.Embedding`.
    """

    comm: AxisComm
    start: int
    stop: int

    def forward(self, input: Tensor) -> Tensor:
        mine = (input >= self.start) & (input < self.stop)
        known = (input >= 0) & (input < self.num_embeddings)
        fallback = torch.where(known, torch.zeros_like(input), torch.full_like(input, -1))  # -1 fails the look-up
        local = torch.where(mine, input - self.start, fallback)
        out = F.embedding(local, self.weight, self._local_padding_idx())
        return reduce_from_region(out.masked_fill(~mine.unsqueeze(-1), 0), self.comm)

    def _local_padding_idx(self) -> int | None:
        index = self.padding_idx
        return index - self.start if index is not None and self.start <= index < self.stop else None


class WidthParallelEmbedding(nn.Embedding):
    """`nn.Embedding` with this rank's part of every vector, padded to equal length: ids -> [..., width], gathered."""

    comm: AxisComm
    width: int

    def forward(self, input: Tensor) -> Tensor:
        return gather_last_dim(F.embedding(input, self.weight, self.padding_idx), self.comm, self.width)


class LatentKeys(nn.Linear):
    """The whole `kv_a_proj` of multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    Its last features are the rotary keys, which all heads share: on each rank only this rank's heads read them, so
    they enter the region here. The rest enters it where the next projection does.
    """

    comm: AxisComm
    rotary: int

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        latent, rotary = out.split([out.shape[-1] - self.rotary, self.rotary], dim=-1)
        return torch.cat([latent, copy_to_region(rotary, self.comm)], dim=-1)


@cache
def _embedding_class(base: type) -> type[nn.Module]:
    """`VocabParallelEmbedding`, below the forward of `base` when that is a scaled embedding."""
    if base is nn.Embedding:
        return VocabParallelEmbedding
    return type(f"VocabParallel{base.__name__}", (base, VocabParallelEmbedding), {})


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
    module.comm, module.width = comm, width  # type: ignore[assignment]


def become_mla_keys(module: nn.Module, comm: AxisComm, rotary: int) -> None:
    """Let the last `rotary` features of a whole linear enter the region."""
    module.__class__ = LatentKeys
    module.comm, module.rotary = comm, rotary  # type: ignore[assignment]


def sum_output(module: nn.Module, comm: AxisComm) -> None:
    """Sum the output of `module`, partial on every rank."""
    module.register_forward_hook(lambda module, args, out: reduce_from_region(out.clone(), comm))


def become_column(
    module: nn.Module,
    style: Style,
    entry: SharedInput,
    member: int,
    *,
    is_head: bool = False,
    copies: int = 1,
) -> None:
    """Turn a linear whose parameters are already local into a column-parallel one."""
    comm = entry.comm
    width = "out_features" if isinstance(module, nn.Linear) else "nf"
    whole = int(getattr(module, width))
    _set_class(module, Kind.COLUMN)
    if not style.whole_outside:
        setattr(module, width, whole * copies // comm.size)
    for name, value in (
        ("comm", comm),
        ("entry", entry),
        ("member", member),
        ("gathered", whole if style.whole_outside else None),
        ("is_head", is_head),
    ):
        setattr(module, name, value)


def become_row(module: nn.Module, style: Style, comm: AxisComm) -> None:
    """Turn a linear whose parameters are already local into a row-parallel one."""
    width = "in_features" if isinstance(module, nn.Linear) else "nx"
    whole = int(getattr(module, width))
    _set_class(module, Kind.ROW)
    if not style.whole_outside:
        setattr(module, width, whole // comm.size)
    module.comm = comm  # type: ignore[assignment]
    module.splits = style.whole_outside  # type: ignore[assignment]


def become_vocab_parallel(module: nn.Module, comm: AxisComm, rows: tuple[int, int]) -> None:
    """Turn an embedding whose weight is already local into a vocabulary-parallel one holding `rows`."""
    base: type = type(module)
    module.__class__ = _embedding_class(base)
    module.comm = comm  # type: ignore[assignment]
    module.start, module.stop = rows  # type: ignore[assignment]


def _set_class(module: nn.Module, kind: Kind) -> None:
    base: type = type(module)
    if base is nn.Linear:
        module.__class__ = ColumnParallelLinear if kind is Kind.COLUMN else RowParallelLinear
    else:
        module.__class__ = _class_on(base, kind)
