"""The contract between the context axis and its attention methods.

It is: what is asked of one attention call (`AttentionSpec`), which documents a packed sequence holds (`Documents`), the
groups a method may use (`ContextGroups`), and the abstract method (`AttentionMethod`, entry-point group
`parallax.attention`). It is not: any method, nor how a model is made to call one (see `plugin.py`).

    groups = ContextGroups.of(mesh)
    method_class = registry.load("parallax.attention", "ring")
    method_class.check(spec, heads=8, kv_heads=2, size=4, inner=1)       # before the first step, no communication
    attend = method_class(groups)                                        # one for the model
    out = attend(q, k, v, spec, shards)                                  # every call
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from parallax.plugins.context.shards import Ranges, SequenceShards
from parallax.strategies.comm import AxisComm
from parallax.strategies.mesh import Mesh

PADDING = -1
"""Document id of padding: such keys are seen by no query, and the output of such queries is 0."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Which document every position belongs to: a query sees keys of its own document only.

    Make one per batch and pass the same object to every layer: what is planned from it is kept in it.

    Attributes:
        ids: integers [batch or 1, length] over the whole padded sequence, on the device of the queries. Any ids do;
            `PADDING` (every negative number) is padding. Chunked attention is documents of `chunk` tokens.
    """

    ids: Tensor
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.ids.dim() != 2 or self.ids.is_floating_point():
            raise ValueError(
                f"document ids must be integers [batch, length], got {self.ids.dtype} {tuple(self.ids.shape)}"
            )

    @cached_property
    def host(self) -> Tensor:
        """The ids on the CPU, from which is planned which blocks need no work: one copy per batch."""
        return self.ids.cpu()

    @classmethod
    def from_positions(cls, position_ids: Tensor, valid: Tensor | None = None) -> Documents:
        """Documents of a packed sequence whose positions [batch, length] start anew with every document.

        Args:
            position_ids: positions within each document; one that is not its predecessor plus 1 starts another.
            valid: [batch, length], 0 or False where there is padding.
        """
        starts = position_ids.diff(dim=1) != 1
        ids = torch.nn.functional.pad(starts, (1, 0)).cumsum(1)
        return cls(ids if valid is None else ids.masked_fill(~valid.bool(), PADDING))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, length: int) -> Documents:
        """Documents of one packed row: document i holds positions [cu_seqlens[i], cu_seqlens[i + 1]).

        What lies beyond the last boundary is padding. Empty documents (equal boundaries) hold nothing.
        """
        at = torch.arange(length, device=cu_seqlens.device)
        ids = torch.searchsorted(cu_seqlens.contiguous(), at, right=True) - 1
        return cls(ids.masked_fill(at >= cu_seqlens[-1], PADDING).unsqueeze(0))

    @classmethod
    def from_mask(cls, attention_mask: Tensor) -> Documents:
        """One document per row, of an attention mask [batch, length]: 0 is padding.

        Numbers above 1 are taken for document numbers, as packed masks have them (1, 1, 2, 2, 2, 0).
        """
        mask = attention_mask.long()
        return cls(mask.masked_fill(mask == 0, PADDING))

    def in_chunks(self, size: int) -> Documents:
        """Every document cut into chunks of `size` tokens from its first one, which see nothing of each other."""
        at, ids = torch.arange(self.ids.shape[1], device=self.ids.device), self.ids.clamp(min=0).long()
        last = int(ids.max())
        start = at.new_full((ids.shape[0], last + 1), len(at))
        real = self.ids >= 0
        start.scatter_reduce_(1, ids, at.where(real, len(at)), "amin")
        chunks = (at - start.gather(1, ids)) // size
        return Documents((ids * (len(at) // size + 1) + chunks).masked_fill(~real, PADDING))


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What one attention call asks for. Position means global position in the whole sequence.

    The score of query i and key j is `scale * q_i . k_j`, then soft-capped, then biased, then masked.

    Attributes:
        causal: a query sees keys at its own position and before.
        window: a query sees keys less than this many positions away (its own is 0 away): `i - j < window`, and
            without `causal` also `j - i < window`. None: no limit.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
        sinks: [heads] logits of one more key per head whose value is 0 (gpt-oss, StreamingLLM); may need gradients.
        alibi_slopes: [heads] slopes m of the bias `-m * |i - j|` (Press et al. 2022); constants.
        scale: None is 1 / sqrt(head_dim of the queries).
        dropout_p: share of the weights that are dropped after the softmax, the rest being scaled up. What is dropped
            differs from one process, as between any two seeds, but not between forward and backward, nor when the call
            is recomputed with the same state of torch's generator.
        seed: of what is dropped by this call on this rank; drawn by `AttentionMethod`.
        documents: packed documents and padding inside the sequence. Padding at its end alone needs none: it is
            `SequenceShards.tokens`.
    """

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    seed: int = 0
    documents: Documents | None = None

    def of_heads(self, start: int, stop: int) -> AttentionSpec:
        """The same for query heads [start, stop) alone; dropout draws other numbers for other heads."""
        sinks, slopes = self.sinks, self.alibi_slopes
        return replace(
            self,
            seed=hash((self.seed, start)),
            sinks=None if sinks is None else sinks[start:stop],
            alibi_slopes=None if slopes is None else slopes[start:stop],
        )


