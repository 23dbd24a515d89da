"""What no engine that shards over the data axis can take, found before anything is built.

It is: checks of the user's optimizer and of the dtypes it trains. It is not: any engine's own checks.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

WHOLE_TENSOR = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""torch optimizers whose update is not element-wise: on a flat partition they would compute something else."""


def check_optimizer(optimizer: Optimizer) -> None:
    whole = tuple(getattr(torch.optim, name) for name in WHOLE_TENSOR if hasattr(torch.optim, name))
    if isinstance(optimizer, whole):
        raise ValueError(
            f"{type(optimizer).__name__} needs whole tensors, ZeRO gives it flat partitions; use zero_stage 0 or an "
            f"element-wise optimizer such as AdamW"
        )
    if optimizer.state and not isinstance(optimizer, torch.optim.Adagrad):
        raise ValueError(
            f"{type(optimizer).__name__} already holds state for {len(optimizer.state)} parameters, which ZeRO would "
            f"lose; return a fresh optimizer from configure_optimizers (states are loaded after set-up)"
        )


def one_dtype(params: dict[str, nn.Parameter]) -> torch.dtype:
    found: dict[torch.dtype, str] = {}
    for name, p in params.items():
        found.setdefault(p.dtype, name)
    if len(found) > 1:
        listing = ", ".join(f"{str(d).removeprefix('torch.')} ({name})" for d, name in found.items())
        raise ValueError(
            f"ZeRO needs one dtype for all trainable parameters, found {listing}; convert them or use 'ddp'"
        )
    dtype = next(iter(found), torch.float32)
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(
            f"ZeRO trains float32, bfloat16 and float64 parameters, found {dtype} ({found[dtype]}); use precision "
            f"'16-mixed' (fp32 parameters) or 'bf16-true'"
        )
    return dtype
