"""What DeepSpeed cannot take, found before anything is built, and param groups made so that it can.

It is: the check of the installed DeepSpeed, and the filling of empty groups. It is not: what no engine that shards can
take (`checks.py`).
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

import torch
from torch import nn
from torch.optim import Optimizer

TESTED = ("0.19.8", "0.20")
"""DeepSpeed versions from (included) and up to (excluded) that the shims were written for."""


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


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
