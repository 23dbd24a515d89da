"""The data movements of expert parallelism as autograd functions.

It is: the exchange of token rows between ranks (dispatch and combine are the same call with the splits swapped),
the copy of each token to its experts' rows, and the weighted sum that undoes it. It is not: who sends what to whom
(`routing.py`) or modules (`layers.py`).

|  | forward | backward |
|---|---|---|
| `exchange` | all-to-all | all-to-all with the splits swapped |
| `spread` | row of its token for every (token, choice) pair | sum over a token's choices |
| `weighted_sum` | sum over a token's choices, each times its weight | the mirror image, and the weights' gradient |
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from parallax.plugins.expert.routing import Order, Splits
from parallax.strategies.comm import AxisComm


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: Splits, comm: AxisComm) -> Tensor:
        ctx.splits, ctx.comm = splits, comm
        return _all_to_all(rows, splits, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_to_all(grad, ctx.splits.swapped(), ctx.comm), None, None


def _all_to_all(rows: Tensor, splits: Splits, comm: AxisComm) -> Tensor:
    out = rows.new_empty(sum(splits.received), *rows.shape[1:])
    comm.all_to_all_into(out, rows.contiguous(), splits.received, splits.sent)
    return out


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return hidden[order.tokens]

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
        tokens = grad[order.tokens]
        of_rows = tokens * weights.flatten()[order.pairs].unsqueeze(-1)
        of_weights = torch.zeros(weights.numel(), dtype=weights.dtype, device=weights.device)
        of_weights[order.pairs] = (tokens * rows).sum(-1).to(weights.dtype)
        return of_rows.to(rows.dtype), of_weights.view_as(weights), None


def exchange(rows: Tensor, splits: Splits, comm: AxisComm) -> Tensor:
    """Rows [sent, h] grouped by the rank they go to -> rows [received, h] grouped by the rank they come from."""
    return cast(Tensor, _Exchange.apply(rows, splits, comm))


def spread(hidden: Tensor, order: Order) -> Tensor:
    """[tokens, h] -> [pairs, h]: its token's row for every (token, choice) pair, in the order of sending."""
    return cast(Tensor, _Spread.apply(hidden, order))


def weighted_sum(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """[pairs, h] in the order of sending, weights [tokens, k] -> [tokens, h], the wider dtype; unsent pairs give 0."""
    return cast(Tensor, _WeightedSum.apply(rows, weights, order))
