"""What each word of a tensor-parallel plan means here.

It is: the vocabulary (`parse_style`), the same words `transformers` uses in its plans. It is not: where plans
come from (`plans.py`), how tensors are cut (`shards.py`) or what runs (`layers.py`).

| word | weight | input -> output |
|---|---|---|
| `colwise` | output features cut | whole -> this rank's slice |
| `colwise_gather_output` (`colwise_rep`) | output features cut, padded if need be | whole -> whole (all-gather) |
| `rowwise` | input features cut, bias whole and added once | slice -> whole (all-reduce) |
| `rowwise_split_input` (`rowwise_rep`) | as `rowwise` | whole (sliced here) -> whole |
| `packed_colwise`, `packed_rowwise` | as above, each fused block cut separately | |
| `qkv_colwise(h,k)` | as `packed_colwise(h,k,k)`: h query, k key-value heads; ranks may share these (`heads.py`) | |
| `grouped_qkv_colwise(h,k)` | likewise, each key and value after its own query heads | |
| `colwise_norm` | cut | an RMS norm over all heads at once: this rank's features, the mean square summed |
| `per_head` | whole | a norm of each head in `norms`: those of this rank's heads; gradients are summed |
| `embedding_rowwise` | vocabulary rows cut, padded if need be | ids -> whole vectors (all-reduce) |
| `embedding_colwise` | vectors cut, padded if need be | ids -> whole vectors (all-gather) |
| `mla_kv_a_proj` | whole | whole; its last features (rotary keys) enter the cut attention, which shares one gradient |
| `replicated_with_grad_allreduce` | whole | each rank sees a part of the data: gradients are summed |
| `all_reduce` | whole | the output, partial on every rank, is summed |
| `replicate`, `local_params` | whole | nothing changes (what is cut in a `local_params` module has its own entry) |
| `local_size` | names an integer attribute (or `config.x`, of the module's own config), divided by the axis size | |
| `local_heads` | names an argument of a forward, [batch x heads, ...] or [batch, heads, ...]: its heads are cut | |

A column or row word may also name a parameter by itself (attention sinks): it is cut along the dim before its last,
or its last; one of a single dim along that for a column word, not at all for a row word.

Words of expert layers belong to the expert plugin: a model that has them is refused unless that plugin cuts them.
`sequence_parallel` is no word of a plan here: the layout says so.

Fused blocks: `packed_colwise` alone means two equal blocks (gate and up, as in `transformers`);
`packed_colwise(3)` means three equal ones and `packed_colwise(4,1,1)` blocks in these proportions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What is done to the thing a plan entry names."""

    COLUMN = "column"
    ROW = "row"
    EMBEDDING = "embedding"
    EMBEDDING_WIDTH = "embedding_width"
    MLA_KEYS = "mla_keys"
    ENTERING = "entering"
    SUM_GRAD = "sum_grad"
    WIDE_NORM = "wide_norm"
    PER_HEAD = "per_head"
    SUM_OUTPUT = "sum_output"
    WHOLE = "whole"
    LOCAL_SIZE = "local_size"
    LOCAL_HEADS = "local_heads"


CUTTING = frozenset({Kind.COLUMN, Kind.ROW, Kind.EMBEDDING, Kind.EMBEDDING_WIDTH, Kind.WIDE_NORM})
"""Kinds that leave this rank a part of a parameter."""


@dataclass(frozen=True)
class Style:
    """One parsed word.

    Attributes:
        word: as written in the plan, for messages.
        kind: what is done.
        whole_outside: the activation on the far side of the cut is whole: a column's output is gathered, a
            row's input is sliced here.
        blocks: proportions of the fused blocks along the cut dim; (1,) when nothing is fused.
        heads: key (and value) heads of a fused query, key and value; 0 for anything else.
        grouped: whether the queries of each of those heads stand before it, rather than all queries before all keys.
        entered: a column's input is in the region already. No word says so: adapters are found to be so (`lora.py`),
            as is `Kind.ENTERING`, whole parameters whose input enters the region.
    """

    word: str
    kind: Kind
    whole_outside: bool = False
    blocks: tuple[int, ...] = (1,)
    heads: int = 0
    grouped: bool = False
    entered: bool = False

    @property
    def pads(self) -> bool:
        """Whether a size that the axis does not divide is padded with zero rows rather than refused."""
        embedding = self.kind in (Kind.EMBEDDING, Kind.EMBEDDING_WIDTH)
        return embedding or (self.kind is Kind.COLUMN and self.whole_outside)


