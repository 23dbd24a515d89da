"""The data movements of expert parallelism as autograd functions.

It is: the exchange of token rows between ranks (dispatch and combine are the same call with the splits swapped),
the copy of each token to its experts' rows, and the weighted sum that undoes it. It is not: who sends what to whom
(`routing.py`) or modules (`layers.py`).

|  | forward | backward |
|---|---|---|
| `send`, `receive` | all-to-all, begun and waited for | the same with the splits swapped, `receive` begins it |
| `regroup` | rows in another order | back in the order they had |
| `spread` | row of its token for every (token, choice) pair | sum over a token's choices |
| `weighted_sum` | sum over a token's choices, each times its weight | the mirror image, and the weights' gradient |
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from parallax.plugins.expert.routing import Order, Permutation, Splits
from parallax.strategies.comm import AxisComm, Work


class Transit:
    """Rows on their way between ranks: forward there, backward their gradients back.

    Autograd runs what was made last first. So what is computed between `send` and `receive` runs in backward between
    the beginning of the gradients' exchange and the wait for it.

    Args:
        splits: rows this rank sends and receives in forward.
        comm: the ranks.
    """

    def __init__(self, splits: Splits, comm: AxisComm) -> None:
        self.splits, self.comm = splits, comm
        self._under_way: tuple[Tensor, Tensor, Work | None] | None = None

    def begin(self, rows: Tensor, splits: Splits) -> Tensor:
        """Where the rows will be after `end`."""
        rows, out = rows.contiguous(), rows.new_empty(sum(splits.received), *rows.shape[1:])
        work = self.comm.all_to_all_into(out, rows, splits.received, splits.sent, async_op=True)
        self._under_way = rows, out, work
        return out

    def end(self) -> Tensor:
        assert self._under_way is not None
        (_, out, work), self._under_way = self._under_way, None
        if work is not None:
            work.wait()
        return out


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transit: Transit) -> Tensor:
        ctx.transit = transit
        return transit.begin(rows, transit.splits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, placeholder: Tensor) -> tuple[Tensor, None]:
        return ctx.transit.end(), None


class _Receive(Function):
    @staticmethod
    def forward(ctx: Any, moving: Tensor, transit: Transit) -> Tensor:
        ctx.transit = transit
        return transit.end().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.transit.begin(grad, ctx.transit.splits.swapped())
        return grad, None  # in the place of the gradient that is on its way, which has another shape


class _Regroup(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Permutation) -> Tensor:
        ctx.order = order
        return rows.index_select(0, order.there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.order.back), None


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return hidden.index_select(0, order.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.order.by_token(grad).sum(1), None


class _WeightedSum(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Order) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(rows, weights)
        return (order.by_token(rows) * weights.unsqueeze(-1)).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        order: Order = ctx.order
        tokens = grad.index_select(0, order.tokens)
        of_rows = tokens * weights.flatten()[order.pairs].unsqueeze(-1)
        of_weights = torch.zeros(weights.numel(), dtype=weights.dtype, device=weights.device)
        of_weights[order.pairs] = (tokens * rows).sum(-1).to(weights.dtype)
        return of_rows.to(rows.dtype), of_weights.view_as(weights), None


def send(rows: Tensor, transit: Transit) -> Tensor:
    """Rows [sent, h] grouped by the rank they go to; what is returned is only for `receive`."""
    return cast(Tensor, _Send.apply(rows, transit))


def receive(moving: Tensor, transit: Transit) -> Tensor:
    """Rows [received, h] grouped by the rank they come from."""
    return cast(Tensor, _Receive.apply(moving, transit))


def regroup(rows: Tensor, order: Permutation) -> Tensor:
    """Rows [n, h] in the order `order.there`."""
    return cast(Tensor, _Regroup.apply(rows, order))


def spread(hidden: Tensor, order: Order) -> Tensor:
    """[tokens, h] -> [pairs, h]: its token's row for every (token, choice) pair, in the order of sending."""
    return cast(Tensor, _Spread.apply(hidden, order))


def weighted_sum(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """[pairs, h] in the order of sending, weights [tokens, k] -> [tokens, h], the wider dtype; unsent pairs give 0."""
    return cast(Tensor, _WeightedSum.apply(rows, weights, order))
