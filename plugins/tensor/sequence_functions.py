"""Tokens spread over the tensor axis: how a shard sits in the whole, and the collectives between the two.

It is: `Tokens` and four autograd functions (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4.2.2). It is not: the decision where they are applied (`sequence.py`).

|  | forward | backward | gradient of the whole tensor |
|---|---|---|---|
| `cut` | this rank's tokens | all-gather | the same on every rank |
| `gather` | all-gather | slice | the same on every rank |
| `gather_to_region` | all-gather | reduce-scatter | partial: each rank's heads or columns |
| `scatter_from_region` | reduce-scatter | all-gather | the same on every rank |

All tokens of a micro-batch, b x s of them, are counted through and cut into equal consecutive parts, so that gathered
parts lie in memory as the whole tensor does and nothing is copied. A shard of [b, s, h] is [1, n, h] with
n = ceil(b s / ranks); the last ranks' missing tokens are zeros that no attention or MLP ever sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from parallax.plugins.tensor.workspace import Workspace
from parallax.strategies.comm import AxisComm

Meanwhile = Callable[[Tensor], None]
"""What is done with a shard while the whole is gathered."""


@dataclass(frozen=True)
class Tokens:
    """How the tokens of one forward are spread.

    Attributes:
        shape: leading dims of the whole tensor, [b, s] as a rule.
        ranks: size of the axis.
    """

    shape: tuple[int, ...]
    ranks: int

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def each(self) -> int:
        """Tokens on a rank, padding included."""
        return -(-self.count // self.ranks)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return (*(1 for _ in self.shape[1:]), self.each)

    @property
    def padded(self) -> int:
        """Tokens on all ranks, padding included."""
        return self.each * self.ranks

    def of_rank(self, index: int) -> slice:
        """Rank `index`'s tokens, without padding."""
        return slice(min(index * self.each, self.count), min((index + 1) * self.each, self.count))

    def as_seen(self, dims: int) -> Tokens:
        """The same for code that has flattened its tokens to [tokens, h]: `dims` is that of its tensors."""
        return self if dims > 2 or len(self.shape) == 1 else Tokens((self.count,), self.ranks)


def local_part(whole: Tensor, tokens: Tokens, index: int) -> Tensor:
    """Rank `index`'s tokens of [*shape, h] as [*shard_shape, h]: a view, but for padding."""
    flat = whole.reshape(tokens.count, -1)
    part = flat[tokens.of_rank(index)]
    if len(part) < tokens.each:
        part = torch.cat([part, flat.new_zeros(tokens.each - len(part), flat.shape[1])])
    return part.view(*tokens.shard_shape, -1)


def padded_rows(whole: Tensor, tokens: Tokens, space: Workspace) -> Tensor:
    """[*shape, h] as [padded, h], contiguous: itself when nothing is missing, else copied into a reused buffer."""
    flat = whole.reshape(tokens.count, -1)
    if tokens.padded == tokens.count:
        return flat.contiguous()
    rows = space.take("rows", (tokens.padded, flat.shape[1]), flat)
    rows[: tokens.count].copy_(flat)
    rows[tokens.count :].zero_()
    return rows


def unpadded(rows: Tensor, tokens: Tokens) -> Tensor:
    """[padded, h] as [*shape, h], a view."""
    return rows[: tokens.count].view(*tokens.shape, rows.shape[-1])


def all_rows(shard: Tensor, tokens: Tokens, comm: AxisComm, meanwhile: Meanwhile | None = None) -> Tensor:
    """Every rank's shard as [padded, h], in new memory; while the others' arrive `meanwhile` is called."""
    rows = shard.new_empty(tokens.padded, shard.shape[-1])
    work = comm.all_gather_into(rows, shard, async_op=meanwhile is not None)
    if meanwhile is not None:
        meanwhile(shard)
    if work is not None:
        work.wait()
    return rows


def reduced_shard(rows: Tensor, tokens: Tokens, comm: AxisComm) -> Tensor:
    """This rank's part of the sum over ranks of [padded, h]."""
    shard = rows.new_empty(*tokens.shard_shape, rows.shape[-1])
    comm.reduce_scatter_into(shard, rows)
    return shard


class _Cut(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, tokens: Tokens, comm: AxisComm) -> Tensor:
        ctx.tokens, ctx.comm = tokens, comm
        return local_part(whole, tokens, comm.index).clone()  # a view would keep the whole tensor alive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return unpadded(all_rows(grad, ctx.tokens, ctx.comm), ctx.tokens), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, tokens: Tokens, comm: AxisComm, meanwhile: Meanwhile | None) -> Tensor:
        ctx.tokens, ctx.comm = tokens, comm
        return unpadded(all_rows(shard, tokens, comm, meanwhile), tokens).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return local_part(grad, ctx.tokens, ctx.comm.index).contiguous(), None, None, None


class _GatherToRegion(Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, tokens: Tokens, comm: AxisComm, space: Workspace, meanwhile: Meanwhile | None
    ) -> Tensor:
        ctx.tokens, ctx.comm, ctx.space = tokens, comm, space
        return unpadded(all_rows(shard, tokens, comm, meanwhile), tokens).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return reduced_shard(padded_rows(grad, ctx.tokens, ctx.space), ctx.tokens, ctx.comm), None, None, None, None


class _ScatterFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tokens: Tokens, comm: AxisComm, space: Workspace) -> Tensor:
        ctx.tokens, ctx.comm = tokens, comm
        return reduced_shard(padded_rows(partial, tokens, space), tokens, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # New memory: a postponed weight gradient may keep it (see `plugins/pipeline/backward.py`).
        return unpadded(all_rows(grad, ctx.tokens, ctx.comm), ctx.tokens), None, None, None


def cut(whole: Tensor, tokens: Tokens, comm: AxisComm) -> Tensor:
    """This rank's tokens of a replicated [*shape, h]."""
    return cast(Tensor, _Cut.apply(whole, tokens, comm))


def gather(shard: Tensor, tokens: Tokens, comm: AxisComm, meanwhile: Meanwhile | None = None) -> Tensor:
    """All tokens, for work that every rank repeats."""
    return cast(Tensor, _Gather.apply(shard, tokens, comm, meanwhile))


def gather_to_region(
    shard: Tensor, tokens: Tokens, comm: AxisComm, space: Workspace, meanwhile: Meanwhile | None = None
) -> Tensor:
    """All tokens, for work of which every rank does its part."""
    return cast(Tensor, _GatherToRegion.apply(shard, tokens, comm, space, meanwhile))


def scatter_from_region(partial: Tensor, tokens: Tokens, comm: AxisComm, space: Workspace) -> Tensor:
    """This rank's tokens of the sum over ranks of `partial`, which the caller has made and nobody else reads."""
    return cast(Tensor, _ScatterFromRegion.apply(partial, tokens, comm, space))
