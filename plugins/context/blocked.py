"""Attention of one tile in blocks of scores that stay in cache, for fp32 on CPUs where oneDNN's products are faster.

It is: a kernel as `kernels.py` wants it, from the products of `strategies/products.py`: softmax over blocks of keys
with a running maximum (Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*), and the backward that
makes the scores again (Dao et al. 2022, *FlashAttention*, algorithm 4). It is not: for biases, soft caps or dropout.

In backward a row's log-sum-exp and its product of output and gradient are known. They are subtracted inside of the
matrix products, as one more column of the queries' side that meets a column of ones on the keys' side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallax.plugins.context.scores import Scoring
from parallax.strategies.products import add_product, is_faster, product

ROWS, COLUMNS = 512, 512
"""Scores of a block: a megabyte. At a diagonal, where half a block is for nothing, it has half the rows; columns are a
multiple of them, so that the diagonal ends with a block's last column."""
SMALLEST_DIM = 32
"""Of a head: below, products are the smaller part of the work, and torch's kernel has less of the other."""


class Blocked:
    """See `kernels.Kernel`."""

    name = "blocked"
    equal_dims = False
    multiple = 1

    def fits(self, q: Tensor, biased: bool, softcap: float | None) -> bool:
        large = q.shape[2] >= ROWS and q.shape[3] >= SMALLEST_DIM
        return large and not biased and softcap is None and is_faster(q)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
        group, above = q.shape[1] // k.shape[1], _above_diagonal(q) if how.causal else None
        for at in _heads(q):
            of = at[0], at[1] // group
            for rows in _rows(0, q.shape[2], how.causal):
                seen = slice(rows.stop if how.causal else k.shape[2])
                _attend(q[at][rows] * how.scale, k[of][seen], v[of][seen], above, out[at][rows], lse[at][rows])
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, group = torch.zeros(q.shape, dtype=q.dtype), q.shape[1] // k.shape[1]
        # Turned: the product that is transposed is then the small one, of a quarter less time.
        turned = [x.new_zeros(*x.shape[:2], x.shape[3], x.shape[2]) for x in (k, v)]
        for at in _heads(q):
            of = at[0], at[1] // group
            dk, dv = (x[of] for x in turned)
            queries = _beside(q[at], lse[at].neg())
            scaled = queries[:, :-1].mul_(how.scale)
            grads = _beside(grad[at], (grad[at] * out[at]).sum(1).neg_())
            for start in range(0, k.shape[2], COLUMNS):
                block = slice(start, min(start + COLUMNS, k.shape[2]))
                keys, values = _beside(k[of][block]), _beside(v[of][block])
                for rows in _rows(start if how.causal else 0, q.shape[2], how.causal):
                    seen = min(len(keys), rows.stop - start) if how.causal else len(keys)
                    columns = slice(start, start + seen)
                    weights = product(queries[rows], keys[:seen].t()).exp_()
                    if how.causal and columns.stop > rows.start + 1:
                        weights.tril_(rows.start - start)
                    add_product(dv[:, columns], grad[at][rows].t(), weights)
                    scores = product(grads[rows], values[:seen].t()).mul_(weights)
                    add_product(dq[at][rows], scores, k[of][columns])
                    add_product(dk[:, columns], scaled[rows].t(), scores)
        return dq.mul_(how.scale), turned[0].mT, turned[1].mT


def _heads(q: Tensor) -> list[tuple[int, int]]:
    return [(sample, head) for sample in range(q.shape[0]) for head in range(q.shape[1])]


def _rows(first: int, height: int, causal: bool) -> list[slice]:
    each = ROWS // 2 if causal else ROWS
    return [slice(start, min(start + each, height)) for start in range(first, height, each)]


def _above_diagonal(q: Tensor) -> Tensor:
    return q.new_full((ROWS // 2, ROWS // 2), float("-inf")).triu_(1)


def _beside(x: Tensor, column: Tensor | None = None) -> Tensor:
    """x [n, d] and one more column: `column` [n], or ones."""
    wider = x.new_ones(x.shape[0], x.shape[1] + 1)
    wider[:, :-1] = x
    if column is not None:
        wider[:, -1] = column
    return wider


def _attend(queries: Tensor, keys: Tensor, values: Tensor, above: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Attention of `queries` [n, dim] over all of `keys`, whose last n have a diagonal if there is an `above`."""
    n, width = len(queries), len(keys)
    highest = total = mean = queries
    for start in range(0, width, COLUMNS):
        columns = slice(start, min(start + COLUMNS, width))
        scores = product(queries, keys[columns].t())
        if above is not None and columns.stop == width:
            scores[:, -n:] += above[:n, :n]
        before, highest = highest, scores.amax(1, keepdim=True)
        if start:
            highest = torch.maximum(highest, before)
            fade = before.sub_(highest).exp_()
        weights = scores.sub_(highest).exp_()
        if start:
            total.mul_(fade).add_(weights.sum(1, keepdim=True))
            mean.mul_(fade).add_(product(weights, values[columns]))
        else:
            total, mean = weights.sum(1, keepdim=True), product(weights, values[columns])
    torch.div(mean, total, out=out)
    torch.add(highest.squeeze(1), total.log_().squeeze(1), out=lse)
