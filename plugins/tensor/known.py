"""Plans for well-known models that carry none of their own.

It is: a table keyed by `config.model_type`, in the words of `styles.py`, relative to the base model (what
`base_model_prefix` names; `LM_HEAD` is relative to the model around it). Entries that match nothing in a
given variant are left out. It is not: the place for models that carry a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

GPT2 = {
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

KNOWN_PLANS: Mapping[str, Mapping[str, str]] = MappingProxyType({"gpt2": GPT2})
"""model_type -> plan of the base model."""

LM_HEAD: Mapping[str, str] = MappingProxyType({"lm_head": "colwise_gather_output"})
"""Plan of a language-model head around any known base model."""
