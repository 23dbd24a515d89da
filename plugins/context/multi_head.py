"""`nn.MultiheadAttention`, and with it torch's transformer layers, on a sequence that is cut.

It is: `F.multi_head_attention_forward` with its attention over the whole sequence. It is not: attention itself, or the
reading of masks (`functional.py`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from parallax.plugins.context.functional import attention, documents_of_mask, understood
from parallax.plugins.context.sequence import CutSequence


def multi_head_attention(
    sequence: CutSequence,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """Arguments are torch's; tensors [tokens, batch, width]. There are no weights to return: None in their place.

    Raises:
        ValueError: one sequence without a batch, added keys, or a mask that cannot be followed.
    """
    if query.dim() != 3 or bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None:
        raise ValueError(
            "nn.MultiheadAttention on a cut sequence needs inputs with a batch dim, and no added keys (add_bias_kv, "
            "add_zero_attn); change this, or use context_parallel_size=1"
        )
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if in_proj_weight is not None and not use_separate_proj_weight:
        weights = in_proj_weight.chunk(3)
    biases: Any = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    projected = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in projected)
    if attn_mask is not None:  # torch marks here what is not seen
        causal, documents = understood(sequence, attn_mask if attn_mask.is_floating_point() else ~attn_mask)
    else:
        causal, documents = is_causal, None
    if key_padding_mask is not None:
        padding = key_padding_mask < 0 if key_padding_mask.is_floating_point() else key_padding_mask
        documents = documents_of_mask(sequence, ~padding)
    out = attention(sequence, q, k, v, causal, None, dropout_p if training else 0.0, documents)
    return F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), None
