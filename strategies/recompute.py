"""Activations that are computed again in backward instead of kept: of whole layers, or of attention's core alone.

It is: `layout.recompute` carried out on a model, by transformers' own means where it has them. It is not: needed by
those who call `gradient_checkpointing_enable` or `torch.utils.checkpoint` themselves, which work as well.

"full" keeps the input of each layer. "selective" (Korthikanti et al. 2022, section 5) keeps everything but what
attention makes of query, key and value: the scores, their softmax and its dropout, 5 a s^2 b bytes in fp16, which are
large and cheap to compute. Attention kernels that never write scores to memory (flash) have nothing to gain from it.
"stage" is the pipeline's own (`plugins/pipeline/compute.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from parallax.plugins.pipeline.plans import find_structure
from parallax.strategies.layout import Layout

PREFIX = "recomputed_"


def check(layout: Layout, model: nn.Module) -> None:
    """Refuse what `apply` could not do.

    Raises:
        ValueError: no list of layers is known, or attention is not within reach; with what to do.
    """
    if layout.recompute == "full":
        for hf in _hf_models(model):
            if not hf.supports_gradient_checkpointing:
                raise ValueError(f"{type(hf).__name__} cannot recompute its layers; use recompute=none")
        if not any(True for _ in _hf_models(model)):
            find_structure(model)
    if layout.recompute != "selective":
        return
    if layout.context_parallel_size > 1:
        raise ValueError(
            "recompute=selective has nothing to recompute under context parallelism, whose attention keeps no scores; "
            "use recompute=full or none"
        )
    found = list(_hf_models(model))
    unfit = [hf for hf in found if not hf._can_set_attn_implementation()]
    if unfit or not found:
        name = type((unfit or [model])[0]).__name__
        raise ValueError(
            f"recompute=selective reaches attention through transformers' AttentionInterface, which {name} does not "
            "use; use recompute=full, or torch.utils.checkpoint around its attention"
        )


def apply(layout: Layout, model: nn.Module) -> None:
    """Turn it on, in place; after all that changes layers, and before their parameters are shared out."""
    if layout.recompute == "selective":
        for hf in _hf_models(model):
            _recompute_attention(hf)
    elif layout.recompute == "full":
        found = list(_hf_models(model))
        for hf in found:
            enable = getattr(hf, "activation_checkpointing_enable", hf.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        if not found:
            layers: Any = model.get_submodule(find_structure(model).layers)
            for layer in layers:
                if not getattr(layer, "is_foreign", False):  # lives on another pipeline stage
                    _recompute_layer(layer)


def recomputed_layers(layout: Layout, model: nn.Module) -> frozenset[str]:
    """FQNs of the layers of a whole model that are computed again one by one, by the layout or by the model itself."""
    full, hf = layout.recompute == "full", any(True for _ in _hf_models(model))
    layer: Any = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", ())
    found = {n for n, m in model.named_modules() if isinstance(m, layer) and (full or m.gradient_checkpointing)}
    if full and not hf:
        name = find_structure(model).layers
        found |= {f"{name}.{i}" for i, _ in model.get_submodule(name).named_children()}
    return frozenset(found)


def _hf_models(model: nn.Module) -> Iterator[Any]:
    """Outermost Hugging Face models in `model`; transformers is never imported here."""
    base: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, base) and id(module) not in inside:
            inside |= {id(m) for m in module.modules()}
            yield module


def _recompute_layer(layer: nn.Module) -> None:
    """By `forward`, so that gates and the cuts of sequences, which are in `__call__`, happen once."""
    cls: Any = type(layer)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return cls.forward(self, *args, **kwargs)
        return checkpoint(partial(cls.forward, self), *args, use_reentrant=False, **kwargs)

    names = {"forward": forward, "gradient_checkpointing": True, "__module__": cls.__module__, "__doc__": cls.__doc__}
    layer.__class__ = type(cls.__name__, (cls,), names)


def _recompute_attention(hf: nn.Module) -> None:
    """Put a recomputing attention before the one each part of the model has chosen."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    configs = {id(config): config for m in hf.modules() if (config := getattr(m, "config", None)) is not None}
    for config in configs.values():
        chosen = getattr(config, "_attn_implementation", None)
        if chosen is None or chosen.startswith(PREFIX):
            continue
        AttentionInterface.register(PREFIX + chosen, partial(_attention, chosen))
        AttentionMaskInterface.register(PREFIX + chosen, ALL_MASK_ATTENTION_FUNCTIONS[chosen])
        config._attn_implementation = PREFIX + chosen


def _attention(chosen: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """transformers' attention `chosen`, recomputed in backward."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    compute: Any = ALL_ATTENTION_FUNCTIONS.get_interface(chosen, eager)
    if not module.training:
        return compute(module, *args, **kwargs)
    return checkpoint(partial(compute, module), *args, use_reentrant=False, **kwargs)
