"""Logits of which every rank holds its own part of the vocabulary, and which look whole to the code that uses them.

It is: a tensor subclass that reports the whole shape, carries this rank's piece, and connects both in autograd. What it
can do without gathering is in `logits_*.py`; for anything else it gathers itself and the operation sees the whole
tensor: always right, and as expensive as logits that were never cut. It is not: DTensor (one dim of one kind of tensor
is cut, and no operation is planned).

All ranks of the axis must do the same with it, as with any result of a cut model: an operation that gathers, on one
rank only, waits for the others. Printing it sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils import _pytree as pytree

from parallax.plugins.tensor.vocab import VocabCut

NotHandled = object()
"""What a handler returns when this call needs the whole logits."""
Handler = Callable[..., Any]


class VocabParallelLogits(Tensor):
    """[..., V] of which this rank holds [..., rows].

    Attributes:
        piece: this rank's part, without history. Work with `unwrap`, which keeps it.
        cut: where it sits.
        vocab_dim: the dim that is cut, counted from the end (-1 unless transposed).
    """

    piece: Tensor
    cut: VocabCut
    vocab_dim: int
    handlers: dict[Any, Handler] = {}
    """Function -> what does it without gathering; filled through `logits_table.py`."""

    @staticmethod
    def make(piece: Tensor, cut: VocabCut, vocab_dim: int) -> VocabParallelLogits:
        shape = list(piece.shape)
        shape[vocab_dim] = cut.width
        out: Any = Tensor._make_wrapper_subclass(
            VocabParallelLogits, shape, dtype=piece.dtype, device=piece.device, requires_grad=False
        )
        out.piece, out.cut, out.vocab_dim = piece, cut, vocab_dim
        return cast(VocabParallelLogits, out)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            ids = f"ids {self.cut.start} to {self.cut.start + self.cut.valid} of {self.cut.width}"
            return f"VocabParallelLogits(shape={tuple(self.shape)}, dtype={self.dtype}, {ids} here)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = cls.handlers.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            out = NotHandled if handler is None else handler(func, *args, **kwargs)
            return _on_whole(func, args, kwargs) if out is NotHandled else out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What autograd itself does, below `__torch_function__`: copies of gradients and their sums stay cut."""
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if func is torch.ops.aten.detach.default:
            return VocabParallelLogits.make(first.piece, first.cut, first.vocab_dim)
        summed = func is torch.ops.aten.add.Tensor and not kwargs and all(isinstance(x, Tensor) for x in args)
        if summed and args[0].shape == args[1].shape:
            like = first if isinstance(first, VocabParallelLogits) else args[1]
            pieces = [piece_of(x, like.cut, like.vocab_dim) for x in args]
            return VocabParallelLogits.make(pieces[0] + pieces[1], like.cut, like.vocab_dim)
        return func(*pytree.tree_map(whole, args), **pytree.tree_map(whole, kwargs))


class _Wrap(Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, cut: VocabCut, vocab_dim: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.cut, ctx.vocab_dim = cut, vocab_dim
        return VocabParallelLogits.make(piece.detach(), cut, vocab_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        return None if grad is None else piece_of(grad, ctx.cut, ctx.vocab_dim), None, None


class _Unwrap(Function):
    @staticmethod
    def forward(ctx: Any, logits: VocabParallelLogits) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.cut, ctx.vocab_dim = logits.cut, logits.vocab_dim
        return logits.piece.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else VocabParallelLogits.make(grad, ctx.cut, ctx.vocab_dim)


class _Rebase(Function):
    """Gives `logits`, changed in place, the history of the piece it was changed to."""

    @staticmethod
    def forward(ctx: Any, logits: VocabParallelLogits, piece: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.cut, ctx.vocab_dim = logits.cut, logits.vocab_dim
        logits.piece = piece.detach()
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None]:
        return None, None if grad is None else piece_of(grad, ctx.cut, ctx.vocab_dim)


def wrap(piece: Tensor, cut: VocabCut, vocab_dim: int = -1) -> Tensor:
    """Logits that look whole, from this rank's piece; gradients reach the piece."""
    return cast(Tensor, _Wrap.apply(piece, cut, vocab_dim))


def unwrap(logits: VocabParallelLogits) -> Tensor:
    """This rank's piece, in the graph of `logits`."""
    return cast(Tensor, _Unwrap.apply(logits))


def rebase(logits: VocabParallelLogits, piece: Tensor) -> Tensor:
    """`logits` itself, from now on with the values and the history of `piece`."""
    return cast(Tensor, _Rebase.apply(logits, piece))


def piece_of(x: Tensor, cut: VocabCut, vocab_dim: int) -> Tensor:
    """This rank's piece of `x`, whole or cut already; for gradients, which have no history of their own."""
    if isinstance(x, VocabParallelLogits):
        if x.cut == cut and x.vocab_dim == vocab_dim:
            return x.piece
        x = whole(x)
    return cut.take(x, vocab_dim).contiguous()


def whole(x: Any) -> Any:
    """`x` with every rank's part of the vocabulary, if it is cut. Collective; one all-gather."""
    if not isinstance(x, VocabParallelLogits):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        piece = unwrap(x).movedim(x.vocab_dim, -1)
        return x.cut.gather(piece).movedim(-1, x.vocab_dim)


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` on whole tensors; what it changes in place changes here too."""
    name = getattr(func, "__name__", "")
    target = args[0] if args else None
    if isinstance(target, VocabParallelLogits) and _in_place(name):
        changed = whole(target)
        if torch.is_grad_enabled() and changed.requires_grad:
            changed = changed.clone()
        func(changed, *pytree.tree_map(whole, args[1:]), **pytree.tree_map(whole, kwargs))
        rebase(target, target.cut.take(changed, target.vocab_dim))
        return target
    return func(*pytree.tree_map(whole, args), **pytree.tree_map(whole, kwargs))


def _in_place(name: str) -> bool:
    augmented = name.startswith("__i") and name.endswith("__") and name != "__invert__"
    return name == "__setitem__" or augmented or (name.endswith("_") and not name.endswith("__"))
