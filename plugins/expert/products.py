"""Matrix products of many rows in fp32 on CPUs, through oneDNN where torch has it.

It is: the same products as `torch.mm`. torch hands fp32 to MKL, which keeps to AVX2 on processors that are not Intel's;
oneDNN takes AVX-512 on all that have it. It compiles a kernel for every shape it meets, so that rows are taken in
blocks of powers of two, and the few that are left over by `torch.mm`. It is not: for other dtypes or devices, which
`torch.mm` serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

SMALLEST = 128
"""Rows of the smallest block: below, the call costs more than it gains."""


@cache
def _has_onednn() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def multiply(rows: Tensor, matrix: Tensor, out: Tensor) -> None:
    """`out` [n, m] becomes `rows` [n, k] times `matrix` [k, m]."""
    done = 0
    for block in _blocks(rows):
        out[block] = _onednn(rows[block], matrix)
        done = block.stop
    torch.mm(rows[done:], matrix, out=out[done:])


def outer(left: Tensor, right: Tensor, out: Tensor) -> None:
    """`out` [k, m] becomes the transpose of `left` [n, k] times `right` [n, m], a sum over n rows."""
    done = 0
    for block in _blocks(left):
        part = _onednn(left[block].t(), right[block])
        out.add_(part) if done else out.copy_(part)
        done = block.stop
    if done < len(left):
        torch.addmm(out, left[done:].t(), right[done:], beta=float(done > 0), out=out)
    elif not done:
        out.zero_()


def _blocks(rows: Tensor) -> Iterator[slice]:
    """The longest first; less than the smallest is left over."""
    start = 0
    if rows.dtype != torch.float32 or rows.device.type != "cpu" or not _has_onednn():
        return
    while (left := len(rows) - start) >= SMALLEST:
        size = 1 << (left.bit_length() - 1)
        yield slice(start, start + size)
        start += size


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return out
