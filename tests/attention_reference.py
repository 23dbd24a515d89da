"""Attention of a whole sequence in one process, written out with a softmax over all scores: the right answer.

It is: independent of `plugins/context`: masks are made from their definitions, over the whole matrix, in the dtype
given (fp64 in tests), gradients by autograd. It is not: fast.
"""

from __future__ import annotations

import torch
from torch import Tensor


def seen(
    length: int, causal: bool, window: int | None = None, documents: Tensor | None = None, tokens: int | None = None
) -> Tensor:
    """Whether query i sees key j: bool [batch or 1, 1, length, length]."""
    i, j = torch.arange(length).view(-1, 1), torch.arange(length).view(1, -1)
    out = torch.ones(length, length, dtype=torch.bool)
    if causal:
        out = out & (j <= i)
    if window is not None:
        out = out & ((i - j).abs() < window)
    if tokens is not None:
        out = out & (j < tokens) & (i < tokens)
    out = out.view(1, 1, length, length)
    if documents is not None:
        same = documents[:, :, None] == documents[:, None, :]
        out = out & (same & (documents >= 0)[:, None, :]).unsqueeze(1)
    return out


def attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [b, h, s, d], k [b, h_kv, s, d], v [b, h_kv, s, d_v] -> [b, h, s, d_v]; rows that see nothing are 0."""
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        distance = (torch.arange(length).view(-1, 1) - torch.arange(length)).abs()
        scores = scores - slopes.view(1, -1, 1, 1) * distance
    lowest = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~visible, lowest)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., :length].masked_fill(~visible, 0)
    return torch.einsum("bhij,bhjd->bhid", weights, v)
