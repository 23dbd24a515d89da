"""Mixture-of-experts models parity is shown on: small configs of transformers' own, unmodified, and a plain one.

Routers of random weights spread their choices unevenly, so that some experts get no token of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "experts_implementation": "eager",  # torch's grouped product knows no fp64
}


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}  # so large that an error shows


def mixtral(**more: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=4, **more))


def qwen3_moe(dense: int = 1, **more: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES,
            head_dim=8,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            mlp_only_layers=list(range(dense)),
            **more,
        )
    )


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 4},
            intermediate_size=48,
            moe_intermediate_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=2,  # so that the first of two pipeline stages has no experts
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
    )


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(
        GptOssConfig(
            **SIZES, head_dim=8, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=5
        )
    )


def olmoe() -> nn.Module:
    """The experts of its second layer are frozen, as all are where adapters train."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    model = OlmoeForCausalLM(OlmoeConfig(**SIZES, intermediate_size=16, num_experts=8, num_experts_per_tok=2))
    model.model.layers[1].mlp.experts.requires_grad_(False)
    return model


class PlainExperts(nn.Module):
    """Experts in one tensor per matrix, as a loop over those that were chosen."""

    def __init__(self, dim: int, width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, width, dim) * 0.2)
        self.down = nn.Parameter(torch.randn(num_experts, dim, width) * 0.2)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            inner = F.gelu(F.linear(hidden_states[token], self.up[expert]))
            y = F.linear(inner, self.down[expert]) * top_k_weights[token, choice, None]
            out = out.index_add(0, token, y)
        return out


class PlainMoeBlock(nn.Module):
    def __init__(self, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.norm1, self.qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.norm2 = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = PlainExperts(dim, 24, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        tokens = self.norm2(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(self.top_k)
        return x + self.experts(tokens, index, weights).view_as(x)


class PlainMoe(nn.Module):
    """A module that says in Hugging Face's words which of its parts are experts."""

    tp_plan = {
        "embed": "embedding_rowwise",
        "head": "colwise_gather_output",
        "layers.*.experts.up": "colwise",
        "layers.*.experts.down": "rowwise",
        "layers.*.experts": "moe_tp_experts",
    }
    pp_plan = {
        "embed": (["ids"], ["x"]),
        "layers": (["x"], ["x"]),
        "norm": (["x"], ["x"]),
        "head": (["x"], ["logits"]),
    }
    ep_plan = {
        "layers.*.experts": "ep_dispatch_experts",
        "layers.*.experts.up": "grouped_gemm",
        "layers.*.experts.down": "grouped_gemm",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(PlainMoeBlock(32, 4, 2) for _ in range(4))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def logits_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """transformers upcasts its own loss to fp32, which would hide everything below 1e-7."""
    logits, labels = model(batch["input_ids"]).logits, batch["labels"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def own_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """With the auxiliary loss; inside `KeepDouble` it is computed in fp64."""
    return model(**batch).loss


def z_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """With a loss of the step's own: the mean over tokens of the squared log-sum of router logits (ST-MoE, eq. 5)."""
    out = model(**batch)
    return out.loss + 0.1 * torch.cat(out.router_logits).logsumexp(-1).square().mean()


def plain_moe_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


MOE: Mapping[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor], str]] = MappingProxyType(
    {
        "mixtral": (mixtral, logits_loss, "input_ids"),
        "qwen3_moe": (qwen3_moe, logits_loss, "input_ids"),
        "deepseek_v3": (deepseek_v3, logits_loss, "input_ids"),
        "gpt_oss": (gpt_oss, logits_loss, "input_ids"),
        "olmoe": (olmoe, logits_loss, "input_ids"),
        "plain_moe": (PlainMoe, plain_moe_loss, "ids"),
    }
)

BALANCED_MOE: Mapping[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor], str]] = MappingProxyType(
    {
        "mixtral_balanced": (partial(mixtral, **BALANCED), own_loss, "input_ids"),
        "qwen3_moe_balanced": (partial(qwen3_moe, dense=2, **BALANCED), own_loss, "input_ids"),
        "mixtral_z": (partial(mixtral, **BALANCED), z_loss, "input_ids"),
    }
)
"""With an auxiliary loss; the second one has no router on the first of two pipeline stages."""
