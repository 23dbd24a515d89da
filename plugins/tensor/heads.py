"""Key-value heads that are fewer than the ranks of the axis: which rank holds which.

It is: the recognition of key and value projections, and of how many ranks share each of their heads (Shazeer 2019,
Ainslie et al. 2023 for the attention; the replication is Megatron-LM's). It is not: the cut itself (`shards.py`) or
the sum of the replicas' gradients (`gradients.py`).

With k heads on n ranks, n a multiple of k, ranks [i n/k, (i + 1) n/k) hold head i. Each sees the gradients of its own
query heads only, so the gradients of the replicas are summed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from parallax.plugins.tensor.shards import cut_of
from parallax.plugins.tensor.styles import Kind
from parallax.plugins.tensor.target import Target

_QUERY = re.compile(r"(?:^|.*_)(?:q|query)(?:_proj|_lin)?")
_KEY_VALUE = re.compile(r"(?:^|.*_)(?:k|v|key|value)(?:_proj|_lin)?")


def shared_heads(model: nn.Module, target: Target) -> int | None:
    """Number of heads of a key or value projection that stands by itself; None for anything else."""
    style = target.style
    if style.kind is not Kind.COLUMN or style.whole_outside or len(style.blocks) > 1 or target.part:
        return None
    if not _KEY_VALUE.fullmatch(target.name):
        return None
    width, owner = cut_of(target.fqn, target.module, style).size, model.get_submodule(target.block)
    each = getattr(owner, "head_dim", None)
    return width // each if isinstance(each, int) and each > 0 and width % each == 0 else None


def query_heads(model: nn.Module, target: Target) -> int | None:
    """Number of heads of a query projection that stands by itself and whose module says their width; else None.

    Ranks share key-value heads, never query heads.
    """
    style = target.style
    if style.kind is not Kind.COLUMN or style.whole_outside or target.part or not _QUERY.fullmatch(target.name):
        return None
    width, owner = cut_of(target.fqn, target.module, style).size, model.get_submodule(target.block)
    each = getattr(owner, "head_dim", None)
    return width // each if isinstance(each, int) and each > 0 and width % each == 0 else None


def has_shared_heads(attention: nn.Module) -> bool:
    """Whether an attention module has its key and value projections apart from the query's."""
    return any(_KEY_VALUE.fullmatch(name) for name, _ in attention.named_children())


def with_copies(model: nn.Module, targets: Mapping[str, Target], size: int) -> dict[str, Target]:
    """`targets`, where key and value projections with fewer heads than `size` say how many ranks share each head."""
    out, groups = dict(targets), dict[str, int]()
    for fqn, target in targets.items():
        heads = shared_heads(model, target)
        if heads is not None and size % heads == 0 and heads < size:
            out[fqn] = replace(target, copies=size // heads)
            groups[target.block] = size // heads
    for fqn, target in targets.items():
        if target.style.kind is Kind.LOCAL_SIZE and target.block in groups and "key_value" in target.name:
            out[fqn] = replace(target, copies=groups[target.block])
    return out


def regroup(model: nn.Module, targets: Mapping[str, Target]) -> None:
    """Tell attention modules whose key-value heads are shared how many query heads there are for each one here."""
    done: set[str] = set()
    for target in targets.values():
        if target.style.kind is not Kind.COLUMN or target.copies == 1 or target.block in done:
            continue
        done.add(target.block)
        owner: Any = model.get_submodule(target.block)
        if isinstance(getattr(owner, "num_key_value_groups", None), int):
            owner.num_key_value_groups = owner.num_key_value_groups // target.copies


def head_count(model: nn.Module, fqn: str) -> int:
    """Number of attention heads in the config nearest to `fqn`."""
    return _number(model, fqn, "num_attention_heads")


def rotary_width(model: nn.Module, fqn: str) -> int:
    """Rotary features per head of a multi-head latent attention, from its module or the config nearest to `fqn`."""
    return _number(model, fqn, "qk_rope_head_dim")


def _number(model: nn.Module, fqn: str, name: str) -> int:
    parts = fqn.split(".")[:-1]
    for length in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:length]))
        for owner in (module, getattr(module, "config", None)):
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    raise ValueError(f"{fqn!r} needs {name}, which neither a module around it nor a config there has")
