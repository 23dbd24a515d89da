"""Attention of one tile written out, for what no fused kernel does: soft capping, dropout, and dtypes they refuse.

It is: the textbook formulas in fp32 (fp64 for fp64), with the log-sum-exp, and their gradients from a merged output and
log-sum-exp (FlashAttention-2, Dao 2023, algorithms 1 and 2, without their loops). It is not: for a whole sequence: it
holds the scores of the tile it is given, so tiles are cut small for it (`tiles.Blocking`). Keys and values of grouped
queries are not repeated: the queries of a group are further rows of one product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallax.plugins.context.scores import Scoring


class Plain:
    """See `kernels.Kernel`."""

    name = "plain"
    equal_dims = False
    multiple = 1

    def fits(self, q: Tensor, biased: bool, softcap: float | None) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(q.dtype, torch.float32)
        scores, _ = _scores(q.to(exact), k.to(exact), how)
        lse = scores.logsumexp(-1)
        weights = _weights(scores, lse)
        return _times(weights if how.keep is None else weights * how.keep, v.to(exact)), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = torch.promote_types(q.dtype, torch.float32)
        grad, q, k, v, out = (x.to(exact) for x in (grad, q, k, v, out))
        scores, slope = _scores(q, k, how)
        weights = _weights(scores, lse)
        kept, dweights = weights, _times(grad, v.mT)
        if how.keep is not None:
            kept, dweights = weights * how.keep, dweights * how.keep
        dv = _grouped(kept, v).mT @ _grouped(grad, v)
        dscores = weights * (dweights - (grad * out).sum(-1, keepdim=True))
        if slope is not None:
            dscores *= slope
        dscores *= how.scale
        return _times(dscores, k), _grouped(dscores, k).mT @ _grouped(q, k), dv


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[batch, heads, rows, n] as [batch, kv_heads, heads / kv_heads * rows, n]."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _times(x: Tensor, k: Tensor) -> Tensor:
    """x [batch, heads, rows, n] times k [batch, kv_heads, n, m], each head with that of its group."""
    return (_grouped(x, k) @ k).view(*x.shape[:-1], k.shape[-1])


def _scores(q: Tensor, k: Tensor, how: Scoring) -> tuple[Tensor, Tensor | None]:
    """Scores [batch, heads, rows, columns], and the slope of the soft cap at them."""
    scores, slope = _times(q, k.mT) * how.scale, None
    if how.softcap is not None:
        shape = torch.tanh(scores / how.softcap)
        scores, slope = shape * how.softcap, 1 - shape * shape
    if how.bias is not None:
        scores = scores + how.bias
    if how.causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, float("-inf"))
    return scores, slope


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); 0 in rows that see no key, whose lse is -inf."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1)).exp_()
