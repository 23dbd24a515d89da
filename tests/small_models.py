"""A small model of every causal-language-model architecture in the installed transformers, made from its config class.

It is: which architectures there are, a small config of each by shrinking the sizes its config class knows, and a model
from it in fp64 whose parameters are all random. It is not: anything that knows of parallelism, and no list of
architectures is kept: only the few whose configs cannot be shrunk by the names of their sizes have an entry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 101  # a prime: padded at every size
BATCH, SEQ = 2, 8

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "vocab_size_per_layer_input": VOCAB, "pad_id": 0, "unpadded_vocab_size": VOCAB,
    # widths
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "n_inner": 64, "word_embed_proj_dim": 32, "embed_dim": 32,
    "intermediate_size": 64, "ffn_hidden_size": 64, "ffn_dim": 64, "mlp_hidden_size": 64, "d_ff": 64,
    "inner_dim": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 8, "embedding_size": 32,
    "text_hidden_size": 32,
    # depths
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_kv_shared_layers": 0,
    "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "first_k_dense_replace": 1, "decoder_layers": 2,
    # heads
    "num_attention_heads": 8, "n_head": 8, "n_heads": 8, "num_heads": 8, "num_key_value_heads": 4, "num_kv_heads": 4,
    "decoder_attention_heads": 8, "decoder_ffn_dim": 64, "n_kv_heads": 4,
    "head_dim": 4, "kv_channels": 4, "global_head_dim": 4, "num_global_key_value_heads": 4, "rotary_dim": 4,
    "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 4, "swa_v_head_dim": 4,
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "qk_head_dim": 8, "query_pre_attn_scalar": 4, "index_head_dim": 8, "index_n_heads": 4, "index_topk": 4,
    # experts
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "ffn_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "top_k_experts": 2, "num_experts_per_token": 2,
    "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "expert_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    # state-space and linear attention
    "mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_ssm": 64,
    "mamba_dt_rank": 4, "state_size": 4, "conv_kernel": 4, "time_step_rank": 4, "mamba_num_heads": 8,
    "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 4, "mamba_chunk_size": 4, "ssm_state_size": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "lru_width": 32, "attention_window_size": 8, "time_mix_extra_dim": 8,
    # length
    "max_position_embeddings": 32, "n_positions": 32, "n_ctx": 32, "max_seq_len": 32, "context_length": 32,
    "sliding_window": 4, "attention_chunk_size": 4,
}  # fmt: skip
"""Attribute of a config -> small value; vocabularies are prime, everything else divides by 4 where it is cut."""

LARGEST = 8_000_000
"""Parameters of a small model, at most."""

DROPOUTS = ("dropout", "pdrop", "dropout_prob", "dropout_rate", "drop_prob")

SPECIAL: dict[str, dict[str, Any]] = {
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 4},  # of 40B and 180B; 7B has one key-value head
    "cohere_compass_text": {  # its default config lacks what its model asks for
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(
            ("sliding_attention", "full_attention"), {"rope_type": "default", "rope_theta": 10000.0}
        ),
    },
    "beam": {"mlp_layer_types": ["dense", "sparse"]},  # as the next ones: two layers, one with experts
    "flint": {"mlp_only_layers": [0]},
    "step3p5": {"mlp_layer_types": ["dense", "sparse"]},
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"),
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "diffllama": {"num_key_value_heads": 8},  # in two halves
    "dots3_note_text": {"per_layer_config": None},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16]},
    "glm5_next_text": {
        "index_kpool": 4, "qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"],
    },
    "zaya": {"num_experts_per_tok": 1},
    "glm4v_moe_text": {"rope_parameters": {"rope_theta": 10000.0, "mrope_section": [1, 0, 0], "rope_type": "default"}},
    "hy_v4_vl_text": {"rope_parameters": {"rope_theta": 10000.0, "mrope_section": [1, 1, 0], "rope_type": "default"}},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma4_text": {"enable_moe_block": True},  # of 26B-A4B
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
"""model_type -> arguments beyond `SIZES`, for what sizes alone do not settle."""


def architectures() -> list[str]:
    """model_type of every causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def expert_architectures() -> list[str]:
    """model_type of every further model with an expert-parallel plan: text parts and multimodal models."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(name for name in MODEL_MAPPING_NAMES if name not in architectures() and has_expert_plan(name))


def small_config(model_type: str, **changes: Any) -> Any:
    """A small config of `model_type`, without dropout; configs inside it are small too."""
    from transformers import AutoConfig

    return _shrink(AutoConfig.for_model(model_type), SPECIAL.get(model_type, {}) | changes)


def _shrink(default: Any, changes: dict[str, Any]) -> Any:
    known = default.to_dict()
    wanted = {k: v for k, v in SIZES.items() if k in known or hasattr(default, k)}
    wanted = {k: v for k, v in wanted.items() if not _computed(default, k)}
    if "kv_lora_rank" in known:  # latent attention has as many keys as queries, of the rotary width
        wanted |= {"num_key_value_heads": SIZES["num_attention_heads"]}
    wanted |= {k: type(known[k])(0) for k in known if k.endswith(DROPOUTS) and isinstance(known[k], (int, float))}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(known.get(name), list):
            wanted[name] = None
    for name in getattr(default, "sub_configs", {}):
        if (inner := getattr(default, name, None)) is not None:
            wanted[name] = _shrink(inner, SPECIAL.get(inner.model_type, {}))
    return type(default)(**(wanted | changes))


def _computed(config: Any, name: str) -> bool:
    """Whether the config class computes `name` from other sizes."""
    found = getattr(type(config), name, None)
    return isinstance(found, property) and found.fset is None


def build_small(model_type: str, **changes: Any) -> nn.Module:
    """The causal language model in training mode, fp64, every parameter random and the same on every call.

    Of a model that is none its body, whose output are hidden states.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM if model_type in architectures() else AutoModel

    def make() -> nn.Module:
        config = small_config(model_type, **changes)
        model: Any = kind.from_config(config, attn_implementation="eager")
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "eager"  # the grouped product has no fp64
        return model

    with torch.device("meta"):
        size = sum(p.numel() for p in make().parameters())
    if size > LARGEST:
        raise ValueError(f"the small config of {model_type} has {size:,} parameters: it lacks a size in `SIZES`")
    torch.manual_seed(1)
    return randomise(make())


