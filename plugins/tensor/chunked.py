"""Row-parallel products of which a part is on its way while another is computed.

It is: what a row layer computes and sends, for whole sequences (`summed_product`) and for shards (`scattered_product`).
It is not: used where a pipeline postpones gradients of weights, which must find the product as it is.

On shards the product of other ranks' tokens comes before that of this rank's, so that it can travel meanwhile, where
the backend takes a message in parts; and while the gradient arrives, that of the input is computed for this rank's
tokens. That costs nothing. With `tp_chunks` a product is also made in several pieces, each a smaller product and a
message of its own, which does not pay everywhere; a piece of a shard is a run of every rank's tokens, so that each can
be scattered by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from parallax.plugins.tensor.functions import reduce_from_region
from parallax.plugins.tensor.sequence_functions import Tokens, scatter_from_region
from parallax.plugins.tensor.workspace import Workspace
from parallax.strategies.accumulating import autocast_dtype, is_autocast, linear, products_are_watched
from parallax.strategies.accumulation import weight_gradient
from parallax.strategies.comm import AxisComm, Work
from parallax.strategies.gloo import Fill
from parallax.strategies.products import add_product, product


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _bounds(rows: int, pieces: int) -> Iterator[tuple[int, int]]:
    each = -(-rows // pieces)
    return ((at, min(at + each, rows)) for at in range(0, rows, each))


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: AxisComm, pieces: int) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.weight = weight
        flat = _flat(x)
        summed = x.new_empty(*x.shape[:-1], weight.shape[0])  # no view, which the model could not add to in place
        out = _flat(summed)
        works = []
        for start, stop in _bounds(flat.shape[0], pieces):
            product(flat[start:stop], weight.t(), out=out[start:stop])
            works.append(comm.all_reduce(out[start:stop], async_op=True))
        for work in works:
            if work is not None:
                work.wait()
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = _flat(grad)
        inputs = product(flat, weight).view(*grad.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return inputs, None if x is None else weight_gradient(ctx.weight, flat.t(), _flat(x)), None, None


def _by_rank(rows: Tensor, tokens: Tokens) -> Tensor:
    """[padded, features] as [ranks, each, features]; missing tokens are zeros."""
    if tokens.padded != tokens.count:
        rows = torch.cat([rows, rows.new_zeros(tokens.padded - tokens.count, rows.shape[1])])
    return rows.view(tokens.ranks, tokens.each, -1)


class _Scatter(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, tokens: Tokens, comm: AxisComm, space: Workspace, pieces: int
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.tokens, ctx.comm, ctx.space, ctx.pieces = tokens, comm, space, pieces
        ctx.shape, ctx.weight = x.shape, weight
        rows = _by_rank(_flat(x), tokens)
        out = x.new_empty(*tokens.shard_shape, weight.shape[0])  # no view, which the model could not add to in place
        shard = _flat(out)
        flying: deque[Work | None] = deque()
        for i, (start, stop) in enumerate(_bounds(tokens.each, pieces)):
            if len(flying) == 2:  # whose buffer comes next
                _wait(flying.popleft())
            piece = space.take(f"piece{i % 2}", (tokens.ranks, stop - start, weight.shape[0]), x)
            fill = _product(rows[:, start:stop], weight, piece)
            flying.append(comm.reduce_scatter_into(shard[start:stop], piece, async_op=True, fill=fill))
        for work in flying:
            _wait(work)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        tokens: Tokens = ctx.tokens
        grad, rows = _flat(grad), None if x is None else _by_rank(_flat(x), tokens)
        inputs = grad.new_empty(tokens.ranks, tokens.each, weight.shape[1]) if ctx.needs_input_grad[0] else None
        weights: Tensor | None = None
        bounds = list(_bounds(tokens.each, ctx.pieces))
        coming = [_gather_piece(ctx, grad, bounds, 0)]
        for i, (start, stop) in enumerate(bounds):
            if i + 1 < len(bounds):
                coming.append(_gather_piece(ctx, grad, bounds, i + 1))
            piece, work = coming[i]
            if inputs is not None:
                _input_grads(grad[start:stop], piece, weight, inputs[:, start:stop], ctx.comm.index, work)
            else:
                _wait(work)
            if rows is not None:
                left, right = _flat(piece).t(), _flat(rows[:, start:stop])
                if len(bounds) == 1:
                    weights = weight_gradient(ctx.weight, left, right)
                else:
                    weights = product(left, right) if weights is None else add_product(weights, left, right)
        if inputs is not None:
            inputs = _flat(inputs)[: tokens.count].view(ctx.shape)
        return inputs, weights, None, None, None, None


def _product(rows: Tensor, weight: Tensor, out: Tensor) -> Fill:
    """What computes some ranks' parts of rows W^T, [ranks, n, features] each."""

    def fill(ranks: slice) -> None:
        product(_flat(rows[ranks]), weight.t(), out=out[ranks].view(-1, out.shape[-1]))

    return fill


def _input_grads(mine: Tensor, grads: Tensor, weight: Tensor, out: Tensor, index: int, work: Work | None) -> None:
    """grads W, [ranks, n, in], to `out`: for this rank's tokens from `mine`, while others' arrive in `grads`."""
    product(mine, weight, out=out[index])
    _wait(work)
    for rank in range(len(grads)):
        if rank != index:
            product(grads[rank], weight, out=out[rank])


def _gather_piece(ctx: Any, grad: Tensor, bounds: list[tuple[int, int]], i: int) -> tuple[Tensor, Work | None]:
    start, stop = bounds[i]
    piece = ctx.space.take(f"piece{i % 2}", (ctx.tokens.ranks, stop - start, grad.shape[1]), grad)
    return piece, ctx.comm.all_gather_into(piece, grad[start:stop], async_op=True)


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()


def _cast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dtype = autocast_dtype(x)
    return (x.to(dtype), weight.to(dtype)) if is_autocast(x) else (x, weight)


def summed_product(x: Tensor, weight: Tensor, comm: AxisComm, pieces: int, *, transposed: bool = False) -> Tensor:
    """The sum over ranks of x W^T, in `pieces` messages; `weight` is [out, in], or [in, out] when `transposed`."""
    if pieces == 1 or products_are_watched():  # apart from the sum, which a recomputed layer need not repeat then
        return reduce_from_region(linear(x, weight, transposed=transposed), comm)
    return cast(Tensor, _Reduce.apply(*_cast(x, weight.t() if transposed else weight), comm, pieces))


def scattered_product(
    x: Tensor,
    weight: Tensor,
    tokens: Tokens,
    comm: AxisComm,
    space: Workspace,
    pieces: int,
    recomputed: bool,
    *,
    transposed: bool = False,
) -> Tensor:
    """This rank's tokens of the sum over ranks of x W^T, in `pieces` messages; `weight` as above.

    A layer that is `recomputed` in backward needs no sum at its end then: the product has saved what is needed before.
    """
    if products_are_watched() or (recomputed and pieces == 1):
        return scatter_from_region(linear(x, weight, transposed=transposed), tokens, comm, space)
    weight = weight.t() if transposed else weight
    return cast(Tensor, _Scatter.apply(*_cast(x, weight), tokens, comm, space, pieces))
