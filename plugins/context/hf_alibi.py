"""Models of transformers that write their attention with ALiBi out themselves: BLOOM, falcon and MPT.

It is: what their attention modules do, with the attention itself over the whole sequence and slopes in place of the
bias (Press et al. 2022; adding the same to all scores of a row changes no weight, so a bias that grows with the key's
position is the one that falls with the distance). It is not: models that call transformers' attention interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parallax.plugins.context.hf_attention import attention
from parallax.plugins.context.hf_masks import MaskRequest


def bloom(
    self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: MaskRequest, **kwargs: Any
) -> tuple[Tensor, None]:
    """`BloomAttention.forward`; `alibi` [batch x heads, 1, tokens] has the slopes, see `with_slopes`."""
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    dropout = self.attention_dropout.p if self.training else 0.0
    slopes = alibi[: q.shape[1], 0, 0]
    out, _ = attention(self, q, k, v, attention_mask, dropout, self.inv_norm_factor, alibi_slopes=slopes)
    return residual + F.dropout(self.dense(out.flatten(2)), self.hidden_dropout, self.training), None


def falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: MaskRequest,
    position_ids: Tensor | None = None,
    *args: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`FalconAttention.forward`, with rotary embeddings where `alibi` is None; the bias is scaled as the scores are.

    The slopes are rounded to bf16 as there, but not their products with distances.
    """
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb, build_alibi_tensor

    qkv = self.query_key_value(hidden_states)
    if self.new_decoder_architecture:  # groups of queries, each with its key and value, which need not be repeated
        groups = qkv.unflatten(2, (-1, self.num_heads // self.num_kv_heads + 2, self.head_dim))
        q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    else:
        q, k, v = self._split_heads(qkv)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    dropout, slopes = 0.0, None
    if alibi is None:
        assert position_embeddings is not None
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    else:
        dropout = self.attention_dropout.p if self.training else 0.0
        two = torch.ones(1, 2, dtype=torch.int64, device=q.device)
        slopes = build_alibi_tensor(two, self.num_heads, q.dtype)[:, 0, 1] * self.inv_norm_factor
    out, _ = attention(self, q, k, v, attention_mask, dropout, self.inv_norm_factor, alibi_slopes=slopes)
    return self.dense(out.flatten(2)), None


def mpt(
    self: Any, hidden_states: Tensor, position_bias: Tensor, attention_mask: MaskRequest, **kwargs: Any
) -> tuple[Tensor, None]:
    """`MptAttention.forward`; `position_bias` [heads, 1, longest length] ends with minus the slopes, and 0."""
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    q, k, v = (x.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
    dropout = self.attn_dropout_p if self.training else 0.0
    slopes = -position_bias[:, 0, -2]
    out, _ = attention(self, q, k, v, attention_mask, dropout, self.softmax_scale, alibi_slopes=slopes)
    return self.out_proj(out.flatten(2)), None


KNOWN: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"BloomAttention": bloom, "FalconAttention": falcon, "MptAttention": mpt}
)
"""Attention class -> its forward."""


def with_slopes(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """BLOOM's `build_alibi_tensor` without positions: every element [batch x heads, 1, tokens] is its head's slope."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    two = torch.ones(1, 2, dtype=torch.int64, device=attention_mask.device)
    slopes = build_alibi_tensor(two, num_heads, dtype)[:, :, 1:]
    return slopes.repeat(attention_mask.shape[0], 1, attention_mask.shape[1])


def require_one_run(mask: Tensor) -> None:
    """BLOOM and falcon count distances in tokens that are no padding: those of a row of [batch, tokens] must adjoin.

    Raises:
        ValueError: there is padding between tokens of a row.
    """
    starts = torch.nn.functional.pad(mask.bool(), (1, 0)).long().diff(dim=1) > 0
    if bool((starts.sum(1) > 1).any()):
        raise ValueError(
            "attention_mask has padding between the tokens of a sequence, which this model leaves out of its distances "
            "(ALiBi) and context parallelism cannot; pad at an end, or use context_parallel_size=1"
        )
