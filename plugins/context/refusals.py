"""Models that cannot work on a cut sequence, refused by name before anything is changed.

It is: what a model's modules and configuration say. It is not: what shows only when it runs (`routing.py`), or limits
of an attention method (its own `check`).
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

from parallax.plugins.context.hf import bases_of, models_of
from parallax.plugins.context.hf_alibi import KNOWN
from parallax.plugins.context.hf_positions import BY_TOKEN

MIXING = (nn.Conv1d, nn.RNNBase)
"""Modules that mix neighbouring positions in another way than attention."""

LOSSES = (None, "ForCausalLM", "ForMaskedLM", "ForTokenClassification")
LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be followed.

    Raises:
        ValueError: naming the module and what about it.
    """
    for name, module in model.named_modules():
        if isinstance(module, MIXING) and getattr(module, "kernel_size", (2,)) != (1,):
            raise _refused(
                type(model).__name__,
                f"{name!r} ({type(module).__name__}) mixes neighbouring tokens, which may be on another rank",
            )
    for base in bases_of(model):
        _check_base(base)
    for each in models_of(model):
        _check_head(each)


def _check_head(model: Any) -> None:
    name, loss = type(model).__name__, getattr(model, "loss_type", None)
    if loss not in LOSSES or name.endswith(("ForSequenceClassification", "ForMultipleChoice", "DoubleHeadsModel")):
        raise _refused(name, "its head looks at single tokens of a sequence, which may be on another rank")


def _check_base(base: Any) -> None:
    name, config = type(base).__name__, base.config
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(name, "it has two sequences, an encoder's and a decoder's")
    if config.get_text_config() is not config:
        raise _refused(name, "it works on more than text")
    if any(type(module).__name__ in KNOWN for module in base.modules()):
        if getattr(config, "slow_but_exact", False) and config.pretraining_tp > 1:
            raise _refused(name, "slow_but_exact=True computes its layers in slices")
        return
    if not base._can_set_attn_implementation():
        raise _refused(name, "it does not call attention through transformers' AttentionInterface")
    parameters = inspect.signature(base.forward).parameters
    if "position_ids" not in parameters:
        raise _refused(name, "its forward takes no position_ids, so it cannot be told the positions of its tokens")
    if found := _counts_positions(base):
        raise _refused(name, f"{found} makes positions by counting tokens")
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYERS))
    if kinds:
        raise _refused(name, f"it has layers of type {', '.join(kinds)}; {', '.join(LAYERS)} can be followed")


def _counts_positions(base: Any) -> str | None:
    """The name of what makes positions by a function of its file, which is not followed as a method is."""
    for kind in {type(module) for module in base.modules()}:
        if hasattr(sys.modules[kind.__module__], BY_TOKEN):
            return kind.__name__
    return None


def _refused(name: str, why: str) -> ValueError:
    return ValueError(f"{name} cannot run with context_parallel_size > 1: {why}; use context_parallel_size=1")
