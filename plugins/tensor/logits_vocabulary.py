"""Losses and reductions over the vocabulary of vocabulary-parallel logits.

It is: handlers (`logits_table.py`): what the user's call means, in the words of `vocab.py`. It is not: the mathematics
(`vocab.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.return_types import max as max_result
from torch.return_types import topk as topk_result

from parallax.plugins.tensor import vocab
from parallax.plugins.tensor.functions import copy_to_region
from parallax.plugins.tensor.logits import NotHandled, VocabParallelLogits, unwrap, wrap
from parallax.plugins.tensor.logits_table import handles
from parallax.plugins.tensor.metadata import methods
from parallax.plugins.tensor.vocab import VocabCut

Logits = VocabParallelLogits


def _vocab_last(x: Any, dim: Any) -> tuple[Tensor, VocabCut] | None:
    """The piece with the vocabulary last, if `dim` names it."""
    if not isinstance(x, Logits) or not isinstance(dim, int) or dim % x.dim() != x.dim() + x.vocab_dim:
        return None
    return unwrap(x).movedim(x.vocab_dim, -1), x.cut


@handles(F.cross_entropy)
def _cross_entropy(
    func: Any,
    input: Any,
    target: Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    found = _classes(input, target, weight, size_average, reduce)
    if found is None:
        return NotHandled
    piece, cut = found
    autocast = torch.is_autocast_enabled(piece.device.type)
    losses = vocab.cross_entropy(piece, target, cut, ignore=ignore_index, smoothing=label_smoothing)
    out = vocab.reduce_losses(losses, target, ignore_index, reduction)
    return out if autocast else out.to(piece.dtype)


@handles(F.nll_loss)
def _nll_loss(
    func: Any,
    input: Any,
    target: Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    found = _classes(input, target, weight, size_average, reduce)
    if found is None:
        return NotHandled
    losses = vocab.nll(found[0], target, found[1], ignore=ignore_index)
    return vocab.reduce_losses(losses, target, ignore_index, reduction)


def _classes(x: Any, target: Any, *unsupported: Any) -> tuple[Tensor, VocabCut] | None:
    """Piece and cut, when this is a loss over the vocabulary with one id per token."""
    if not isinstance(x, Logits) or isinstance(target, Logits) or any(u is not None for u in unsupported):
        return None
    one = x.shape[: x.dim() + x.vocab_dim] + x.shape[x.dim() + x.vocab_dim + 1 :]
    return _vocab_last(x, min(1, x.dim() - 1)) if target.shape == one and not target.is_floating_point() else None


@handles(*methods("log_softmax", "softmax"), F.log_softmax, F.softmax, torch.special.log_softmax)
def _log_softmax(func: Any, x: Any, dim: Any = None, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
    found = _vocab_last(x, dim)
    if found is None:
        return NotHandled
    piece, cut = found
    piece = piece if dtype is None else piece.to(dtype)
    out = piece - copy_to_region(vocab.logsumexp(piece, cut), cut.comm).unsqueeze(-1)
    out = out if "log" in func.__name__ else out.exp()
    return wrap(out.movedim(-1, x.vocab_dim), cut, x.vocab_dim)


@handles(*methods("logsumexp"), torch.special.logsumexp)
def _logsumexp(func: Any, x: Any, dim: Any, keepdim: bool = False) -> Any:
    return _reduced(vocab.logsumexp, x, dim, keepdim)


@handles(*methods("sum"))
def _sum(func: Any, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    return NotHandled if kwargs else _reduced(vocab.total, x, dim, keepdim)


@handles(*methods("argmax"))
def _argmax(func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _reduced(vocab.argmax, x, dim, keepdim)


def _reduced(fn: Callable[[Tensor, VocabCut], Tensor], x: Any, dim: Any, keepdim: bool) -> Any:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    found = _vocab_last(x, dim)
    if found is None:
        return NotHandled
    out = fn(*found)
    return out.unsqueeze(dim) if keepdim else out


@handles(*methods("gather"))
def _gather(func: Any, x: Any, dim: Any, index: Any, **kwargs: Any) -> Any:
    if kwargs or dim not in (-1, x.dim() - 1) or isinstance(index, Logits) or index.shape[:-1] != x.shape[:-1]:
        return NotHandled
    found = _vocab_last(x, dim)
    return NotHandled if found is None else vocab.pick(found[0], index, found[1])


@handles(*methods("max"))
def _max(func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    found = _vocab_last(x, dim)
    if found is None:
        return NotHandled
    ids = vocab.argmax(*found).unsqueeze(-1)
    values = vocab.pick(found[0], ids, found[1])
    pair = [t.movedim(-1, dim) if keepdim else t.squeeze(-1) for t in (values, ids)]
    return max_result((pair[0], pair[1]))


@handles(*methods("amax"))
def _amax(func: Any, x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    found = None if torch.is_grad_enabled() and x.requires_grad else _vocab_last(x, dim)  # equals share the gradient
    return NotHandled if found is None else _max(func, x, dim, keepdim).values


@handles(*methods("topk"))
def _topk(func: Any, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    found = _vocab_last(x, dim)
    if found is None or x.vocab_dim != -1 or min(k, x.cut.rows) > x.cut.fewest:
        return NotHandled
    ids = vocab.topk(found[0], k, found[1], largest=largest)
    return topk_result((vocab.pick(found[0], ids, found[1]), ids))
