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

import torch
from torch import Tensor, nn

from parallax.plugins.tensor.chunked import summed_product
from parallax.plugins.tensor.entry import SharedInput
from parallax.plugins.tensor.functions import (
    copy_to_region,
    gather_halves,
    gather_last_dim,
    reduce_from_region,
    split_last_dim,
)
from parallax.plugins.tensor.head_start import HeadStart
from parallax.plugins.tensor.logits_ops import head_output
from parallax.plugins.tensor.sequence import Sequence
from parallax.plugins.tensor.streams import Streams
from parallax.plugins.tensor.styles import Kind, Style
from parallax.strategies.accumulating import linear
from parallax.strategies.comm import AxisComm


class Column(nn.Module):
    """Mixin of layers whose output features are cut: [..., in] -> [..., out / size], or [..., out] when gathered.

    Attributes:
        comm: the tensor axis.
        streams: switched to this rank's own random numbers for what follows on its features.
        entry: shared with the other column layers of the block; `member` is this layer's number in it. None where the
            input is in the region already.
        gathered: whole output width when the output is gathered, else None.
        is_head: whether the output is logits, which stay cut and only look whole (`logits.py`).
        sequence: set when the layer gathers its tokens by itself; `start` is then its head start.
        shared: ranks whose parts of one key and one value are put together here, and the width of this rank's; or None.
    """

    comm: AxisComm
    streams: Streams
    entry: SharedInput | None
    member: int
    gathered: int | None
    is_head: bool
    sequence: Sequence | None
    start: HeadStart
    shared: tuple[AxisComm, int] | None

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence is not None:
            x = self.sequence.gathered(x, self.start)
        weight, bias, transposed = self.get_parameter("weight"), self._parameters.get("bias"), _is_transposed(self)
        if self.entry is None:
            out = linear(x, weight, bias, transposed=transposed)
        else:
            out = self.entry.linear(x, self.member, weight, bias, transposed=transposed)
        if self.gathered is None:
            self.streams.enter()
            return out if self.shared is None else gather_halves(out, *self.shared)
        if self.is_head:
            return head_output(out, self.comm, self.gathered)
        return gather_last_dim(out, self.comm, self.gathered)


class EnteringLinear(nn.Linear):
    """A whole linear (the A of an adapter) that reads what enters a region, as the region's column layers do."""

    entry: SharedInput
    member: int

    def forward(self, input: Tensor) -> Tensor:
        return self.entry.linear(input, self.member, self.weight, self.bias)


class EnteringDropout(nn.Dropout):
    """A dropout in front of such a linear: every rank drops the same."""

    entry: SharedInput
    member: int
    streams: Streams

    def forward(self, input: Tensor) -> Tensor:
        with self.streams.shared():
            return super().forward(self.entry.enter(input, self.member))


class Row(nn.Module):
    """Mixin of layers whose input features are cut: [..., in / size] (or [..., in], split here) -> [..., out].

    Attributes:
        comm: the tensor axis.
        streams: switched back to the random numbers all ranks share, where the output is whole.
        splits: whether the input arrives whole.
        sequence: set when the output is this rank's tokens rather than whole.
        pieces: number of messages its output is sent in.
    """

    comm: AxisComm
    streams: Streams
    splits: bool
    sequence: Sequence | None
    pieces: int

    def forward(self, x: Tensor) -> Tensor:
        if self.splits:
            x = split_last_dim(x, self.comm)
        weight, transposed = self.get_parameter("weight"), _is_transposed(self)
        if self.sequence is not None:
            out = self.sequence.row(x, weight, self.pieces, transposed=transposed)
        else:
            out = summed_product(x, weight, self.comm, self.pieces, transposed=transposed)
            self.streams.leave()
        bias = self._parameters.get("bias")
        return out if bias is None else out + bias.to(out.dtype)


def _is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [in, out], as that of transformers' Conv1D."""
    return not isinstance(module, nn.Linear)


class ColumnParallelLinear(Column, nn.Linear):
    """`nn.Linear` with weight [out / size, in] and bias [out / size]."""


