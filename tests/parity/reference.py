"""One process, plain torch: the independent source of every right value in the parity tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.parity.models import BATCH, BUILD, STEPS, build, samples, tokens

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


def train(
    name: str,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
    parts: Sequence[Sequence[int]] = (),
    *,
    steps: int = STEPS,
    size: int = BATCH,
    accumulate: int = 1,
) -> Run:
    """Plain torch on the whole batch, or on its `parts` (rows of each), whose losses are averaged by valid tokens.

    An optimizer step every `accumulate` batches, on their average.
    """
    model = build(name, dtype)
    loss_of = BUILD[name][1]
    opt = optimizer(model.parameters(), dtype)
    run = Run()
    for at, batch in enumerate(samples(name, steps, size=size)):
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_of(model, batch) if not parts else _averaged(name, model, batch, parts)
        (loss / accumulate).backward()
        run.losses.append(float(loss.detach()))
        if (at + 1) % accumulate:
            continue
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        run.first_grads = run.first_grads or grads
        run.last_grads = grads
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        opt.step()
        opt.zero_grad()
    run.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return run


def _averaged(name: str, model: Any, batch: dict[str, Tensor], parts: Sequence[Sequence[int]]) -> Tensor:
    pieces = [{key: value[list(rows)] for key, value in batch.items()} for rows in parts]
    shares = torch.tensor([tokens(name, piece) for piece in pieces], dtype=torch.float64)
    losses = torch.stack([BUILD[name][1](model, piece) for piece in pieces])
    return (losses * (shares / shares.sum()).to(losses.dtype)).sum()


def train_bf16_true(name: str, steps: int = STEPS) -> Run:
    """Weights, activations and gradients in bf16; AdamW on fp32 copies of the weights."""
    model = build(name, torch.float32)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(torch.bfloat16)
    opt = optimizer(masters, torch.float32)
    run = Run()
    for batch in samples(name, steps):
        loss = BUILD[name][1](model, batch)
        loss.backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float()  # type: ignore[union-attr]
            param.grad = None
        run.first_grads = run.first_grads or _by_name(model, [m.grad for m in masters])
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(masters, CLIP)))
        run.losses.append(float(loss.detach()))
        opt.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
    run.weights = _by_name(model, list(masters))
    return run


def train_fp16_mixed(name: str, scale: float) -> tuple[Run, float]:
    """torch.amp on the CPU with GradScaler; also the loss scale it ends with."""
    model = build(name, torch.float32)
    opt = optimizer(model.parameters(), torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    run = Run()
    for batch in samples(name):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = BUILD[name][1](model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        run.losses.append(float(loss.detach()))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    run.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return run, float(scaler.get_scale())


def _by_name(model: Any, tensors: list[Any]) -> dict[str, Tensor]:
    return {n: t.detach().clone() for (n, _), t in zip(model.named_parameters(), tensors, strict=True)}
