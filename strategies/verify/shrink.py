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
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 8,
    "n_layer": 8,
    "num_attention_heads": 8,
    "n_head": 8,
    "head_dim": 8,
    "vocab_size": 512,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
}
"""Field -> largest value it keeps."""


def shrink(config: Any) -> None:
    """Make the numbers of a config (and of its sub-configs) small, in place.

    Ratios that parallelism looks at are kept: query to key heads, and the experts chosen of each token.
    """
    for part in [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]:
        heads, kv = getattr(part, "num_attention_heads", None), getattr(part, "num_key_value_heads", None)
        for name, limit in LIMITS.items():
            value = getattr(part, name, None)
            if isinstance(value, int) and value > limit:
                setattr(part, name, limit)
        if isinstance(heads, int) and isinstance(kv, int):
            part.num_key_value_heads = max(1, part.num_attention_heads * kv // heads)
        layers = getattr(part, "num_hidden_layers", None)
        kinds = getattr(part, "layer_types", None)
        if isinstance(kinds, list) and isinstance(layers, int):
            part.layer_types = kinds[:layers]
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            token = getattr(part, name, None)
            if isinstance(token, int) and token >= (getattr(part, "vocab_size", None) or token + 1):
                setattr(part, name, 0)


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

    base.__new__ = made
    try:
        yield
    finally:
        del base.__new__
