"""Key-value heads that are fewer than the ranks of the axis: which rank holds which.

It is: the recognition of key and value projections, and of how many ranks share each of their heads (Shazeer 2019,
Ainslie et al. 2023 for the attention; both ways of sharing are Megatron-LM's). It is not: the cut itself (`shards.py`),
the sum of the replicas' gradients (`gradients.py`) or the gathering of what each computes (`functions.py`).

With k heads on n ranks, n a multiple of k, ranks [i n/k, (i + 1) n/k) share head i. Where key and value have
projections of their own, each of these ranks holds the head; it sees the gradients of its own query heads only, so the
gradients of the replicas are summed. Fused with the query, the matrix is cut evenly and each rank computes a part of
the head's features, which are gathered; then no element is held twice.
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
from parallax.strategies.comm import AxisComm
from parallax.strategies.mesh import Mesh

_QUERY = re.compile(r"(?:^|.*_)(?:q|query)(?:_proj|_lin)?")
_COUNT = re.compile(r"key_value|kv")
_KEY_VALUE = re.compile(r"(?:^|.*_)(?:k|v|key|value)(?:_proj|_lin)?")


def shared_heads(model: nn.Module, target: Target) -> int | None:
    """Number of heads of a key or value projection, by itself or fused with the query's; None for anything else."""
    style = target.style
    if style.heads:
        return style.heads
    if style.kind is not Kind.COLUMN or style.whole_outside or len(style.blocks) > 1 or target.part:
        return None
    if not _KEY_VALUE.fullmatch(target.name):
        return None
    return _heads(model, target, cut_of(target.fqn, target.module, style).size)


def _heads(model: nn.Module, target: Target, width: int) -> int | None:
    """How many heads `width` features are, by the width of a head that the module around says."""
    each = getattr(model.get_submodule(target.block), "head_dim", None)
    return width // each if isinstance(each, int) and each > 0 and width % each == 0 else None


def query_heads(model: nn.Module, target: Target) -> int | None:
    """Number of heads of a query projection that stands by itself and whose module says their width; else None.

    Ranks share key-value heads, never query heads.
    """
    style = target.style
    if style.kind is not Kind.COLUMN or style.whole_outside or target.part or not _QUERY.fullmatch(target.name):
        return None
    return _heads(model, target, cut_of(target.fqn, target.module, style).size)


def heads_of_blocks(model: nn.Module, target: Target, blocks: tuple[int, ...]) -> int | None:
    """Heads in each block of a key or value projection made of several equal ones (DiffLlama's halves); else None."""
    if len(blocks) == 1 or len(set(blocks)) > 1 or not _KEY_VALUE.fullmatch(target.name):
        return None
    return _heads(model, target, blocks[0])


def counts_key_values(target: Target) -> bool:
    """Whether the target is a number of key-value heads."""
    return target.style.kind is Kind.LOCAL_SIZE and _COUNT.search(target.name) is not None


def sharers(mesh: Mesh, copies: int) -> AxisComm:
    """The ranks of the tensor axis that share a head with this one, `copies` of them."""
    return mesh["tp"] if copies == mesh.size("tp") else mesh[f"tp_run{copies}"]


def with_copies(model: nn.Module, targets: Mapping[str, Target], size: int) -> dict[str, Target]:
    """`targets`, where key and value projections with fewer heads than `size` say how many ranks share each head."""
    out, groups = dict(targets), dict[str, int]()
    for fqn, target in targets.items():
        wide = target.style.kind is Kind.WIDE_NORM
        heads = _heads(model, target, _width(target)) if wide else shared_heads(model, target)
        if heads is not None and size % heads == 0 and heads < size:
            out[fqn] = replace(target, copies=size // heads)
            groups[target.block] = size // heads
    for fqn, target in targets.items():
        if counts_key_values(target) and target.block in groups:
            out[fqn] = replace(target, copies=groups[target.block])
    return out


def _width(target: Target) -> int:
    return target.module.get_parameter("weight").numel()


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
