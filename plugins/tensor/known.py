"""Plans for well-known models that carry none for their layers, or one that sends more than it need.

It is: a table keyed by `config.model_type`, in the words of `styles.py`, relative to the base model (what
`base_model_prefix` names; `LM_HEAD` is relative to the model around it). Entries that match nothing in a
given variant are left out. They go before what transformers' class carries; the user's own plan goes before them.
It is not: the place for models that carry a good plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Plan = dict[str, str]


def _gpt2(config: Any) -> Plan:
    return {
        # c_attn is one Conv1D for query, key and value, split by `split_size` in the forward
        "h.*.attn.c_attn": "packed_colwise(3)",
        "h.*.attn.c_proj": "rowwise",
        "h.*.attn.split_size": "local_size",
        "h.*.attn.num_heads": "local_size",
        # present only with `add_cross_attention`: key and value are fused, the query is apart
        "h.*.crossattention.c_attn": "packed_colwise(2)",
        "h.*.crossattention.q_attn": "colwise",
        "h.*.crossattention.c_proj": "rowwise",
        "h.*.crossattention.split_size": "local_size",
        "h.*.crossattention.num_heads": "local_size",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }


def _bloom(config: Any) -> Plan:
    return {
        # query, key and value are interleaved head by head, so whole heads are consecutive
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.self_attention.num_heads": "local_size",
        "h.*.self_attention.alibi": "local_heads",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    }


def _falcon(config: Any) -> Plan:
    fused = {}
    if config.new_decoder_architecture:  # each key and value after the queries that share them
        fused = _falcon_qkv(f"grouped_qkv_colwise({config.num_attention_heads},{config.num_kv_heads})")
    elif config.multi_query:
        fused = _falcon_qkv(f"qkv_colwise({config.num_attention_heads},1)")
    return _bloom(config) | fused | {
        "h.*.self_attention.num_kv_heads": "local_size",
        "h.*.self_attention.attention_mask": "local_heads",  # holds the ALiBi of every head
    }


def _falcon_qkv(word: str) -> Plan:
    return {"h.*.self_attention.query_key_value": word}


def _opt(config: Any) -> Plan:
    return {
        **{f"decoder.layers.*.self_attn.{n}_proj": "colwise" for n in "qkv"},
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.self_attn.num_heads": "local_size",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    }


def _attention(*names: str) -> Plan:
    """Separate projections, whose forward counts heads from the width it meets."""
    return {
        **{f"layers.*.self_attn.{n}_proj": "colwise" for n in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
        **{f"layers.*.self_attn.{name}": "local_size" for name in names},
    }


def _gated_mlp(name: str = "mlp") -> Plan:
    return {
        f"layers.*.{name}.gate_proj": "colwise",
        f"layers.*.{name}.up_proj": "colwise",
        f"layers.*.{name}.down_proj": "rowwise",
    }


def _llama(config: Any) -> Plan:
    return _attention() | _gated_mlp()


def _fused_mlp(config: Any) -> Plan:
    """Gate and up in one matrix, halved in the forward: each half is cut, and nothing gathered in between."""
    return {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}


def _stablelm(config: Any) -> Plan:
    plan = _attention("num_heads", "num_key_value_heads") | _gated_mlp()
    if config.qk_layernorm:
        return plan | {f"layers.*.self_attn.{n}_layernorm": "per_head" for n in "qk"}
    return plan


def _phi3(config: Any) -> Plan:
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    return {
        "layers.*.self_attn.qkv_proj": f"qkv_colwise({heads},{shared})",
        "layers.*.self_attn.config.num_attention_heads": "local_size",
        "layers.*.self_attn.num_key_value_heads": "local_size",
        "layers.*.self_attn.o_proj": "rowwise",
        **_fused_mlp(config),
    }


def _gpt_oss(config: Any) -> Plan:
    return _attention() | {"layers.*.self_attn.sinks": "colwise"}


def _head_norms(*names: str) -> Plan:
    """Norms of each query and key head, which see this rank's heads."""
    return {f"layers.*.self_attn.{name}": "replicated_with_grad_allreduce" for name in names}


def _hunyuan(config: Any) -> Plan:
    return _llama(config) | _gated_mlp("mlp.shared_mlp") | _head_norms("query_layernorm", "key_layernorm")


def _latent(config: Any) -> Plan:
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"): the heads are cut, the latents are whole."""
    return {
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "q_b", "kv_b")},
        "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "layers.*.self_attn.o_proj": "rowwise",
    }


def _flint(config: Any) -> Plan:
    return _attention() | _head_norms("q_norm", "k_norm") | {"layers.*.self_attn.sinks": "colwise"}


def _granite_moe(config: Any) -> Plan:
    return _attention() | {
        "layers.*.shared_mlp.input_linear": "packed_colwise",
        "layers.*.shared_mlp.output_linear": "rowwise",
    }


def _jamba(config: Any) -> Plan:
    return _attention() | _gated_mlp("feed_forward")


