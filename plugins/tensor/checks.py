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

from parallax.plugins.tensor.attributes import read_size
from parallax.plugins.tensor.heads import (
    counts_key_values,
    head_count,
    heads_of_blocks,
    query_heads,
    rotary_width,
    shared_heads,
)
from parallax.plugins.tensor.norms import has_norm_per_head
from parallax.plugins.tensor.plans import hf_models
from parallax.plugins.tensor.shards import cut_of
from parallax.plugins.tensor.styles import CUTTING, Kind
from parallax.plugins.tensor.target import Target

_CONFIG_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "hidden_size")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class Condition:
    """`number`, called `label`, must be divisible by the axis size.

    Key-value heads, which ranks may share, may divide it instead.
    """

    label: str
    number: int
    is_heads: bool = False
    shares: bool = False

    def holds(self, size: int) -> bool:
        return self.number % size == 0 or (self.shares and size % self.number == 0)


def conditions(model: nn.Module, targets: Iterable[Target]) -> list[Condition]:
    """Every condition once, heads first; layers that differ only in their number are one."""
    targets = list(targets)
    configs = {fqn: _text_config(module) for fqn, module in hf_models(model)}
    found = [c for fqn, config in configs.items() for c in _heads(model, config, fqn, targets)]
    sharing = {t.block for t in targets if shared_heads(model, t) is not None}
    for target in targets:
        config = next((c for fqn, c in configs.items() if not fqn or target.fqn.startswith(f"{fqn}.")), None)
        found += _sizes(model, target, config, sharing)
    return sorted(dict.fromkeys(found), key=lambda c: not c.is_heads)


def require_divisible(found: list[Condition], size: int) -> None:
    """Raise a ValueError that names the conditions `size` fails (heads, else widths) and what would do."""
    wrong = [c for c in found if not c.holds(size)]
    if wrong:
        # the widths of attention follow from its heads: name the cause alone
        failed = [f"{c.label}={c.number}" for c in wrong if c.is_heads or not any(w.is_heads for w in wrong)]
        common = reduce(gcd, (c.number for c in found if not c.shares), 0) or max(c.number for c in found)
        valid = [str(n) for n in range(1, common + 1) if all(c.holds(n) for c in found)]
        raise ValueError(
            f"{', '.join(failed)} {'is' if len(failed) == 1 else 'are'} not divisible by "
            f"tensor_parallel_size={size}; valid sizes for this model: {', '.join(valid)}"
        )


def refuse_unfit(model: nn.Module, target: Target) -> None:
    """Raise a ValueError for what a style needs of its module beyond sizes."""
    module, kind = target.module, target.style.kind
    if kind in (Kind.EMBEDDING, Kind.EMBEDDING_WIDTH) and isinstance(module, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise ValueError(
                    f"{target.fqn}: nn.Embedding({option}={getattr(module, option)}) cannot be cut; leave {option} "
                    "out, or keep the embedding whole with the style 'replicate'"
                )
    if kind is Kind.MLA_KEYS:
        if type(module) is not nn.Linear:
            raise ValueError(f"style {target.style.word!r} takes torch.nn.Linear, but {target.fqn!r} is {type(module)}")
        rotary_width(model, target.fqn)
    if kind is Kind.LOCAL_HEADS:
        head_count(model, target.fqn)
    if kind is Kind.PER_HEAD and not has_norm_per_head(module):
        raise ValueError(
            f"style {target.style.word!r} takes a module whose `norms` are torch.nn.LayerNorm, one for each head, but "
            f"{target.fqn!r} is {type(module)}"
        )


def _text_config(module: nn.Module) -> Any:
    config: Any = getattr(module, "config", None)
    get = getattr(config, "get_text_config", None)
    return config if get is None else get()


def _heads(model: nn.Module, config: Any, fqn: str, targets: list[Target]) -> Iterator[Condition]:
    """Attention heads stay whole where the plan cuts an attention projection and leaves it cut."""
    cut = any(
        t.style.kind is Kind.COLUMN and not t.style.whole_outside and _ATTENTION.search(t.fqn)
        for t in targets
        if not fqn or t.fqn.startswith(f"{fqn}.")
    )
    names = ["num_attention_heads"]
    if not any(shared_heads(model, t) for t in targets):  # else they speak for themselves
        names.append("num_key_value_heads")
    for name in names if cut else ():
        number = getattr(config, name, None)
        if isinstance(number, int):
            yield Condition(name, number, is_heads=True)


def _sizes(model: nn.Module, target: Target, config: Any, sharing: set[str]) -> Iterator[Condition]:
    where = re.sub(r"\.\d+(?=\.|$)", ".*", target.fqn)
    if target.style.kind is Kind.LOCAL_SIZE:
        number = read_size(target.module, target.part)
        assert number is not None
        yield Condition(where, number, shares=counts_key_values(target) and target.block in sharing)
    if target.style.kind not in CUTTING or target.style.kind is Kind.WIDE_NORM or target.part:
        return
    if (heads := shared_heads(model, target)) is not None:
        names = [n for n in ("num_key_value_heads", "num_kv_heads") if getattr(config, n, None) == heads]
        yield Condition(names[0] if names else f"heads of {where}", heads, is_heads=True, shares=True)
        if not target.style.heads:
            return
    if (queries := query_heads(model, target)) is not None:
        named = getattr(config, "num_attention_heads", None) == queries
        yield Condition("num_attention_heads" if named else f"heads of {where}", queries, is_heads=True)
        return
    cut = cut_of(target.fqn, target.module, target.style)
    if target.style.pads:
        return
    if (halves := heads_of_blocks(model, target, cut.blocks)) is not None:
        yield Condition(f"heads of a block of {where}", halves, is_heads=True)
    groups = target.style.heads if target.style.grouped else 1
    for block in dict.fromkeys(block * groups for block in cut.blocks):
        known = next((n for n in _CONFIG_NAMES if getattr(config, n, None) == block), None)
        label = f"{where}.{cut.label}" if len(cut.blocks) == 1 else f"a block of {where}.{cut.label}"
        yield Condition(f"{label} ({known})" if known else label, block)
