"""A small model, its batches and the one-process loop in plain torch that the data engines are measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallax.plugins import registry
from parallax.plugins.data.base import Clip, DataEngine
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.precision import LossScale

WIDTH, CLASSES, ROWS = 6, 5, 4
MICRO = 3
INTERLEAVED = ("F", "F", "B", "F", "B", "B")
CLIP = Clip(0.05)
FSDP = 10
"""Added to a stage: that stage by torch's FSDP2."""
STAGES = (0, 1, 2, 3, FSDP + 2, FSDP + 3)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


class Scaled(nn.Module):
    """A container with a parameter of its own, used around its child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(13))
        self.inner = nn.Linear(WIDTH, 13)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x * 2)) * self.scale


class Net(nn.Module):
    """Odd sizes, so that parameters straddle partitions; a frozen parameter; a buffer; `spare` is used on demand."""

    def __init__(self, use_spare: bool = False) -> None:
        super().__init__()
        self.first = Scaled()
        self.norm = nn.LayerNorm(13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.spare = nn.Linear(13, 13, bias=False)
        self.last = nn.Linear(13, CLASSES)
        self.register_buffer("shift", torch.full((13,), 0.1))
        self.use_spare = use_spare
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.first, x, use_reentrant=False) if self.recompute else self.first(x)
        h = self.frozen(self.norm(h)) + self.shift
        if self.use_spare:
            h = h + self.spare(h)
        return self.last(h)


def net(dtype: torch.dtype, seed: int = 0, use_spare: bool = True) -> Net:
    torch.manual_seed(seed)
    return Net(use_spare).to(dtype)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as usual: no weight decay for vectors."""
    params = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def batch(step: int, data_rank: int, micro: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1 + micro + 10 * data_rank + 1000 * step)
    x = torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64).to(dtype)
    return x, torch.randint(CLASSES, (ROWS,), generator=g)


def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(x), y)


@dataclass
class Seen:
    """What a run showed: per step the norm and every gradient, at the end every weight."""

    norms: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    skipped: list[bool] = field(default_factory=list)


def plain_run(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_size: int,
    *,
    steps: int = 5,
    clip: Clip = CLIP,
    first: int = 0,
    each: Callable[[int, nn.Module], None] = lambda step, module: None,
) -> Seen:
    """One process, the whole batch, nothing but torch."""
    seen = Seen()
    dtype = next(module.parameters()).dtype
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        each(step, module)
        optimizer.zero_grad()
        for rank in range(data_size):
            for micro in range(MICRO):
                (loss_of(module, *batch(step, rank, micro, dtype)) / (MICRO * data_size)).backward()
        seen.grads.append({n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()})
        seen.norms.append(torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None]))
        if clip.algorithm == "norm" and clip.value:
            torch.nn.utils.clip_grad_norm_(held, clip.value)
        elif clip.value:
            torch.nn.utils.clip_grad_value_(held, clip.value)
        optimizer.step()
    seen.weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    return seen


def make_engine(
    stage: int, module: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: Mesh, **kwargs: Any
) -> DataEngine:
    engine: DataEngine = registry.load("parallax.data_engines", mesh.layout.resolved_data_engine)()
    return attach(engine, module, optimizer, mesh, **kwargs)


def attach(
    engine: DataEngine, module: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: Mesh, **kwargs: Any
) -> DataEngine:
    engine.check(mesh.layout)
    kwargs.setdefault("owned", lambda name: True)
    engine.setup(module, optimizer, mesh=mesh, layout=mesh.layout, **kwargs)
    return engine


def mesh_of(rank: int, stage: int, *, dp: int, pp: int = 1) -> Mesh:
    kind = "fsdp" if stage >= FSDP else "auto"
    layout = Layout(data_parallel_size=dp, pipeline_parallel_size=pp, zero_stage=stage % FSDP, data_engine=kind)
    return Mesh.build(layout, rank)


def engine_step(
    engine: DataEngine,
    module: nn.Module,
    mesh: Mesh,
    step: int,
    *,
    clip: Clip = CLIP,
    order: Sequence[str] = INTERLEAVED,
    scale: LossScale | None = None,
    seen: Seen | None = None,
) -> None:
    """One step of this rank's micro-batches, forwards and backwards in `order`."""
    dtype = next(module.parameters()).dtype
    forwards, losses = iter(range(MICRO)), []
    for action in order:
        if action == "F":
            losses.append(engine.forward(loss_of, module, *batch(step, mesh["data"].index, next(forwards), dtype)))
        else:
            engine.backward(losses.pop(0) * ((1.0 if scale is None else scale.value) / MICRO))
    engine.reduce()
    if seen is not None:
        seen.grads.append({n: engine.full_grad(n) for n, _ in module.named_parameters()})
    result = engine.step(clip)
    if seen is not None:
        seen.norms.append(result.grad_norm)
        seen.skipped.append(result.skipped)


def engine_run(engine: DataEngine, module: nn.Module, mesh: Mesh, *, steps: int = 5, first: int = 0, **kw: Any) -> Seen:
    seen = Seen()
    for step in range(first, first + steps):
        engine_step(engine, module, mesh, step, seen=seen, **kw)
    seen.weights = {n: engine.full_param(n) for n, _ in module.named_parameters()}
    return seen


def assert_same(seen: Seen, expected: Seen, rtol: float) -> None:
    """Norms, gradients and weights agree to `rtol` of the largest element of each tensor."""
    assert len(seen.norms) == len(expected.norms)
    for got, want in zip(seen.norms, expected.norms, strict=True):
        near(got, want, rtol, "norm")
    for step, (got_grads, want_grads) in enumerate(zip(seen.grads, expected.grads, strict=True)):
        for name, want_grad in want_grads.items():
            got_grad = got_grads[name]
            if want_grad is None:  # ZeRO has a zero where plain torch has nothing
                assert got_grad is None or not got_grad.any(), f"{name} has a gradient in step {step}"
            else:
                assert got_grad is not None, f"{name} has no gradient in step {step}"
                near(got_grad, want_grad, rtol, f"gradient of {name} in step {step}")
    assert seen.weights.keys() == expected.weights.keys()
    for name, want_weight in expected.weights.items():
        near(seen.weights[name], want_weight, rtol, name)


def near(got: Tensor, want: Tensor, rtol: float, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    error = (got.double() - want.double()).abs().max().item()
    size = want.double().abs().max().item()
    assert error <= rtol * size, f"{what}: off by {error:.3e}, {error / max(size, 1e-300):.3e} of the largest element"