def _lfm2(config: Any) -> Plan:
    return {
        **{f"layers.*.self_attn.{n}_proj": "colwise" for n in "qkv"},
        "layers.*.self_attn.out_proj": "rowwise",
        **_head_norms("q_layernorm", "k_layernorm"),
        "layers.*.feed_forward.w1": "colwise",
        "layers.*.feed_forward.w3": "colwise",
        "layers.*.feed_forward.w2": "rowwise",
    }


def _lfm3(config: Any) -> Plan:
    return _lfm2(config) | {
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.g_proj": "colwise",  # a gate of each head
        **_head_norms("q_norm", "k_norm"),
    }


def _wide_norms(config: Any) -> Plan:
    """Norms over all heads at once: transformers' plans gather there; here one number per token is summed."""
    return _attention() | {f"layers.*.self_attn.{n}_norm": "colwise_norm" for n in "qk"}


def _diffllama(config: Any) -> Plan:
    """Differential attention (Ye et al. 2024): a head of the first half and its partner in the second stay together."""
    return {
        **_gated_mlp(),
        **{f"layers.*.self_attn.{n}_proj": "packed_colwise" for n in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
        **_head_norms("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"),
    }


def _dory(config: Any) -> Plan:
    reason = "a norm over the outputs of all heads stands before it, and one over all features of the MLP"
    return {"layers.*.self_attn.o_proj": f"refused: {reason}"}


def _afmoe(config: Any) -> Plan:
    gate = {"layers.*.self_attn.gate_proj": "colwise"}
    return _llama(config) | _gated_mlp("mlp.shared_experts") | gate | _head_norms("q_norm", "k_norm")


def _nemotron_h(config: Any) -> Plan:
    """Attention, MLP or experts, all called `mixer`; state-space mixers stay whole."""
    return {
        **{f"layers.*.mixer.{n}_proj": "colwise" for n in ("q", "k", "v", "up")},
        **{f"layers.*.mixer.{n}_proj": "rowwise" for n in ("o", "down")},
        "layers.*.mixer.shared_experts.up_proj": "colwise",
        "layers.*.mixer.shared_experts.down_proj": "rowwise",
    }


def _inkling(config: Any) -> Plan:
    """transformers' plan cuts gate and up, halves of one matrix, as if they were one.

    Inkling's embedding norms what it looks up, and its shared experts take weights of the router: both stay whole.
    """
    shared = ("", ".gate_proj", ".up_proj", ".down_proj")
    whole = ("embed_tokens", *(f"layers.*.mlp.shared_experts{part}" for part in shared))
    return {
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        **dict.fromkeys(whole if config.model_type == "inkling_text" else (), "replicate"),
    }


def _doge(config: Any) -> Plan:
    reason = "the plan of transformers gives every rank the dynamic mask of all heads"
    return {"layers.*.self_attn.dt_proj": f"refused: {reason}"}


def _shared_expert(name: str) -> Callable[[Any], Plan]:
    """The dense expert beside the routed ones, where transformers' plan leaves it whole."""
    return lambda config: _gated_mlp(f"mlp.{name}")


def _refused(pattern: str, reason: str) -> Callable[[Any], Plan]:
    return lambda config: {pattern: f"refused: {reason}"}


_COPIES = "these experts take tokens that were copied for each of them, not which token goes to which"
_REFUSED: dict[str, Callable[[Any], Plan]] = {
    "llama4_text": _refused("model.layers.*.feed_forward.experts", _COPIES),  # its base has another name than it says
}


KNOWN_PLANS: Mapping[str, Callable[[Any], Plan]] = MappingProxyType(
    {
        "gpt2": _gpt2,
        "bloom": _bloom,
        "falcon": _falcon,
        "opt": _opt,
        "stablelm": _stablelm,
        "phi3": _phi3,
        "glm": _fused_mlp,
        "glm4": _fused_mlp,
        "gpt_oss": _gpt_oss,
        "emu3_text_model": _llama,
        "doge": _doge,
        "hunyuan_v1_dense": _hunyuan,
        "hunyuan_v1_moe": _hunyuan,
        "phimoe": lambda config: _attention(),
        "flint": _flint,
        "granitemoe": _granite_moe,
        "granitemoeshared": _granite_moe,
        "granitemoe_swa": _granite_moe,
        "granitemoehybrid": _granite_moe,
        **dict.fromkeys(("jamba", "bamba", "falcon_h1"), _jamba),
        **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
        "lfm3": _lfm3,
        "afmoe": _afmoe,
        "sarvam_moe": lambda config: _head_norms("q_norm", "k_norm"),
        "nemotron_h": _nemotron_h,
        "diffllama": _diffllama,
        "dory": _dory,
        **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), _inkling),
        **_REFUSED,
        **dict.fromkeys(("olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2", "olmo_hybrid"), _wide_norms),
        **dict.fromkeys(("deepseek_v3", "axk1", "sarvam_mla", "youtu"), _latent),
        "qwen2_moe": _shared_expert("shared_expert"),
        **dict.fromkeys(("cohere2_moe", "exaone_moe", "glm4_moe_lite", "solar_open"), _shared_expert("shared_experts")),
    }
)
"""model_type -> plan of the base model, from its config."""

LM_HEAD: Mapping[str, str] = MappingProxyType({"lm_head": "colwise_gather_output"})
"""Plan of a language-model head around any known base model."""
