"""The same architecture, small: a 70B recipe verified on a laptop.

It is: a rule that makes the numbers of a Hugging Face config small while keeping what parallelism depends on (ratios
of heads, ties, layer patterns, number of kinds of layers). It is not: a model zoo.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIMITS: dict[str, int] = {
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "embed_dim": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 8,
    "n_layer": 8,
    "num_attention_heads": 8,
    "n_head": 8,
    "head_dim": 8,
    "rotary_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": 512,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
}
"""Field -> largest value it keeps."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")


def shrink(config: Any) -> None:
    """Make the numbers of a config (and of its sub-configs) small, in place.

    What parallelism looks at is kept: the ratio of query to key heads, every kind of layer, groups of experts.
    """
    for part in [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]:
        before = {name: _field(part, name) for name in (*LIMITS, "num_key_value_heads")}
        for name, limit in LIMITS.items():
            if isinstance(before[name], int) and before[name] > limit:
                setattr(part, name, limit)
        heads, kv = before["num_attention_heads"], before["num_key_value_heads"]
        if isinstance(heads, int) and isinstance(kv, int):
            part.num_key_value_heads = max(1, part.num_attention_heads * kv // heads)
        if isinstance(vars(part).get("qk_head_dim"), int):
            part.qk_head_dim = part.qk_nope_head_dim + part.qk_rope_head_dim
        if isinstance(kinds := vars(part).get("layer_types"), list):
            part.layer_types = _every_kind(kinds, part.num_hidden_layers)
        _shrink_choice(part, before)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            token = getattr(part, name, None)
            if isinstance(token, int) and token >= (getattr(part, "vocab_size", None) or token + 1):
                setattr(part, name, 0)


def _field(part: Any, name: str) -> Any:
    """The value of a field that a config has under `name` or the model's own name for it; None if it has none."""
    return vars(part).get(getattr(part, "attribute_map", {}).get(name, name))


def _every_kind(kinds: list[Any], count: int) -> list[Any]:
    """The first `count` of `kinds`, the last of which make room for those that come later only."""
    first = kinds[:count]
    later = [kind for kind in dict.fromkeys(kinds) if kind not in first]
    return [*first[: len(first) - len(later)], *later]


def _shrink_choice(part: Any, before: dict[str, Any]) -> None:
    """Of fewer experts at most two are chosen, from groups of two or more."""
    experts = next((LIMITS[n] for n in EXPERTS if isinstance(before[n], int) and before[n] > LIMITS[n]), None)
    if experts is None:
        return
    for chosen in CHOSEN:
        if isinstance(k := _field(part, chosen), int):
            setattr(part, chosen, min(k, 2))
    groups, taken = _field(part, "n_group"), _field(part, "topk_group")
    if isinstance(groups, int) and isinstance(taken, int) and groups > experts // 2:
        part.n_group = experts // 2
        part.topk_group = max(1, taken * part.n_group // groups)


@contextmanager
def shrunk_configs(active: bool) -> Iterator[None]:
    """Inside, when `active`, every Hugging Face model is built from its config made small."""
    if not active:
        yield
        return
    base: Any = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    # Before any part of a model reads its config, and whichever class comes first: __new__ sees it as it is given.

    def made(cls: Any, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if config is not None and hasattr(config, "to_dict"):
            shrink(config)
        return object.__new__(cls)

    def plain(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)

    before = vars(base).get("__new__", plain)  # deleting it would leave a class that takes no arguments
    base.__new__ = made
    try:
        yield
    finally:
        base.__new__ = before
