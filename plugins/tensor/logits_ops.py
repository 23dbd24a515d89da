"""What vocabulary-parallel logits can do without gathering: each operation, on this rank's piece.

It is: one table, from torch functions to handlers. A handler gets the call as it was made and returns its result, or
`NotHandled` when this form of it needs the whole logits. It is not: the mathematics over the vocabulary (`vocab.py`)
or the tensor itself (`logits.py`).

Other tensors in an operation are whole and the same on every rank. Where they meet the piece they enter the cut region
as a layer's input does, so their gradients are summed over the ranks.
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
from parallax.plugins.tensor.logits import Handler, NotHandled, VocabParallelLogits, rebase, unwrap, wrap
from parallax.plugins.tensor.vocab import VocabCut
from parallax.strategies.comm import AxisComm

Logits = VocabParallelLogits


def head_output(piece: Tensor, comm: AxisComm, width: int) -> Tensor:
    """The [..., width] logits of a head that computed `piece` [..., rows] here."""
    return wrap(piece, VocabCut(comm, width, piece.shape[-1]))


def _handles(*functions: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        VocabParallelLogits.handlers.update(dict.fromkeys(functions, handler))
        return handler

    return register


def _methods(*names: str) -> list[Any]:
    """The function and the method of each name, as far as they exist."""
    found = [getattr(owner, name, None) for name in names for owner in (torch, Tensor)]
    return [f for f in found if f is not None]


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


def _like(x: Logits, piece: Tensor) -> Tensor:
    return wrap(piece, x.cut, x.vocab_dim)


# What the shell of the tensor answers by itself

_METADATA = _methods(
    "size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size",
    "get_device", "ndimension", "retain_grad", "register_hook", "is_tensor", "__len__", "storage_offset",
    "register_post_accumulate_grad_hook", "is_signed", "is_inference", "is_nonzero_static",
)  # fmt: skip
_PROPERTIES = _getters(
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_meta",
    "is_sparse", "is_quantized", "is_mkldnn", "is_cpu", "grad", "output_nr", "itemsize", "nbytes", "is_xpu", "is_mps",
    "_version", "names", "is_nested", "retains_grad", "_backward_hooks",
)  # fmt: skip


@_handles(*_METADATA, *_PROPERTIES, Tensor.__hash__, Tensor.backward, torch.autograd.backward, torch.autograd.grad)
def _itself(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


# One element at a time

_UNARY = _methods(
    "float", "double", "half", "bfloat16", "type_as", "contiguous", "clone", "tanh", "neg", "__neg__", "exp", "relu",
    "sigmoid", "abs", "square", "clamp", "clip", "isnan", "isinf", "isfinite",
)  # fmt: skip
_BINARY = _methods(
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "maximum", "minimum", "masked_fill",
    "where", "rsub", "eq", "ne", "lt", "le", "gt", "ge", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
    "__rmul__", "__truediv__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
)  # fmt: skip
_IN_PLACE = _methods("add_", "sub_", "mul_", "div_", "tanh_", "masked_fill_", "clamp_", "__iadd__", "__isub__",
                     "__imul__", "__itruediv__")  # fmt: skip


@_handles(*_UNARY, *_BINARY, torch.where)
def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    like = next(x for x in (*args, *kwargs.values()) if isinstance(x, Logits))
    if "out" in kwargs or not _fits(like, (*args, *kwargs.values())):
        return NotHandled
    args, kwargs = [_operand(x, like) for x in args], {k: _operand(x, like) for k, x in kwargs.items()}  # type: ignore
    return _like(like, func(*args, **kwargs))


@_handles(*_IN_PLACE)
def _elementwise_in_place(func: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(target, Logits) or not _fits(target, (*args, *kwargs.values())):
        return NotHandled
    piece = unwrap(target)
    func(piece, *(_operand(x, target) for x in args), **{k: _operand(x, target) for k, x in kwargs.items()})
    return rebase(target, piece)


def _fits(like: Logits, values: tuple[Any, ...]) -> bool:
    """Whether each value has the vocabulary where `like` has it, or broadcasts over it."""
    others = [x for x in values if isinstance(x, Logits)]
    return all(x.cut == like.cut and x.vocab_dim == like.vocab_dim for x in others)


def _operand(x: Any, like: Logits) -> Any:
    """What of `x` meets the piece: its own piece, or this rank's part where it spans the vocabulary."""
    if isinstance(x, Logits):
        return unwrap(x)
    if not isinstance(x, Tensor):
        return x
    if x.requires_grad:
        x = copy_to_region(x, like.cut.comm)
    at = x.dim() + like.vocab_dim
    return like.cut.take(x, at) if at >= 0 and x.shape[at] == like.cut.width != 1 else x


