"""The numbers the tensor axis must divide, and the error that says which it does not.

It is: the list of divisibility conditions of a planned model, found without changing it. It is not: the cutting
itself. Vocabulary rows are padded, so they are no condition.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any

from torch import nn

from parallax.plugins.tensor.plans import Target, hf_models
from parallax.plugins.tensor.shards import cut_of
from parallax.plugins.tensor.styles import Kind

_CONFIG_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "hidden_size")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class Condition:
    """`number`, called `label`, must be divisible by the axis size."""

    label: str
    number: int
    is_heads: bool = False


def conditions(model: nn.Module, targets: Iterable[Target]) -> list[Condition]:
    """Every condition once, heads first; layers that differ only in their number are one."""
    targets = list(targets)
    configs = {fqn: _text_config(module) for fqn, module in hf_models(model)}
    found = [c for fqn, config in configs.items() for c in _heads(config, fqn, targets)]
    for target in targets:
        config = next((c for fqn, c in configs.items() if not fqn or target.fqn.startswith(f"{fqn}.")), None)
        found += _sizes(target, config)
    return list(dict.fromkeys(found))


def require_divisible(found: list[Condition], size: int) -> None:
    """Raise a ValueError that names the conditions `size` fails (heads, else widths) and what would do."""
    wrong = [c for c in found if c.number % size]
    if wrong:
        # the widths of attention follow from its heads: name the cause alone
        failed = [f"{c.label}={c.number}" for c in wrong if c.is_heads or not any(w.is_heads for w in wrong)]
        common = reduce(gcd, (c.number for c in found))
        valid = [str(n) for n in range(1, common + 1) if common % n == 0]
        raise ValueError(
            f"{', '.join(failed)} {'is' if len(failed) == 1 else 'are'} not divisible by "
            f"tensor_parallel_size={size}; valid sizes for this model: {', '.join(valid)}"
        )


def _text_config(module: nn.Module) -> Any:
    config: Any = getattr(module, "config", None)
    get = getattr(config, "get_text_config", None)
    return config if get is None else get()


def _heads(config: Any, fqn: str, targets: list[Target]) -> Iterator[Condition]:
    """Attention heads stay whole where the plan cuts an attention projection and leaves it cut."""
    cut = any(
        t.style.kind is Kind.COLUMN and not t.style.whole_outside and _ATTENTION.search(t.fqn)
        for t in targets
        if not fqn or t.fqn.startswith(f"{fqn}.")
    )
    for name in ("num_attention_heads", "num_key_value_heads") if cut else ():
        number = getattr(config, name, None)
        if isinstance(number, int):
            yield Condition(name, number, is_heads=True)


def _sizes(target: Target, config: Any) -> Iterator[Condition]:
    where = re.sub(r"\.\d+(?=\.|$)", ".*", target.fqn)
    if target.style.kind is Kind.LOCAL_SIZE:
        yield Condition(where, int(getattr(target.module, target.fqn.rpartition(".")[2])))
    if target.style.kind not in (Kind.COLUMN, Kind.ROW, Kind.EMBEDDING):
        return
    cut = cut_of(target.fqn, target.module, target.style)
    if target.style.pads:
        return
    for block in dict.fromkeys(cut.blocks):
        known = next((n for n in _CONFIG_NAMES if getattr(config, n, None) == block), None)
        label = f"{where}.{cut.label}" if len(cut.blocks) == 1 else f"a block of {where}.{cut.label}"
        yield Condition(f"{label} ({known})" if known else label, block)
