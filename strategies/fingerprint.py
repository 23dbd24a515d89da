"""Two numbers that tell tensors apart, so that ranks can compare what they hold without sending it.

It is: one pure function, used for batches, weights and gradients. It is not: a cryptographic hash.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fingerprint(values: Tensor) -> tuple[float, float]:
    """Norm of `values` and its projection on a fixed direction with elements of order one."""
    values = torch.view_as_real(values) if values.is_complex() else values
    flat = values.detach().reshape(-1).to(torch.float64 if values.device.type == "cpu" else torch.float32)
    wave = torch.cos(torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype) * 2.399963)  # golden angle
    return float(flat.norm()), float(flat @ wave)