@dataclass(frozen=True)
class ContextGroups:
    """The groups of the context axis: rank index `outer.index * inner.size + inner.index` of `cp`.

    Attributes:
        cp: all ranks that share a sequence.
        inner: runs of neighbours (a fast domain), size `context_inner_size` of the layout.
        outer: ranks at the same place of their runs.
        threads: most CPU threads a rank of `cp` computes with; the same number on every rank.
    """

    cp: AxisComm
    inner: AxisComm
    outer: AxisComm
    threads: int = 1

    @classmethod
    def of(cls, mesh: Mesh, threads: int = 1) -> ContextGroups:
        return cls(mesh["cp"], mesh["cp_inner"], mesh["cp_outer"], threads)


class AttentionMethod(ABC):
    """Exact attention over a sequence cut by `SequenceShards`. One instance serves all layers of a model."""

    name: ClassVar[str]
    """Name of the entry point, e.g. "ring"."""

    def __init__(self, groups: ContextGroups) -> None:
        self.groups = groups

    @classmethod
    def check(cls, spec: AttentionSpec, heads: int, kv_heads: int, size: int, inner: int = 1) -> None:
        """Refuse by name what this method cannot do; here what none can. No communication; the same on every rank.

        Args:
            spec: what will be asked; its documents are not looked at.
            heads: query heads of this rank (after tensor parallelism).
            kv_heads: key and value heads of this rank.
            size: ranks of the context axis.
            inner: ranks of the inner group.

        Raises:
            ValueError: with the numbers and the change that fixes it.
        """
        check_spec(spec, heads, kv_heads)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, shards: SequenceShards) -> Tensor:
        """Attention of this rank's queries over the whole sequence. Collective over the context axis.

        Args:
            q: [batch, heads, local, dim], the positions `shards.ranges(cp.index)`.
            k: [batch, kv_heads, local, dim]; kv_heads divides heads.
            v: [batch, kv_heads, local, value_dim].
            spec: see `AttentionSpec`.
            shards: see `SequenceShards`; its size is that of `cp`.

        Returns:
            [batch, heads, local, value_dim] in the dtype of q, differentiable with respect to q, k, v and sinks.
            Queries that see no key give 0. Under autocast q, k and v are cast first, as torch's own attention does.

        Raises:
            ValueError: shapes or dtypes that do not fit each other or `shards`.
        """
        q, k, v = _autocast(q, k, v)
        sizes = {q.shape[2], k.shape[2], v.shape[2], shards.local_length}
        if len(sizes) > 1 or shards.size != self.groups.cp.size or k.shape[:2] != v.shape[:2]:
            raise ValueError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} are not this rank's "
                f"{shards.local_length} of {shards.length} positions over {shards.size} ranks; there are "
                f"{self.groups.cp.size} context ranks"
            )
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q, k and v must have one dtype, they have {q.dtype}, {k.dtype} and {v.dtype}")
        if spec.dropout_p:
            drawn = torch.randint(2**31, (), device="cpu")  # recomputation restores the generator
            spec = replace(spec, seed=hash((int(drawn), self.groups.cp.index)))
        with torch.autocast(q.device.type, enabled=False):
            return self.attend(q, k, v, spec, shards)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, shards: SequenceShards) -> Tensor:
        """What `__call__` promises, for tensors that fit each other, without autocast."""


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    kind = tensors[0].device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype is torch.float64 else x.to(dtype) for x in tensors)


def check_spec(spec: AttentionSpec, heads: int, kv_heads: int) -> None:
    """Refuse by name what no method can do.

    Raises:
        ValueError: numbers out of range; per-head tensors of another size; query heads that kv heads do not
            divide; slopes that want gradients.
    """
    if not 0 <= spec.dropout_p < 1:
        raise ValueError(f"attention dropout must be at least 0 and below 1, got {spec.dropout_p:g}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key and value heads")
    if spec.window is not None and spec.window < 1:
        raise ValueError(f"a sliding window of {spec.window} positions sees nothing; use at least 1, or None")
    if spec.softcap is not None and spec.softcap <= 0:
        raise ValueError(f"the soft cap of attention scores must be positive, got {spec.softcap:g}; None turns it off")
    for label, per_head in (("sinks", spec.sinks), ("ALiBi slopes", spec.alibi_slopes)):
        if per_head is not None and tuple(per_head.shape) != (heads,):
            raise ValueError(f"{label} of shape {tuple(per_head.shape)} for {heads} query heads; there is one per head")
    if spec.alibi_slopes is not None and spec.alibi_slopes.requires_grad:
        raise ValueError("ALiBi slopes that are trained are not supported under context parallelism; detach them")


__all__ = [
    "PADDING",
    "AttentionMethod",
    "AttentionSpec",
    "ContextGroups",
    "Documents",
    "Ranges",
    "SequenceShards",
    "check_spec",
]
