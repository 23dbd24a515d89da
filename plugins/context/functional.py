"""Attention calls of plain modules.

It is: `parallax.scaled_dot_product_attention`, what `F.scaled_dot_product_attention` does on a sequence that is cut,
and the refusal of attention that cannot be followed. It is not: the computation (`AttentionMethod`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from parallax.plugins.context.base import AttentionSpec, Documents
from parallax.plugins.context.sequence import CutSequence


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, over the whole sequence where sequences are cut.

    With `context_parallel_size` > 1 torch's own function is routed in the same way while a step runs, so existing code
    needs no change; this name says what is meant.

    Args:
        query: [batch, heads, tokens, dim].
        key, value: [batch, kv_heads, tokens, dim]; fewer heads than the query's need `enable_gqa`.
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as torch's. On a cut sequence a mask must be causal
            ([tokens, tokens]), say which keys are padding ([batch, 1, 1, tokens]), or hide nothing.

    Raises:
        ValueError: on a cut sequence, a mask or an option that cannot be followed.
    """
    if has_torch_function((query, key, value)):
        return handle_torch_function(
            scaled_dot_product_attention, (query, key, value), query, key, value, attn_mask, dropout_p, is_causal,
            scale, enable_gqa,
        )  # fmt: skip
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def our_attention(sequence: CutSequence, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return torch_attention(sequence, func, *args, **kwargs)


def torch_attention(
    sequence: CutSequence,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What scaled_dot_product_attention means on a cut sequence."""
    if query.dim() < 3:
        raise ValueError(f"attention needs [batch, heads, tokens, dim] on a cut sequence, got {tuple(query.shape)}")
    single = query.dim() == 3
    q, k, v = (t.unsqueeze(1) if single else t for t in (query, key, value))
    if k.shape[1] != q.shape[1] and not enable_gqa:
        raise ValueError(f"{k.shape[1]} heads of keys for {q.shape[1]} of queries need enable_gqa=True")
    causal, documents = is_causal, sequence.documents
    if attn_mask is not None:
        causal, documents = understood(sequence, attn_mask)
    out = attention(sequence, q, k, v, causal, scale, dropout_p, documents)
    return out.squeeze(1) if single else out


def attention(
    sequence: CutSequence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    documents: Documents | None,
) -> Tensor:
    """Attention over the whole sequence; shapes as in `AttentionMethod.__call__`."""
    spec = AttentionSpec(causal=causal, scale=scale, dropout_p=dropout_p, documents=documents)
    return sequence.attend(q, k, v, spec)


def understood(sequence: CutSequence, mask: Tensor) -> tuple[bool, Documents | None]:
    """(causal, padding) that `mask` stands for. Reads the mask on the host: is_causal=True costs nothing."""
    n, seen = sequence.local, mask
    if mask.is_floating_point():
        seen = mask == 0
        if bool((~seen & (mask > torch.finfo(mask.dtype).min / 2)).any()):
            raise _unclear(sequence, mask, "it adds numbers to the scores")
    if bool(seen.all()):
        return False, None
    if tuple(seen.shape[-2:]) == (n, n) and seen.numel() == n * n:
        at = sequence.positions(mask.device)
        made_here, made_of_positions = torch.ones_like(seen.reshape(n, n)).tril(), at.unsqueeze(1) >= at
        if any(torch.equal(seen.reshape(n, n), causal) for causal in (made_here, made_of_positions)):
            return True, None
        raise _unclear(sequence, mask, "it is not causal")
    if seen.dim() == 4 and tuple(seen.shape[1:]) == (1, 1, n):
        return False, documents_of_mask(sequence, seen[:, 0, 0])
    raise _unclear(sequence, mask, "its shape is neither [tokens, tokens] nor [batch, 1, 1, tokens]")


def _unclear(sequence: CutSequence, mask: Tensor, why: str) -> ValueError:
    return ValueError(
        f"attn_mask of shape {tuple(mask.shape)} cannot be followed over a sequence cut over {sequence.comm.size} "
        f"context ranks, {sequence.local} tokens each: {why}. Use is_causal=True, a mask of padding "
        f"[batch, 1, 1, tokens], or context_parallel_size=1"
    )


def documents_of_mask(sequence: CutSequence, mask: Tensor) -> Documents | None:
    """Padding of the whole sequences, of this rank's part [batch, local] of a mask; None when it hides nothing."""
    whole = sequence.whole(mask.bool(), 1)
    return None if bool(whole.all()) else Documents.from_mask(sequence.cut.pad(whole, 1, 0))


def softmax(sequence: CutSequence, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A softmax as always; over scores of tokens against tokens it is attention that sees this rank's tokens only."""
    scores = args[0] if args else kwargs.get("input", kwargs.get("self"))
    n = sequence.local
    if isinstance(scores, Tensor) and scores.dim() >= 3 and tuple(scores.shape[-2:]) == (n, n):
        raise ValueError(
            f"a softmax over scores of shape {tuple(scores.shape)} looks like attention written by hand, which would "
            f"see only the {n} tokens of a sequence that are on this context rank; call "
            f"F.scaled_dot_product_attention instead, or use context_parallel_size=1"
        )
    return func(*args, **kwargs)
