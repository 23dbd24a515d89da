"""The global gradient norm and what follows from it: the loss scale taken out, clipping, overflow.

It is: the arithmetic every data engine shares, on whatever gradients this rank holds. It is not: a
reduction of gradients, and it knows nothing of where they are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallax.plugins.data.base import Clip, local_grad_norm_sq
from parallax.strategies.mesh import Mesh
from parallax.strategies.precision import LossScale

EPSILON = 1e-6
"""Added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does."""


@dataclass(frozen=True)
class Plan:
    """What to do with the gradients of this step.

    Attributes:
        norm: global L2 norm of the unscaled gradient before clipping, 0-dim fp64, the same on every rank.
        overflow: the gradient is not finite and the step must be left out (16-mixed only).
        factor: what every gradient is multiplied by: a 0-dim fp64 tensor, a number, or None for nothing.
        limit: absolute value every gradient element is clamped to after that; 0 for none.
    """

    norm: Tensor
    overflow: bool
    factor: Tensor | float | None
    limit: float


def plan_step(
    owned: list[Tensor],
    clip: Clip,
    scale: LossScale | None,
    *,
    mesh: Mesh,
    device: torch.device,
    sharded: bool,
    experts: Sequence[Tensor] = (),
) -> Plan:
    """Norm over the whole model and the factor that unscales and clips. Collective over the world.

    Args:
        owned: reduced gradients (or parts of them) that this rank counts in the norm.
        sharded: whether `owned` is cut over the data axis (then it is summed over it too).
        experts: the same for what is replicated over "edp", and cut over it when `sharded`.
        scale: gradients are `scale.value` times too large; None for 1. With a scale the finiteness of the norm is
            read on the host once: it is the same number on every rank, so all of them decide alike.
    """
    total, of_experts = local_grad_norm_sq(owned, device), local_grad_norm_sq(list(experts), device)
    if sharded:
        total += of_experts
        mesh["data"].all_reduce(total)
    else:
        if mesh.layout.experts_apart:
            if mesh.index("edp"):
                of_experts.zero_()  # a replica of what the first rank of "edp" counts
            mesh["data"].all_reduce(of_experts)
        total += of_experts
    mesh["model"].all_reduce(total)
    norm = total.sqrt()
    unscale = 1.0
    if scale is not None:
        unscale = 1.0 / scale.value
        norm = norm * unscale
        if not torch.isfinite(norm):
            return Plan(norm, True, None, 0.0)
    if clip.value <= 0:
        return Plan(norm, False, unscale if unscale != 1.0 else None, 0.0)
    if clip.algorithm == "value":
        return Plan(norm, False, unscale if unscale != 1.0 else None, clip.value)
    return Plan(norm, False, torch.clamp(clip.value / (norm + EPSILON), max=1.0) * unscale, 0.0)


def apply_plan(grads: list[Tensor], plan: Plan) -> None:
    """Unscale and clip `grads` in place."""
    for grad in grads:
        if plan.factor is not None:
            grad.mul_(plan.factor)  # a 0-dim tensor does not change the dtype of `grad`
        if plan.limit:
            grad.clamp_(-plan.limit, plan.limit)
