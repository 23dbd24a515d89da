"""Norms of queries and keys that need more than this rank's heads.

It is: the norm over all heads at once (OLMo 2's), whose mean square is summed over ranks, and modules with a norm for
each head (StableLM's qk_layernorm). It is not: the sum of gradients that are partial on each rank (`gradients.py`).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallax.plugins.tensor.functions import copy_to_region, reduce_from_region
from parallax.plugins.tensor.swap import swap
from parallax.strategies.comm import AxisComm

_RMS = re.compile(r"rms_?norm", re.IGNORECASE)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether `module` is an RMS norm by its name, with a weight of one dim and nothing else."""
    shapes = [p.dim() for p in module.parameters()]
    return bool(_RMS.search(type(module).__name__)) and list(module._parameters) == ["weight"] and shapes == [1]


def has_norm_per_head(module: nn.Module) -> bool:
    """Whether `module.norms` are layer norms."""
    norms = getattr(module, "norms", None)
    return isinstance(norms, nn.ModuleList) and len(norms) > 0 and all(type(n) is nn.LayerNorm for n in norms)


def become_wide_norm(module: nn.Module, comm: AxisComm) -> None:
    """Let an RMS norm, whose weight is already local, take its mean over the features of all ranks.

    One number per token is summed, and its gradient. Features that ranks share count as often on all of them, and so do
    not change the mean.
    """
    eps = next(e for name in ("variance_epsilon", "eps") if (e := getattr(module, name, None)) is not None)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        squares = copy_to_region(reduce_from_region(x.square().sum(-1, keepdim=True), comm), comm)
        x = x * torch.rsqrt(squares / (x.shape[-1] * comm.size) + eps)
        return (self.weight * x).to(hidden_states.dtype)

    swap(module, forward=forward)


def become_per_head(module: nn.Module, comm: AxisComm) -> None:
    """Let `module` norm this rank's heads, [batch, heads here, tokens, width]; neighbours may share a head."""
    total = len(module.norms)  # type: ignore[arg-type]
    copies = max(1, comm.size // total)
    here = total * copies // comm.size
    start = comm.index // copies * here

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        first = self.norms[0]
        out = F.layer_norm(hidden_states, first.normalized_shape, eps=first.eps)
        # all weights are read, so that all have gradients on every rank
        out = out * torch.stack([norm.weight for norm in self.norms])[start : start + here, None]
        if first.bias is not None:
            out = out + torch.stack([norm.bias for norm in self.norms])[start : start + here, None]
        return out

    swap(module, forward=forward)