_WORDS: dict[str, tuple[Kind, bool]] = {
    "colwise": (Kind.COLUMN, False),
    "colwise_gather_output": (Kind.COLUMN, True),
    "colwise_rep": (Kind.COLUMN, True),
    "rowwise": (Kind.ROW, False),
    "rowwise_split_input": (Kind.ROW, True),
    "rowwise_rep": (Kind.ROW, True),
    "packed_colwise": (Kind.COLUMN, False),
    "packed_rowwise": (Kind.ROW, False),
    "qkv_colwise": (Kind.COLUMN, False),
    "grouped_qkv_colwise": (Kind.COLUMN, False),
    "colwise_norm": (Kind.WIDE_NORM, False),
    "per_head": (Kind.PER_HEAD, False),
    "embedding_rowwise": (Kind.EMBEDDING, False),
    "embedding_colwise": (Kind.EMBEDDING_WIDTH, False),
    "mla_kv_a_proj": (Kind.MLA_KEYS, False),
    "replicated_with_grad_allreduce": (Kind.SUM_GRAD, False),
    "all_reduce": (Kind.SUM_OUTPUT, False),
    "replicate": (Kind.WHOLE, False),
    "local_params": (Kind.WHOLE, False),
    "local_size": (Kind.LOCAL_SIZE, False),
    "local_heads": (Kind.LOCAL_HEADS, False),
}
IMPLEMENTED = tuple(_WORDS)
_EXPERT_WORDS = frozenset({"grouped_gemm", "ep_dispatch_experts", "ep_router", "moe_tp_experts", "moe_identity_expert"})
_REFUSED = "refused: "
_CALL = re.compile(r"(?P<word>packed_\w+)\((?P<blocks>\s*\d+\s*(,\s*\d+\s*)*)\)")
_QKV = re.compile(r"(?P<word>(grouped_)?qkv_colwise)\(\s*(?P<queries>\d+)\s*,\s*(?P<heads>\d+)\s*\)")


def is_expert_word(text: str) -> bool:
    """Whether the word belongs to mixture-of-experts layers."""
    return text in _EXPERT_WORDS


def parse_style(text: str, target: str) -> Style:
    """The meaning of `text`, the style a plan gives to `target` (an FQN or a pattern, for messages).

    Raises:
        ValueError: the word is not implemented or says "refused: " and why, or its blocks are not positive.
    """
    if is_expert_word(text):
        raise ValueError(
            f"style {text!r} of {target!r} cuts mixture-of-experts layers, which needs an expert-parallel plugin; "
            f"the tensor plugin implements: {', '.join(IMPLEMENTED)}"
        )
    if text.startswith(_REFUSED):
        raise ValueError(f"{target!r} cannot be cut: {text.removeprefix(_REFUSED)}; use tensor_parallel_size=1")
    if text == "sequence_parallel":
        raise ValueError(
            f"style {text!r} of {target!r}: a plan does not say where sequences are cut; set sequence_parallel in the "
            "layout and leave the entry out"
        )
    if call := _QKV.fullmatch(text):
        return _fused_qkv(text, target, call["word"], int(call["queries"]), int(call["heads"]))
    word = text
    blocks: tuple[int, ...] = (1,)
    if call := _CALL.fullmatch(text):
        word = call["word"]
        numbers = tuple(int(n) for n in call["blocks"].split(","))
        blocks = numbers if len(numbers) > 1 else (1,) * numbers[0]
        if not blocks or min(blocks) < 1:
            raise ValueError(f"style {text!r} of {target!r} needs at least one block, each of a size of 1 or more")
    elif text.startswith("packed_"):
        blocks = (1, 1)
    if word not in _WORDS or word.endswith("qkv_colwise"):
        raise ValueError(f"style {text!r} of {target!r} is not implemented; implemented: {', '.join(IMPLEMENTED)}")
    kind, whole_outside = _WORDS[word]
    return Style(text, kind, whole_outside, blocks)


def _fused_qkv(text: str, target: str, word: str, queries: int, heads: int) -> Style:
    if heads < 1 or queries % heads:
        raise ValueError(
            f"style {text!r} of {target!r} takes numbers of query and of key-value heads, the first a multiple of the "
            f"second; got {queries} and {heads}"
        )
    kind, whole_outside = _WORDS[word]
    if word.startswith("grouped_"):
        return Style(text, kind, whole_outside, (queries // heads, 1, 1) * heads, heads=heads, grouped=True)
    return Style(text, kind, whole_outside, (queries, heads, heads), heads=heads)
