"""Positions in models of Hugging Face transformers whose sequences are cut.

It is: the position ids a model is given when the user gives none, and what in a model counts positions itself: rotary
embeddings that change with the largest position, and attention that numbers the tokens it meets. It is not: padding and
documents (`hf.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from parallax.plugins.context.routing import numbering
from parallax.plugins.context.sequence import CutSequence
from parallax.strategies.tree import map_tensors

CHANGING = ("dynamic", "longrope")
"""Rotary embeddings that change with the largest position they see."""

BY_MASK = ("OPTModel", "OPTDecoder")
"""Models that number the tokens that are no padding, where they are given a mask of padding and no positions."""

BY_TOKEN = "create_position_ids_from_input_ids"
"""Method of embeddings that number the tokens other than that of padding, from `padding_idx` + 1 (RoBERTa)."""

NUMBERING = ("Llama4TextAttention",)
"""Attention modules that number the tokens they meet."""


def position_ids(base: Any, given: dict[str, Any], sequence: CutSequence) -> Tensor:
    """Positions of this rank's tokens, int64 [1 or batch, local]: those the model would make of the whole sequence."""
    mask = given.get("attention_mask")
    if mask is not None and type(base).__name__ in BY_MASK:
        whole = sequence.whole(mask.long(), 1)
        return sequence.take(whole.cumsum(1) * whole - 1, 1, -1)
    ids = given.get("input_ids")
    positions = sequence.positions((given["inputs_embeds"] if ids is None else ids).device).unsqueeze(0)
    if (embeddings := by_token(base)) is None:
        return positions
    if ids is None:  # embeddings do not say which of them are padding
        return positions + embeddings.padding_idx + 1
    whole = getattr(embeddings, BY_TOKEN)(sequence.whole(ids, 1), embeddings.padding_idx)
    return sequence.take(whole, 1, embeddings.padding_idx)


def by_token(base: nn.Module) -> Any:
    """The embeddings of `base` that number tokens; None where there are none."""
    return next((module for module in base.modules() if hasattr(module, BY_TOKEN)), None)


def adjustments(base: nn.Module, sequence: CutSequence) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """(module, its new forward) for every part of `base` that counts positions itself."""
    for module in base.modules():
        if type(module).__name__ in NUMBERING:
            yield module, _numbered(module.forward, sequence)
        if _changes(module):
            yield module, _to_the_last(module.forward, sequence)


def _changes(module: nn.Module) -> bool:
    kind = getattr(module, "rope_type", "")
    return any(name in str(each) for each in (kind.values() if isinstance(kind, dict) else [kind]) for name in CHANGING)


def _numbered(forward: Callable[..., Any], sequence: CutSequence) -> Callable[..., Any]:
    @functools.wraps(forward)
    def numbered(*args: Any, **kwargs: Any) -> Any:
        with numbering(sequence):
            return forward(*args, **kwargs)

    return numbered


def _to_the_last(forward: Callable[..., Any], sequence: CutSequence) -> Callable[..., Any]:
    """The forward of a rotary embedding which sees the largest position of all ranks, as one more token."""

    @functools.wraps(forward)
    def to_the_last(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        last = position_ids.max().view(1, 1)
        sequence.comm.all_reduce(last, ReduceOp.MAX)
        more = torch.cat([position_ids, last.expand(*position_ids.shape[:-1], 1)], -1)
        return map_tensors(lambda table: table[..., :-1, :], forward(x, more, *args, **kwargs))

    return to_the_last
