"""Losses that the user's code sums and divides itself: over whole sequences.

It is: what cross entropy with reduction "none" or "sum" gives on a cut sequence. A loss per token stays one through
elementwise code (`PerToken`); its sum, and a loss that is summed, is that of the whole sequences (`WholeLoss`). What
the code counts over this rank's tokens (`Counted`: sums of masks) stays what it is, but where such a loss is divided by
it, it is the count of the whole sequences. It is not: cross entropy itself (`losses.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallax.plugins.context.sequence import CutSequence
from parallax.strategies.batch import IGNORE_INDEX
from parallax.strategies.tree import map_leaves, tensors_of

SUMS = (torch.sum, Tensor.sum)
MEANS = (torch.mean, Tensor.mean)
DIVISIONS = (Tensor.div, Tensor.div_, Tensor.true_divide, Tensor.__truediv__, Tensor.__itruediv__, torch.div,
             torch.true_divide)  # fmt: skip
COUNTS = (*SUMS, torch.count_nonzero, Tensor.count_nonzero)
READS = (Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__)


class _Whole(torch.autograd.Function):
    """A rank's share of a loss, shown as the whole loss; `factor` is what the share counts in the mean of the ranks."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, whole: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return whole.to(share.dtype, copy=True)  # an input returned as it is could not be added to in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return grads[0] * factor.to(grads[0].dtype), None, None


def as_whole(share: Tensor, whole: Tensor, factor: Tensor) -> Tensor:
    """A number with the value `whole`, whose gradient is that of `share` times `factor`."""
    result: Tensor = _Whole.apply(share, whole, factor)
    return result


class _Tracked(Tensor):
    """A tensor that remembers the cut sequence it comes from."""

    sequence: CutSequence

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [x for x in tensors_of((args, kwargs)) if isinstance(x, _Tracked)]
        losses = [x for x in found if isinstance(x, PerToken | WholeLoss)]
        with torch._C.DisableTorchFunctionSubclass():
            if not losses and isinstance(found[0], Target):
                return _on_targets(func, found[0].sequence, args, kwargs)
            if not losses:
                return _on_counts(func, found, args, kwargs)
            if getattr(func, "__name__", "") == "__get__":  # an attribute
                return func(*_plain(args), **kwargs)
            if func in DIVISIONS and isinstance(losses[0], WholeLoss) and len(args) > 1:
                args = (args[0], whole_number(losses[0].sequence, args[1]), *args[2:])
            args, kwargs = _plain((args, kwargs), counts_are_whole=True)
            if isinstance(losses[0], PerToken) and func in (*SUMS, *MEANS):
                return _reduced(losses[0].sequence, func in MEANS, *args, **kwargs)
            return track(type(losses[0]), func(*args, **kwargs), losses[0].sequence)


class PerToken(_Tracked):
    """A number for each of this rank's tokens, or of some of them."""


class Target(_Tracked):
    """What was shifted, or made of it token by token: the last token of a sequence has none."""


class WholeLoss(_Tracked):
    """A number of the whole sequences, the same on every context rank."""


class Counted(_Tracked):
    """A number counted over this rank's tokens.

    Attributes:
        base: as it was counted.
        after: what was done to it since.
        used: whether a loss was divided by it.
    """

    base: Tensor
    after: Callable[[Tensor], Tensor]
    used = False

    def whole(self) -> Tensor:
        """The number of the whole sequences. Collective."""
        self.used = True
        total = self.base.detach().clone()
        total = total.long() if total.dtype == torch.bool else total
        self.sequence.comm.all_reduce(total)
        return self.after(total)


def track(kind: type[_Tracked], value: Any, sequence: CutSequence) -> Any:
    """`value` as a `kind`, where it is a tensor of floating-point numbers."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    made = value.as_subclass(kind)
    made.sequence = sequence
    return made


def plain(value: Any) -> Any:
    """A tensor without what it remembers."""
    return value.as_subclass(Tensor) if isinstance(value, _Tracked) else value


def counted(sequence: CutSequence, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A sum as always; over a mask or numbers of tokens it is remembered as a count."""
    tensor = args[0] if args else kwargs.get("input")
    if type(tensor) is not Tensor or tensor.requires_grad or not _per_token(sequence, tensor):
        return func(*args, **kwargs)
    return _count(sequence, sequence.real(tensor.device), func, tensor, *args[1:], **kwargs)


def _per_token(sequence: CutSequence, x: Tensor) -> bool:
    n, rows = sequence.local, sequence.rows
    return tuple(x.shape[:2]) == (rows, n) or tuple(x.shape) == (rows * n,)


