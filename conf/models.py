"""Builds the model a configuration describes.

It is: the names of `ModelConf` in the words of each family's own configuration class, and the call that makes the
unmodified model. It is not: an architecture; transformers has those, and `plain.py` one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from parallax.conf.plain import Plain
from parallax.conf.schema import ModelConf
from parallax.strategies.names import unknown_name

_LLAMA = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "gpt2": {
            "vocab_size": "vocab_size",
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "max_positions": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "tie_embeddings": "tie_word_embeddings",
        },
        "mixtral": {**_LLAMA, "num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        "qwen3_moe": {
            **_LLAMA,
            "num_experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
            "expert_intermediate_size": "moe_intermediate_size",
        },
        "plain": {
            "vocab_size": "vocab",
            "hidden_size": "hidden",
            "intermediate_size": "intermediate",
            "num_layers": "layers",
            "num_heads": "heads",
            "max_positions": "positions",
            "norm_eps": "eps",
        },
    }
)
"""Family -> key of `ModelConf` -> its name there. Keys that are missing are of no use to the family."""


def arguments(conf: ModelConf) -> dict[str, Any]:
    """`conf` in the words of its family; what is unset is left out.

    Raises:
        ValueError: a key is set that the family has no use for.
    """
    names = NAMES[conf.family]
    found: dict[str, Any] = {}
    for field in fields(conf):
        if field.name in ("family", "weights", "options"):
            continue
        value = getattr(conf, field.name)
        if field.name in names:
            if value is not None:
                found[names[field.name]] = value
        elif value is not None and value != field.default:
            raise ValueError(
                f"model.{field.name}={value} is of no use to family {conf.family!r}; leave it out (its keys: "
                f"{', '.join(names)})"
            )
    if conf.family == "plain":
        if conf.options or conf.weights is not None:
            raise ValueError("family 'plain' takes neither model.options nor model.weights; leave them out")
        return {"intermediate": 4 * conf.hidden_size, **found}
    if conf.num_kv_heads is None and "num_key_value_heads" in names.values():
        found["num_key_value_heads"] = conf.num_heads
    if conf.intermediate_size is None and conf.family != "gpt2":
        found["intermediate_size"] = 4 * conf.hidden_size
    return found


def build_model(conf: ModelConf) -> nn.Module:
    """The model, on whatever device is current; with the weights of `conf.weights` if it names a folder.

    Call it in `configure_model`. `model(input_ids=, labels=)` gives `.loss` and `.logits`.

    Raises:
        ValueError: keys that do not fit the family, transformers is missing, or a folder of another model.
    """
    if conf.family == "plain":
        return Plain(**arguments(conf))
    config = hf_config(conf)
    from transformers import AutoModelForCausalLM

    if conf.weights is None:
        return AutoModelForCausalLM.from_config(config)
    _same_model(conf, config)
    return AutoModelForCausalLM.from_pretrained(conf.weights, local_files_only=True)


def hf_config(conf: ModelConf) -> Any:
    """The transformers configuration of `conf`, without a cache of keys and values: it is for training.

    Raises:
        ValueError: as `build_model`.
    """
    try:
        from transformers import AutoConfig
    except ImportError as missing:
        raise ValueError(
            f"model.family={conf.family} needs transformers: pip install 'lightning-parallax[hf]'"
        ) from missing
    default = AutoConfig.for_model(conf.family)
    for name in conf.options:
        if not hasattr(default, name):  # it would be kept, and never read
            raise unknown_name("key in 'model.options'", name, default.to_dict())
    given = arguments(conf)
    theta = given.pop("rope_theta", None)
    rope = {} if theta is None else {"rope_parameters": {"rope_type": "default", "rope_theta": float(theta)}}
    return AutoConfig.for_model(conf.family, **{"use_cache": False, **given, **rope, **conf.options})


def _same_model(conf: ModelConf, config: Any) -> None:
    """Refuse a folder whose config.json has other numbers than `conf`: one of the two would be ignored."""
    assert conf.weights is not None
    file = conf.weights.expanduser() / "config.json"
    if not file.is_file():
        raise ValueError(f"model.weights={conf.weights} is no Hugging Face folder: there is no {file}")
    there = json.loads(file.read_text())
    if there.get("model_type") != conf.family:
        raise ValueError(
            f"model.weights={conf.weights} holds a {there.get('model_type')!r}, but model.family={conf.family}"
        )
    for key, name in NAMES[conf.family].items():
        mine, theirs = getattr(config, name, None), there.get(name)
        if theirs is not None and mine != theirs and key != "rope_theta":
            raise ValueError(f"model.{key} is {mine}, but {name} in {file} is {theirs}: set model.{key}={theirs}")


def parameter_count(conf: ModelConf) -> int:
    """Parameters of the whole model, shared ones once. Nothing is allocated."""
    with torch.device("meta"):
        model = build_model(replace(conf, weights=None))
    return sum(p.numel() for p in model.parameters())
