"""One process, plain torch: the independent source of every right value in the parity tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.parity.models import BUILD, build, samples

LR, CLIP = 1e-2, 0.5


@dataclass
class Run:
    """What a training run did: losses and norms by step, gradients of the first and last step, final weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first_grads: dict[str, Tensor] = field(default_factory=dict)
    last_grads: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def optimizer(parameters: Any, dtype: torch.dtype) -> torch.optim.Optimizer:
    """AdamW whose epsilon is above the rounding noise of a gradient that is zero in theory (key biases, for one)."""
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, eps=1e-8 if dtype == torch.float64 else 1e-4)


def train(name: str, dtype: torch.dtype, autocast: torch.dtype | None = None) -> Run:
    """Plain torch on the whole batch."""
    model = build(name, dtype)
    loss_of = BUILD[name][1]
    opt = optimizer(model.parameters(), dtype)
    run = Run()
    for batch in samples(name):
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_of(model, batch)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        run.first_grads = run.first_grads or grads
        run.last_grads = grads
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        run.losses.append(float(loss.detach()))
        opt.step()
        opt.zero_grad()
    run.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return run