@_handles(Tensor.to)
def _to(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    other = args[0] if args and isinstance(args[0], Tensor) else None
    if not isinstance(x, Logits) or isinstance(other, Logits):
        return NotHandled
    device = kwargs.get("device", None if other is None else other.device)
    device = next((a for a in args if isinstance(a, (str, int, torch.device))), device)
    if device is not None and torch.empty((), device=device).device != x.piece.device:
        return NotHandled  # the ranks meet on the device of their piece
    piece = unwrap(x)
    moved = func(piece, *args, **kwargs)
    return x if moved is piece else _like(x, moved)


@_handles(*_methods("detach"), Tensor.data.__get__)  # type: ignore[attr-defined]
def _detach(func: Any, x: Logits, *args: Any) -> Any:
    return wrap(x.piece, x.cut, x.vocab_dim)


@_handles(*_methods("zeros_like", "ones_like", "empty_like"))
def _like_plain(func: Any, x: Logits, **kwargs: Any) -> Any:
    return getattr(torch, func.__name__.removesuffix("_like"))(
        tuple(x.shape), **{"dtype": x.dtype, "device": x.device, **kwargs}
    )


# Shapes


@_handles(Tensor.__getitem__)
def _index(func: Any, x: Any, index: Any) -> Any:
    if not isinstance(x, Logits) or x.vocab_dim != -1:
        return NotHandled
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(p, Logits) for p in parts):
        return NotHandled
    used = sum(_consumed(p) for p in parts)
    dots = next((i for i, p in enumerate(parts) if p is Ellipsis), None)
    reaches = used == x.dim() if dots is None else sum(_consumed(p) for p in parts[dots + 1 :]) > 0
    if reaches and parts[-1] != slice(None):  # the index names the vocabulary itself
        return NotHandled
    return _like(x, unwrap(x)[index])