def randomise(model: nn.Module) -> nn.Module:
    """Fp64, and noise on every parameter: zeros and ones would hide mistakes."""
    generator = torch.Generator().manual_seed(2)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.data = param.data.double().nan_to_num() + 0.1 * noise
    return model.double().train()


def token_ids() -> Tensor:
    """[BATCH, SEQ] ids from every part of the vocabulary."""
    return torch.randint(3, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(4))


def plan_of(model_type: str) -> str:
    """Whose tensor-parallel plan the architecture has: transformers', ours, both, or nobody's ("")."""
    from parallax.plugins.tensor.known import KNOWN_PLANS

    configs = _configs(model_type)
    carried = any(getattr(c, "base_model_tp_plan", None) for c in configs)
    known = {c.model_type for c in configs} & KNOWN_PLANS.keys()
    return ", ".join(["transformers"] * carried + ["ours"] * bool(known))


def has_expert_plan(model_type: str) -> bool:
    """Whether transformers has an expert-parallel plan for the architecture."""
    return any(getattr(c, "base_model_ep_plan", None) for c in _configs(model_type))


def _configs(model_type: str) -> list[Any]:
    """Config objects (or the class) that may carry plans: of the model, and of its text part."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = AutoConfig.for_model(model_type)
        return [config, config.get_text_config()]
    except Exception:  # no valid default, or several parts that could be the text's: the class says what it can
        return [CONFIG_MAPPING[model_type]]
