"""What ZeRO cannot take, found before anything is built, and param groups made so that it can.

It is: checks of the installed DeepSpeed, the user's optimizer and the parameters. It is not: the engine.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

import torch
from torch import nn
from torch.optim import Optimizer

TESTED = ("0.19.8", "0.20")
"""DeepSpeed versions from (included) and up to (excluded) that the shims were written for."""
WHOLE_TENSOR = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""torch optimizers whose update is not element-wise: on a flat partition they would compute something else."""


def check_installed(stage: int) -> None:
    """Raise ValueError unless a DeepSpeed that works is installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            f"zero_stage {stage} needs DeepSpeed, which is not installed; "
            f"pip install 'lightning-parallax[deepspeed]' or use zero_stage 0"
        )
    found = version("deepspeed")
    if not _numbers(TESTED[0]) <= _numbers(found) < _numbers(TESTED[1]):
        raise ValueError(
            f"DeepSpeed {found} is installed, Parallax works with >={TESTED[0]},<{TESTED[1]}; "
            f"pip install 'deepspeed>={TESTED[0]},<{TESTED[1]}' or use zero_stage 0"
        )


def fill_groups(optimizer: Optimizer, dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    """Leave only what ZeRO trains in each group, and one element in groups where that is nothing.

    A pipeline stage may hold no parameter of a group. DeepSpeed would drop the group, and learning-rate schedulers
    that count groups would no longer fit. The element has no gradient, ever.
    """
    fill = []
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad and p.numel()]
        if not group["params"]:
            fill.append(nn.Parameter(torch.zeros(1, dtype=dtype, device=device)))
            group["params"] = [fill[-1]]
    return fill


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


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
