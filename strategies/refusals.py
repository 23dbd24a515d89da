"""User mistakes a strategy can see before anything is changed or hangs.

It is: checks on the Trainer, the module and its optimizers. It is not: checks of a layout (`layout.py`) or of
a model against a layout (the plugins' `check`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import LBFGS, Optimizer


def check(trainer: Any, module: Any, *, training: bool) -> None:
    """Refuse what Parallax cannot run. The same on every rank.

    Raises:
        ValueError: with the change that fixes it.
    """
    if not isinstance(module, LightningModule):
        raise ValueError(_wrong_package(type(module)))
    if not training:
        return
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} uses manual optimization (automatic_optimization=False); Parallax runs backward and "
            f"the optimizer step itself, so set automatic_optimization=True and return the loss from training_step"
        )
    if not is_overridden("configure_optimizers", module):
        raise ValueError(f"{type(module).__name__} has no configure_optimizers; return one optimizer from it")
    if is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__}.backward is overridden, but Parallax runs backward inside the pipeline schedule; "
            f"remove it and put what it changes into the loss"
        )
    if is_overridden("configure_gradient_clipping", module) and trainer.gradient_clip_val is None:
        return


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Exactly one optimizer, of a kind whose step is one update from one gradient."""
    if len(optimizers) != 1:
        raise ValueError(
            f"configure_optimizers returned {len(optimizers)} optimizers; Parallax trains with exactly one. Give one "
            f"optimizer several parameter groups instead"
        )
    if isinstance(optimizers[0], LBFGS):
        raise ValueError("LBFGS evaluates the loss several times a step, which Parallax does not support; use AdamW or SGD")


def _wrong_package(kind: type) -> str:
    other = any(base.__module__.startswith("pytorch_lightning") for base in kind.__mro__)
    if other or "pytorch_lightning" in sys.modules:
        return (
            f"{kind.__name__} comes from the package pytorch_lightning, whose classes and registry are separate; Parallax "
            f"works with the package lightning: use `import lightning.pytorch as pl`"
        )
    return f"{kind.__name__} is not a LightningModule"
