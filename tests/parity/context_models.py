"""Models whose attention has what sequences that are cut must not lose: windows, soft caps, normalised queries.

Small models of transformers, unmodified; what is trained on them is in `models.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)


def gemma2() -> nn.Module:
    """One layer with a window of 5 tokens, one without; scores and logits capped.

    transformers computes its softmax and norms in fp32 whatever the dtype of the weights; here they keep fp64, or the
    one process would be exact to 1e-7 only.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, Gemma2Config, Gemma2ForCausalLM
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("exact", exact_attention)
    AttentionMaskInterface.register("exact", sdpa_mask)
    config = Gemma2Config(**SMALL, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
    config._attn_implementation = "exact"
    model = Gemma2ForCausalLM(config)
    for module in model.modules():
        if type(module).__name__ == "Gemma2RMSNorm":
            module.forward = MethodType(exact_norm, module)
    return model


def exact_norm(self: Any, x: Tensor) -> Tensor:
    """Gemma's norm, without a detour over fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def exact_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float, softcap: float, **rest: Any
) -> tuple[Tensor, None]:
    """Capped attention written out, in the dtype of the queries."""
    groups, n = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    seen = torch.ones(n, n, dtype=torch.bool).tril() if mask is None else mask
    scores = softcap * torch.tanh(q @ k.transpose(2, 3) * scaling / softcap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2), None


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SMALL))


def mistral() -> nn.Module:
    """A window of 2 tokens: less than any rank holds."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=2))


CONTEXT: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {"gemma2": gemma2, "qwen3": qwen3, "mistral": mistral}
)
