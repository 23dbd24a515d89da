"""Adapters of PEFT around layers that a plan cuts: they follow the cut of the layer they adapt.

It is: the expansion of a target whose module PEFT has wrapped into targets for the layer inside and its adapters (Hu
et al. 2021, "LoRA": y = W x + B A x). It is not: anything of PEFT's own; without PEFT in use nothing happens here.

| layer | A | B | messages |
|---|---|---|---|
| column | whole, reads what enters the region | cut like W, output features | A's gradient is summed, once per step |
| row | cut like W, input features | whole | the r features between are all-reduced, forward |

A column layer's A enters with the layer itself, so no micro-batch pays for a further all-reduce of activations; with
dropout it is the dropout's input that enters, apart from the layer's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from parallax.plugins.tensor.styles import Kind, Style, parse_style
from parallax.plugins.tensor.target import Target

_SUM = "replicated_with_grad_allreduce"


def _type(module: str, name: str) -> type | None:
    """A class of PEFT if that is in use, else None (it is never imported here)."""
    found: Any = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def expand(target: Target) -> Iterator[Target]:
    """`target` itself, or what stands for it when PEFT has wrapped its module.

    Raises:
        ValueError: a kind of adapter that is not implemented.
    """
    module, kind = target.module, target.style.kind
    saved = _type("peft.utils.other", "ModulesToSaveWrapper")
    if target.part or kind in (Kind.WHOLE, Kind.LOCAL_SIZE):
        yield target
    elif saved is not None and isinstance(module, saved):
        yield _inner(target, "original_module")
        yield from (_inner(target, f"modules_to_save.{name}") for name in _children(module, "modules_to_save"))
    elif _is_tuner(module):
        if not _is_plain_lora(module) or kind not in (Kind.COLUMN, Kind.ROW):
            raise ValueError(
                f"{target.fqn!r} is a {type(module).__module__}.{type(module).__qualname__}, an adapter that style "
                f"{target.style.word!r} cannot cut; plain LoRA on linear layers is implemented: leave this module out "
                "of target_modules, or use tensor_parallel_size=1"
            )
        yield _inner(target, "base_layer")
        for name in _children(module, "lora_A"):
            yield from _adapter(target, name)
    else:
        yield target


def _adapter(target: Target, name: str) -> Iterator[Target]:
    a, b = _inner(target, f"lora_A.{name}"), _inner(target, f"lora_B.{name}")
    if target.style.kind is Kind.ROW:
        yield a
        yield replace(b, style=parse_style("replicate", b.fqn))
        return
    dropout = _inner(target, f"lora_dropout.{name}")
    drops = isinstance(dropout.module, nn.Dropout) and dropout.module.p > 0
    entering = Style(target.style.word, Kind.ENTERING)
    if drops:
        yield replace(dropout, style=entering)
    yield replace(a, style=parse_style(_SUM, a.fqn) if drops else entering)
    yield replace(b, style=replace(target.style, entered=True))


def _inner(target: Target, path: str) -> Target:
    """The module at `path` inside the wrapper, in the wrapper's place."""
    return replace(target, fqn=f"{target.fqn}.{path}", module=target.module.get_submodule(path), place=target.fqn)


def _children(module: nn.Module, name: str) -> list[str]:
    return [child for child, _ in module.get_submodule(name).named_children()]


def _is_tuner(module: nn.Module) -> bool:
    base = _type("peft.tuners.tuners_utils", "BaseTunerLayer")
    return base is not None and isinstance(module, base)


def _is_plain_lora(module: Any) -> bool:
    """Whether the wrapper is LoRA on a linear (or Conv1D) without a variant such as DoRA."""
    linear = _type("peft.tuners.lora.layer", "Linear")
    return linear is not None and isinstance(module, linear) and not getattr(module, "lora_variant", None)