def _count(
    sequence: CutSequence, valid: Tensor, func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """`func`, a sum, of `x`; remembered as a count of where `valid` is set, unless tokens are left in it."""
    found = func(x, *args, **kwargs)
    if found.dim() > 1 or (found.dim() and tuple(found.shape) != (sequence.rows,)):
        return found
    made: Any = found.as_subclass(Counted)
    base = func(torch.where(_like(sequence, valid, x), x, torch.zeros_like(x)), *args, **kwargs)
    made.sequence, made.base, made.after = sequence, base, lambda total: total
    return made


def _like(sequence: CutSequence, valid: Tensor, x: Tensor) -> Tensor:
    """`valid` [local] in the shape of `x`, which has a number for each token here."""
    everywhere = valid.expand(sequence.rows, -1)
    return everywhere.reshape(-1) if x.dim() == 1 else everywhere.reshape(*everywhere.shape, *[1] * (x.dim() - 2))


def _on_targets(func: Any, sequence: CutSequence, args: Any, kwargs: Any) -> Any:
    args, kwargs = _plain(args), _plain(kwargs)
    if func in COUNTS:
        return _count(sequence, sequence.targets(args[0].device), func, *args, **kwargs)
    result = func(*args, **kwargs)
    if not isinstance(result, Tensor) or not _per_token(sequence, result):
        return result
    return as_target(sequence, result)


def as_target(sequence: CutSequence, value: Tensor) -> Tensor:
    made: Any = value.as_subclass(Target)
    made.sequence = sequence
    return made


KEPT = {"clamp", "clamp_min", "clamp_", "clamp_min_", "maximum", "max", "float", "double", "long", "int", "to", "type",
        "type_as", "add", "__add__", "__radd__", "mul", "__mul__", "__rmul__", "sub", "__sub__", "view", "reshape",
        "squeeze", "unsqueeze", "sum", "detach", "clone", "half", "bfloat16", "expand"}  # fmt: skip
"""Names of what may be done to a count that still is one."""


def _on_counts(func: Any, found: list[Any], args: Any, kwargs: Any) -> Any:
    first: Counted = found[0]
    result = func(*_plain(args), **_plain(kwargs))
    if func in READS and first.dim() == 0:
        first.sequence.read[float(result)] = first
    if len(found) > 1 or not (args and args[0] is first) or not isinstance(result, Tensor):
        return result
    if getattr(func, "__name__", "") not in KEPT:
        return result
    made: Any = result.as_subclass(Counted)
    before = first.after
    made.sequence, made.base = first.sequence, first.base
    made.after = lambda x: func(before(x), *args[1:], **kwargs)
    return made


def _plain(tree: Any, counts_are_whole: bool = False) -> Any:
    return map_leaves(lambda x: x.whole() if counts_are_whole and isinstance(x, Counted) else plain(x), tree)


def whole_number(sequence: CutSequence, number: Any) -> Any:
    """A Python number a loss of whole sequences is divided by: of whole sequences, where it is one of tokens here.

    Raises:
        ValueError: the code has read a count of tokens, and this is another number.
    """
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return number
    if (count := sequence.read.get(float(number))) is not None:
        return plain(count.whole())
    rows, tokens = sequence.rows, (sequence.local, sequence.rows * sequence.local)
    if number == rows and number not in tokens:
        return number
    if number in tokens:
        if sequence.shifted or rows in tokens:
            raise ValueError(
                f"a loss of whole sequences is divided by {number}, the number of tokens here, from which cannot be "
                f"told whether the last token, which predicts none after a shift, is meant to count, or whether it is "
                f"the {rows} sequences; divide by the number of targets, (labels != {IGNORE_INDEX}).sum(), or use "
                f"reduction='mean'"
            )
        return number // sequence.local * sequence.cut.tokens
    if unused := [n for n, count in sequence.read.items() if not count.used]:
        raise ValueError(
            f"a loss of whole sequences is divided by {number}, after a count of tokens was read as a number "
            f"({', '.join(f'{n:g}' for n in unused)} here), which is of this context rank's tokens alone; "
            f"divide by the tensor (without .item()), or use context_parallel_size=1"
        )
    return number


def summed(sequence: CutSequence, share: Tensor) -> Tensor:
    """The sum over the ranks of what each has of a loss. Collective."""
    sequence.normalized = True
    total = share.detach().double()
    sequence.comm.all_reduce(total)
    whole: Tensor = track(WholeLoss, as_whole(share, total, torch.full_like(total, sequence.comm.size)), sequence)
    return whole


def _reduced(
    sequence: CutSequence, mean: bool, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Tensor:
    """Sum or mean of a loss per token; over tokens it is that of the whole sequences."""
    everyone = _per_token(sequence, x)
    dims = range(x.dim()) if dim is None else [d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim)]
    if (1 if everyone and x.dim() > 1 else 0) not in dims:
        found = x.mean(dim, keepdim, **kwargs) if mean else x.sum(dim, keepdim, **kwargs)
        return track(PerToken, found, sequence)
    if everyone and (sequence.padded or sequence.shifted):
        x = torch.where(_like(sequence, sequence.targets(x.device), x), x, 0)
    total = summed(sequence, x.sum(tuple(dims), keepdim, **kwargs))
    if not mean:
        return total
    number = torch.tensor(float(torch.Size(x.shape[d] for d in dims).numel()), dtype=torch.float64, device=x.device)
    if everyone:
        number *= (sequence.cut.tokens - sequence.shifted) / sequence.local
    else:
        sequence.comm.all_reduce(number)
    return total / number.to(total.dtype)
