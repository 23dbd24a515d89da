"""User mistakes a strategy can see before anything is changed or hangs.

It is: checks on the module and its optimizers. It is not: checks of a layout (`layout.py`) or of a model against a
layout (the plugins' `check`), or the way an error comes to all ranks (`agreement.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import LBFGS, Optimizer

from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh

PART = "_parallax_part_of"
"""The attribute of a module that is one rank's part: of which layout."""


def check(module: LightningModule, *, training: bool, fresh: bool) -> None:
    """Refuse a module that Parallax cannot train, or one new to this strategy that is a part already.

    Raises:
        ValueError: with the change that fixes it.
    """
    if fresh:
        _check_whole(module)
    if not training:
        return
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} uses manual optimization (automatic_optimization=False); Parallax runs backward "
            f"and the optimizer step itself, so set automatic_optimization=True and return the loss from training_step"
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__}.backward is overridden, but Parallax runs backward inside the pipeline schedule; "
            f"remove it and put what it changes into the loss"
        )


def _check_whole(module: LightningModule) -> None:
    """Refuse a module that another strategy has made its rank's part: what is cut twice is no model any more."""
    layout: Layout | None = vars(module).get(PART)
    if layout is None or any(p.is_meta for p in module.parameters()):  # built anew by `configure_model`
        return
    name = type(module).__name__
    fix = f"a new {name}, with the weights of a checkpoint (ckpt_path=...)"
    if not _is_cut(layout):
        fix = f"the {name} after trainer.strategy.close() of the first"
    raise ValueError(
        f"this {name} is the part of one rank of {str(layout)!r} since another Trainer ran it; call fit, validate, "
        f"test and predict of one Trainer, or give the second {fix}"
    )


def mark_part(module: LightningModule, layout: Layout) -> None:
    """`module` is one rank's part of `layout` from now on."""
    if _is_cut(layout) or layout.shards_weights:
        vars(module)[PART] = layout


def mark_whole(module: nn.Module) -> None:
    """What can be taken back of `mark_part` has been: only a module that is cut stays a part."""
    layout: Layout | None = vars(module).get(PART)
    if layout is not None and not _is_cut(layout):
        del vars(module)[PART]


def _is_cut(layout: Layout) -> bool:
    """Whether a rank's parameters are others than the model's, for good."""
    return max(layout.pipeline_parallel_size, layout.tensor_parallel_size, layout.expert_parallel_size) > 1


@contextmanager
def explained(module: LightningModule, mesh: Mesh) -> Iterator[None]:
    """Around `configure_optimizers`: what Lightning and torch say there does not fit or does not help here.

    Raises:
        ValueError: several optimizers; an optimizer without parameters on this pipeline stage.
    """
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" in str(error):  # its advice is manual optimization
            raise _several(module, "several") from None
        raise
    except ValueError as error:
        if mesh.size("pp") > 1 and "empty parameter list" in str(error):
            raise ValueError(
                f"{type(module).__name__}.configure_optimizers gives the optimizer no parameter of pipeline stage "
                f"{mesh.index('pp')}, where other layers live; let it train at least one parameter of each of the "
                f"{mesh.size('pp')} stages, or use pipeline_parallel_size=1"
            ) from None
        raise


def check_optimizers(module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
    """Exactly one optimizer, of a kind whose step is one update from one gradient."""
    if len(optimizers) != 1:
        raise _several(module, str(len(optimizers) or "no"))
    if isinstance(optimizers[0], LBFGS):
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers returned LBFGS, which evaluates the loss several times a "
            f"step; Parallax does not support that, use AdamW or SGD"
        )


def _several(module: LightningModule, count: str) -> ValueError:
    return ValueError(
        f"{type(module).__name__}.configure_optimizers returned {count} optimizers; Parallax trains with exactly one. "
        f"Give one optimizer several parameter groups instead, e.g. AdamW([{{'params': ..., 'lr': ...}}, ...])"
    )
