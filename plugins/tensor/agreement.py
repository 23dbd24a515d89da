"""One-time checks that the ranks of the axis agree on what must be the same on all of them.

It is: the detection of uncut parameters that work on cut activations without the plan saying so (their gradients are
partial and the copies drift apart), and of ranks with different random numbers. It is not: a check of every step: it
runs once, and adds no bytes to any later step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallax.strategies.comm import AxisComm
from parallax.strategies.fingerprint import fingerprint

TOLERANCE = 1e-2
"""Allowed difference relative to the norm: far above any rounding, far below what a partial gradient misses."""


def require_agreement(grads: dict[str, Tensor], comm: AxisComm) -> bool:
    """Compare the gradients of whole parameters over `comm`, by FQN.

    Returns:
        Whether the question is settled: False when a gradient is not finite. The same on every rank.

    Raises:
        ValueError: names the parameters that differ and what to change; the same on every rank.
    """
    everyone = comm.gather_objects({fqn: fingerprint(grad) for fqn, grad in grads.items()})
    shared = [fqn for fqn in everyone[0] if all(fqn in other for other in everyone)]
    numbers = torch.tensor([[other[fqn] for fqn in shared] for other in everyone], dtype=torch.float64)
    if not bool(torch.isfinite(numbers).all()):
        return False
    if not shared:
        return True
    spread = (numbers.amax(0) - numbers.amin(0)).amax(-1)
    differ = [f for f, far in zip(shared, (spread > TOLERANCE * numbers[..., 0].amax(0)).tolist(), strict=True) if far]
    if not differ:
        return True
    names = ", ".join(differ[:5]) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")
    raise ValueError(
        f"{len(differ)} of {len(shared)} uncut parameters got different gradients on the ranks of axis "
        f"{comm.axis!r}: {names}. If only few are named, they work on cut activations: give their modules the style "
        "'replicated_with_grad_allreduce' in the plan. If most are, the ranks of one tensor-parallel group drew "
        "different random numbers (dropout): seed them alike"
    )
