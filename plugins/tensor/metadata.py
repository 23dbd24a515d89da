"""Functions of torch by name, and those that ask about a tensor without reading its elements.

It is: what a tensor subclass that stands for more than it holds answers by itself. It is not: such a tensor
(`logits.py`, `unsummed.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def methods(*names: str) -> list[Any]:
    """The function and the method of each name, as far as they exist."""
    found = [getattr(owner, name, None) for name in names for owner in (torch, Tensor)]
    return [f for f in found if f is not None]


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


_QUESTIONS = methods(
    "size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size",
    "get_device", "ndimension", "retain_grad", "register_hook", "is_tensor", "__len__", "storage_offset",
    "register_post_accumulate_grad_hook", "is_signed", "is_inference", "is_nonzero_static",
)  # fmt: skip
_PROPERTIES = _getters(
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_meta",
    "is_sparse", "is_quantized", "is_mkldnn", "is_cpu", "grad", "output_nr", "itemsize", "nbytes", "is_xpu", "is_mps",
    "_version", "names", "is_nested", "retains_grad", "_backward_hooks",
)  # fmt: skip
METADATA = frozenset(
    [*_QUESTIONS, *_PROPERTIES, Tensor.__hash__, Tensor.backward, torch.autograd.backward, torch.autograd.grad]
)