def _consumed(part: Any) -> int:
    """How many dims one part of an index stands for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


@_handles(Tensor.view, Tensor.reshape, torch.reshape)
def _view(func: Any, x: Any, *shape: Any, **kwargs: Any) -> Any:
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else list(shape)
    if kwargs or x.vocab_dim != -1 or not sizes or not all(isinstance(n, int) for n in sizes):
        return NotHandled
    if -1 in sizes:
        rest = 1
        for n in sizes:
            rest *= n if n != -1 else 1
        if rest == 0:
            return NotHandled
        sizes[sizes.index(-1)] = x.numel() // rest
    if sizes[-1] != x.cut.width:
        return NotHandled
    return _like(x, func(unwrap(x), (*sizes[:-1], x.cut.rows)))


@_handles(*_methods("flatten"))
def _flatten(func: Any, x: Logits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.vocab_dim != -1 or end_dim in (-1, x.dim() - 1) and start_dim not in (-1, x.dim() - 1):
        return NotHandled
    return _like(x, unwrap(x).flatten(start_dim, end_dim))


@_handles(*_methods("unsqueeze", "squeeze", "narrow", "select", "index_select", "repeat_interleave"))
def _leading_dim(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    dim = kwargs.get("dim", args[1 if func.__name__ == "repeat_interleave" and len(args) > 1 else 0] if args else None)
    if not isinstance(x, Logits) or not isinstance(dim, int) or x.vocab_dim != -1:
        return NotHandled
    inserts = func.__name__ == "unsqueeze"
    if dim % (x.dim() + inserts) >= x.dim() - 1 + inserts:
        return NotHandled
    return _like(x, func(unwrap(x), *args, **kwargs))


@_handles(*_methods("split", "chunk", "unbind", "tensor_split"), Tensor.__iter__)
def _pieces(func: Any, x: Logits, *args: Any, **kwargs: Any) -> Any:
    named = func.__name__ in ("unbind", "__iter__")
    dim = kwargs.get("dim", (args[0] if args else 0) if named else (args[1] if len(args) > 1 else 0))
    if x.vocab_dim != -1 or dim % x.dim() == x.dim() - 1:
        return NotHandled
    parts = [_like(x, part) for part in func(unwrap(x), *args, **kwargs)]
    return iter(parts) if func is Tensor.__iter__ else tuple(parts)


@_handles(torch.cat, torch.stack)
def _joined(func: Any, parts: Any, dim: int = 0, **kwargs: Any) -> Any:
    parts = list(parts)
    first = next(x for x in parts if isinstance(x, Logits))
    ndim = first.dim() + (func is torch.stack)
    alike = all(isinstance(x, Logits) and x.cut == first.cut and x.vocab_dim == -1 for x in parts)
    if kwargs or not alike or dim % ndim == ndim - 1:
        return NotHandled
    return _like(first, func([unwrap(x) for x in parts], dim))


@_handles(*_methods("transpose", "swapaxes", "movedim", "permute"))
def _transposed(func: Any, x: Logits, *args: Any, **kwargs: Any) -> Any:
    marks = torch.empty([2 if i == x.dim() + x.vocab_dim else 1 for i in range(x.dim())], device="meta")
    where = list(func(marks, *args, **kwargs).shape).index(2)
    return wrap(func(unwrap(x), *args, **kwargs), x.cut, where - x.dim())


@_handles(Tensor.mT.__get__)  # type: ignore[attr-defined]
def _mt(func: Any, x: Logits) -> Any:
    return _transposed(Tensor.transpose, x, -2, -1)


# Over the vocabulary


def _vocab_last(x: Any, dim: Any) -> tuple[Tensor, VocabCut] | None:
    """The piece with the vocabulary last, if `dim` names it."""
    if not isinstance(x, Logits) or not isinstance(dim, int) or dim % x.dim() != x.dim() + x.vocab_dim:
        return None
    return unwrap(x).movedim(x.vocab_dim, -1), x.cut


@_handles(F.cross_entropy)
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


@_handles(F.nll_loss)
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


@_handles(*_methods("log_softmax", "softmax"), F.log_softmax, F.softmax, torch.special.log_softmax)
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


@_handles(*_methods("logsumexp"), torch.special.logsumexp)
def _logsumexp(func: Any, x: Any, dim: Any, keepdim: bool = False) -> Any:
    return _reduced(vocab.logsumexp, x, dim, keepdim)


@_handles(*_methods("sum"))
def _sum(func: Any, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    return NotHandled if kwargs else _reduced(vocab.total, x, dim, keepdim)


@_handles(*_methods("argmax"))
def _argmax(func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _reduced(vocab.argmax, x, dim, keepdim)


def _reduced(fn: Callable[[Tensor, VocabCut], Tensor], x: Any, dim: Any, keepdim: bool) -> Any:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    found = _vocab_last(x, dim)
    if found is None:
        return NotHandled
    out = fn(*found)
    return out.unsqueeze(dim) if keepdim else out


@_handles(*_methods("gather"))
def _gather(func: Any, x: Any, dim: Any, index: Any, **kwargs: Any) -> Any:
    if kwargs or dim not in (-1, x.dim() - 1) or isinstance(index, Logits) or index.shape[:-1] != x.shape[:-1]:
        return NotHandled
    found = _vocab_last(x, dim)
    return NotHandled if found is None else vocab.pick(found[0], index, found[1])


@_handles(*_methods("max"))
def _max(func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    found = _vocab_last(x, dim)
    if found is None:
        return NotHandled
    ids = vocab.argmax(*found).unsqueeze(-1)
    values = vocab.pick(found[0], ids, found[1])
    pair = [t.movedim(-1, dim) if keepdim else t.squeeze(-1) for t in (values, ids)]
    return max_result((pair[0], pair[1]))


@_handles(*_methods("amax"))
def _amax(func: Any, x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    found = None if torch.is_grad_enabled() and x.requires_grad else _vocab_last(x, dim)  # equals share the gradient
    return NotHandled if found is None else _max(func, x, dim, keepdim).values


@_handles(*_methods("topk"))
def _topk(func: Any, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    found = _vocab_last(x, dim)
    if found is None or x.vocab_dim != -1 or min(k, x.cut.rows) > x.cut.fewest:
        return NotHandled
    ids = vocab.topk(found[0], k, found[1], largest=largest)
    return topk_result((vocab.pick(found[0], ids, found[1]), ids))
