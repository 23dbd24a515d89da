"""Matrix products for code that is its own autograd: in fp32 on CPUs through oneDNN where torch has it.

It is: the same products as `torch.mm` and `F.linear`. torch hands fp32 to MKL, which keeps to AVX2 on processors that
are not Intel's; oneDNN takes AVX-512 on all that have it. Small products, other dtypes and devices, and whatever
autograd is to record, are torch's. It is not: differentiable; it is called inside of autograd functions.

oneDNN compiles a kernel for every shape it meets, in about half a millisecond, and keeps the last thousand. Where the
number of rows is another one in every call, as that of an expert's tokens is, rows are taken in blocks of powers of
two, and the few that are left over by `torch.mm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

SMALLEST = 1 << 20
"""Multiplications of the smallest product: below, the call costs more than it gains."""
SMALLEST_BLOCK = 32
"""Rows of the smallest block, likewise."""


@cache
def _has_onednn() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def is_faster(x: Tensor) -> bool:
    """Whether products with `x` may go through oneDNN here."""
    return (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and _has_onednn()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def _takes(x: Tensor, features: int) -> bool:
    return x.numel() * features >= SMALLEST and is_faster(x) and not torch.is_grad_enabled()


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x [..., in], W [out, in]."""
    if not _takes(x, weight.shape[0]):
        return F.linear(x, weight, bias)
    return _onednn(x, weight, bias)


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out` [n, out] becomes x W^T + b for x [n, in]."""
    if _takes(x, weight.shape[0]):
        out.copy_(_onednn(x, weight, bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """`left` [n, k] times `right` [k, m], written to `out` if given."""
    if not _takes(left, right.shape[1]):
        return torch.mm(left, right, out=out)
    made = _onednn(left, right.t())
    return made if out is None else out.copy_(made)


def add_product(into: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`into` [n, m] and `left` [n, k] times `right` [k, m], which is added to it."""
    if not _takes(left, right.shape[1]):
        return into.addmm_(left, right)
    return into.add_(_onednn(left, right.t()))


def multiply(rows: Tensor, matrix: Tensor, out: Tensor) -> None:
    """`out` [n, m] becomes `rows` [n, k] times `matrix` [k, m], for an n that is never the same."""
    done = 0
    for block in _blocks(rows):
        out[block] = _onednn(rows[block], matrix.t())
        done = block.stop
    torch.mm(rows[done:], matrix, out=out[done:])


def outer(left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
    """`out` [k, m] becomes, or with `add` grows by, the transpose of `left` [n, k] times `right` [n, m]; n as above."""
    done = 0
    for block in _blocks(left):
        part = _onednn(left[block].t(), right[block].t())
        out.add_(part) if add else out.copy_(part)
        done, add = block.stop, True
    if done < len(left):
        torch.addmm(out, left[done:].t(), right[done:], beta=float(add), out=out)
    elif not add:
        out.zero_()


def _blocks(rows: Tensor) -> Iterator[slice]:
    """The longest first; less than the smallest is left over."""
    start = 0
    if not is_faster(rows):
        return
    while (left := len(rows) - start) >= SMALLEST_BLOCK:
        size = 1 << (left.bit_length() - 1)
        yield slice(start, start + size)
        start += size


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))
