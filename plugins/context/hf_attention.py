"""Attention layers of Hugging Face models on a cut sequence.

It is: our entry in transformers' attention interface. It is not: masks (`hf_masks.py`), or what is put around a model
(`hf.py`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from parallax.plugins.context.base import AttentionSpec
from parallax.plugins.context.hf_masks import MaskRequest
from parallax.plugins.context.sequence import CutSequence

SEQUENCE = "_parallax_sequence"
"""Attribute of a model's modules by which their attention finds its sequence."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRequest | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Our entry in the attention interface; shapes [batch, heads, tokens, dim], the result [batch, tokens, heads, dim].

    Raises:
        ValueError: a mask or bias that is given as a matrix, or outside a step.
    """
    sequence: CutSequence = module.__dict__[SEQUENCE]
    if position_bias is not None or isinstance(attention_mask, Tensor):
        raise ValueError(
            f"{type(module).__name__} adds a matrix of tokens against tokens to its scores, which cannot be cut over "
            f"the context ranks; use context_parallel_size=1"
        )
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = MaskRequest(causal, sliding_window)
    if not attention_mask.settled:
        chunk, documents = attention_mask.chunk, sequence.documents
        attention_mask.documents = documents if chunk is None else sequence.in_chunks(chunk, query.device)
        attention_mask.settled = True
    spec = AttentionSpec(
        causal=attention_mask.causal,
        window=attention_mask.window,
        softcap=softcap,
        sinks=s_aux,
        alibi_slopes=alibi_slopes,
        scale=scaling,
        dropout_p=dropout,
        documents=attention_mask.documents,
    )
    return sequence.attend(query, key, value, spec).transpose(1, 2).contiguous(), None
