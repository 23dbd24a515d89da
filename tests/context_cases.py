"""What attention methods are tested with: masks by name, shapes, and the whole tensors every rank makes alike.

It is: data. It is not: tests (see `tests/ranks/test_context_attention.py`, `tests/unit/test_context_*.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallax.plugins.context.base import AttentionSpec, Documents, SequenceShards
from tests.attention_reference import attention, seen


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    tokens: int = 48
    dim: int = 8
    value_dim: int = 8


@dataclass(frozen=True)
class Case:
    """One attention call.

    Attributes:
        mask: a name of `MASKS`.
        shape: of the tensors.
        order: of the shards.
        dtype: of the tensors; the reference is always fp64.
    """

    mask: str
    shape: Shape = Shape()
    order: str = "zigzag"
    dtype: torch.dtype = torch.float64


MASKS: dict[str, dict[str, Any]] = {
    "full": dict(causal=False),
    "causal": dict(),
    "scale": dict(scale=0.3),
    "window": dict(window=7),
    "window 1": dict(window=1),
    "symmetric window": dict(causal=False, window=5),
    "softcap": dict(softcap=2.0),
    "softcap window": dict(softcap=2.0, window=11),
    "sinks": dict(sinks=True),
    "sinks window": dict(sinks=True, window=6),
    "alibi": dict(alibi=True),
    "full alibi": dict(causal=False, alibi=True),
    "documents": dict(documents="packed"),
    "full documents": dict(causal=False, documents="packed"),
    "documents window sinks": dict(documents="packed", window=5, sinks=True),
    "padding": dict(documents="padding"),
    "full padding": dict(causal=False, documents="padding"),
    "softcap padding sinks": dict(softcap=1.5, documents="padding", sinks=True),
    "one document each": dict(documents="single"),
    "all padding": dict(documents="nothing"),
}


def document_ids(kind: str, batch: int, length: int) -> Tensor:
    """[batch, length]: packed documents whose edges differ between rows, padding at both ends, or the extremes."""
    at = torch.arange(length).expand(batch, length)
    row = torch.arange(batch).view(-1, 1)
    if kind == "packed":
        return (at + 3 * row) * 5 // length + (at > length // 2)
    if kind == "padding":
        return torch.where((at < 2 + row) | (at >= length - 3 - row), -1, 0)
    return at.clone() if kind == "single" else torch.full((batch, length), -1)


def make(case: Case, size: int) -> tuple[AttentionSpec, SequenceShards, dict[str, Tensor]]:
    """The same on every rank: spec, shards, and whole tensors q, k, v, grad (and sinks) with padding at the end."""
    s, wanted = case.shape, dict(MASKS[case.mask])
    shards = SequenceShards.of(s.tokens, size, case.order)
    draw = torch.Generator().manual_seed(7)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(case.dtype)

    whole = {
        "q": tensor(s.batch, s.heads, shards.length, s.dim),
        "k": tensor(s.batch, s.kv_heads, shards.length, s.dim),
        "v": tensor(s.batch, s.kv_heads, shards.length, s.value_dim),
        "grad": tensor(s.batch, s.heads, shards.length, s.value_dim),
    }
    if wanted.pop("sinks", False):
        whole["sinks"] = tensor(s.heads)
    if wanted.pop("alibi", False):
        wanted["alibi_slopes"] = torch.tensor([2.0 ** -(i + 1) for i in range(s.heads)], dtype=torch.float64)
    kind = wanted.pop("documents", None)
    if kind is not None:
        wanted["documents"] = Documents(document_ids(kind, s.batch, shards.length))
    return AttentionSpec(**wanted), shards, whole


def expected(spec: AttentionSpec, shards: SequenceShards, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output and gradients of the whole sequence in fp64, by name: out, q, k, v and sinks."""
    leaves = {name: t.double().clone().requires_grad_() for name, t in whole.items() if name != "grad"}
    documents = None if spec.documents is None else spec.documents.ids
    visible = seen(shards.length, spec.causal, spec.window, documents, shards.tokens)
    out = attention(
        leaves["q"], leaves["k"], leaves["v"], visible, scale=spec.scale, softcap=spec.softcap,
        sinks=leaves.get("sinks"), slopes=spec.alibi_slopes,
    )  # fmt: skip
    grads = torch.autograd.grad(out, list(leaves.values()), whole["grad"].double())
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}
