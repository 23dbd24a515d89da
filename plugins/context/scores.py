"""How the scores of one tile are made: scale, soft cap, the bias that masks, and what dropout leaves.

It is: numbers and a tensor of a tile's size, made from positions and document ids when the tile is computed. It is not:
the mask of a sequence, which is never made, nor the computation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallax.plugins.context.base import AttentionSpec
from parallax.plugins.context.tiles import Tile


class Scoring(NamedTuple):
    """Score of query i and key j: `scale * q_i . k_j`, then soft-capped, then biased, then masked.

    Attributes:
        scale: factor of the product.
        causal: row i sees columns 0..i; as many rows as columns, and no bias.
        bias: [batch or 1, heads or 1, rows, columns] in the dtype of the queries; -inf where a key is not seen.
        softcap: see `AttentionSpec`.
        keep: factors of the weights, [batch, heads, rows, columns] in the dtype of sums: 0 where dropped.
    """

    scale: float
    causal: bool = False
    bias: Tensor | None = None
    softcap: float | None = None
    keep: Tensor | None = None


def scoring_of(tile: Tile, spec: AttentionSpec, q: Tensor) -> Scoring:
    """The scoring of `tile` for queries like `q`."""
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    return Scoring(scale, tile.kind == "causal", _bias(tile, spec, q), spec.softcap, _keep(tile, spec, q))


def _keep(tile: Tile, spec: AttentionSpec, q: Tensor) -> Tensor | None:
    """What dropout leaves of the weights of `tile`: the same in forward and backward, other numbers in every tile."""
    if not spec.dropout_p:
        return None
    draw = torch.Generator(q.device).manual_seed(hash((spec.seed, tile.at)) % 2**32)
    shape = (*q.shape[:2], tile.q[1] - tile.q[0], tile.k[1] - tile.k[0])
    share = 1 - spec.dropout_p
    keep = torch.empty(shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return keep.bernoulli_(share, generator=draw).div_(share)


def _bias(tile: Tile, spec: AttentionSpec, like: Tensor) -> Tensor | None:
    """The bias of `tile`; None where nothing is added: a causal tile, a full one without ALiBi."""
    if tile.kind == "causal" or (tile.kind == "full" and spec.alibi_slopes is None):
        return None
    rows = torch.arange(tile.q[1] - tile.q[0], device=like.device).unsqueeze(1) + (tile.at[0] - tile.at[1])
    distance = rows - torch.arange(tile.k[1] - tile.k[0], device=like.device)  # how far the key is behind the query
    if spec.alibi_slopes is None:
        bias = like.new_zeros(())
    else:
        exact = torch.promote_types(like.dtype, torch.float32)  # positions have more digits than half precision
        slopes = spec.alibi_slopes.to(device=like.device, dtype=exact)
        bias = (-slopes.view(1, -1, 1, 1) * distance.abs()).to(like.dtype)
    if tile.kind == "full":
        return bias
    return torch.where(_seen(tile, spec, distance), bias, float("-inf"))


def _seen(tile: Tile, spec: AttentionSpec, distance: Tensor) -> Tensor:
    """Which query sees which key: bool [batch or 1, 1, rows, columns]."""
    if spec.causal:
        seen = distance >= 0
        if spec.window is not None:
            seen &= distance < spec.window
    elif spec.window is not None:
        seen = distance.abs() < spec.window
    else:
        seen = torch.ones_like(distance, dtype=torch.bool)
    if spec.documents is None:
        return seen[None, None]
    ids = spec.documents.ids
    asked = ids[:, tile.at[0] : tile.at[0] + tile.q[1] - tile.q[0]]
    there = ids[:, tile.at[1] : tile.at[1] + tile.k[1] - tile.k[0]]
    same = (asked.unsqueeze(2) == there.unsqueeze(1)) & (there >= 0).unsqueeze(1)
    return (same & seen).unsqueeze(1)