class RowParallelLinear(Row, nn.Linear):
    """`nn.Linear` with weight [out, in / size] and a whole bias."""


@cache
def _class_on(base: type, kind: Kind) -> type[nn.Module]:
    """The column or row version of transformers' `Conv1D` (weight [in, out]) or of its own linears."""
    mixin = Column if kind is Kind.COLUMN else Row
    return type(f"{mixin.__name__}Parallel{base.__name__}", (mixin, base), {})


class LatentKeys(nn.Linear):
    """The whole `kv_a_proj` of multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    Its last features are the rotary keys, which all heads share: on each rank only this rank's heads read them, so
    they enter the region here. The rest enters it where the next projection does.
    """

    comm: AxisComm
    rotary: int

    def forward(self, x: Tensor) -> Tensor:
        out = linear(x, self.weight, self.bias)
        latent, rotary = out.split([out.shape[-1] - self.rotary, self.rotary], dim=-1)
        return torch.cat([latent, copy_to_region(rotary, self.comm)], dim=-1)


def become_mla_keys(module: nn.Module, comm: AxisComm, rotary: int) -> None:
    """Let the last `rotary` features of a whole linear enter the region."""
    module.__class__ = LatentKeys
    _set(module, comm=comm, rotary=rotary)


def sum_output(module: nn.Module, comm: AxisComm) -> None:
    """Sum the output of `module`, partial on every rank."""
    module.register_forward_hook(lambda module, args, out: reduce_from_region(out.clone(), comm))


def become_column(
    module: nn.Module,
    style: Style,
    comm: AxisComm,
    entry: SharedInput | None,
    member: int,
    streams: Streams,
    *,
    sequence: Sequence | None = None,
    is_head: bool = False,
    copies: int = 1,
    sharers: AxisComm | None = None,
) -> None:
    """Turn a linear whose parameters are already local into a column-parallel one.

    `copies` ranks share its heads: each holds them, or where `sharers` is given, of query, key and value in one matrix,
    a part of the key and of the value.
    """
    width = "out_features" if isinstance(module, nn.Linear) else "nf"
    whole = int(getattr(module, width))
    _set_class(module, Kind.COLUMN)
    shared, here = None, whole * copies // comm.size
    if sharers is not None:
        part = whole * style.heads // sum(style.blocks) // comm.size
        shared, here = (sharers, part), whole // comm.size + 2 * part * (copies - 1)
    if not style.whole_outside:
        setattr(module, width, here)
    gathered = whole if style.whole_outside else None
    _set(module, comm=comm, streams=streams, entry=entry, member=member)
    _set(module, gathered=gathered, is_head=is_head, sequence=sequence, start=HeadStart(), shared=shared)


def become_entering(module: nn.Module, entry: SharedInput, member: int, streams: Streams) -> None:
    """Let a whole linear or dropout read what enters the region."""
    module.__class__ = EnteringLinear if isinstance(module, nn.Linear) else EnteringDropout
    _set(module, entry=entry, member=member, streams=streams)


def become_row(
    module: nn.Module,
    style: Style,
    comm: AxisComm,
    streams: Streams,
    *,
    sequence: Sequence | None = None,
    pieces: int = 1,
) -> None:
    """Turn a linear whose parameters are already local into a row-parallel one."""
    width = "in_features" if isinstance(module, nn.Linear) else "nx"
    whole = int(getattr(module, width))
    _set_class(module, Kind.ROW)
    if not style.whole_outside:
        setattr(module, width, whole // comm.size)
    _set(module, comm=comm, streams=streams, splits=style.whole_outside, sequence=sequence, pieces=pieces)


def _set(module: nn.Module, **attributes: object) -> None:
    for name, value in attributes.items():
        setattr(module, name, value)


def _set_class(module: nn.Module, kind: Kind) -> None:
    base: type = type(module)
    if base is nn.Linear:
        module.__class__ = ColumnParallelLinear if kind is Kind.COLUMN else RowParallelLinear
    else:
        module.__class__ = _class_on(base, kind)
