"""Lightning's callbacks that read or change parameters.

It is: which of them work at a layout, why the others do not, and what those that copied the module before it was cut
need. It is not: callbacks that only look at logged values, which need nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from parallax.strategies.layout import Layout

AVERAGING = (WeightAveraging, StochasticWeightAveraging)


def check(callbacks: Sequence[Callback], module: nn.Module, *, layout: Layout, resumes: bool) -> None:
    """Refuse callbacks that would go wrong silently.

    Args:
        callbacks: the Trainer's.
        module: the user's LightningModule.
        layout: what shards weights, if anything.
        resumes: whether training starts from a checkpoint.

    Raises:
        ValueError: naming the callback, the reason and what to do instead.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, AVERAGING) and layout.shards_weights:
            sharding = "data_engine='fsdp'" if layout.data_engine == "fsdp" else "zero_stage=3"
            raise ValueError(
                f"{name} averages whole parameters, but with {sharding} a rank holds only its share of each between "
                f"steps; use zero_stage=2 or less by DeepSpeed, or remove the callback"
            )
        if isinstance(callback, StochasticWeightAveraging):
            if resumes:
                raise ValueError(
                    f"{name} cannot resume from a checkpoint here: Lightning restores its scheduler only under "
                    f"strategies that load checkpoints before set-up; use WeightAveraging instead"
                )
            if any(isinstance(m, _BatchNorm) for m in module.modules()):
                raise ValueError(
                    f"{name} ends with an epoch without backward to renew the statistics of BatchNorm layers, but "
                    f"Parallax runs backward inside the step; use WeightAveraging, or a model without BatchNorm"
                )
        if isinstance(callback, BaseFinetuning):
            raise ValueError(
                f"{name} unfreezes parameters while training, but which parameters train is fixed at set-up (gradient "
                f"buffers and ZeRO's shards are made for them); train in two fits, or give the backbone a parameter "
                f"group whose learning rate starts at 0"
            )
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{name} replaces parameters by masked ones, whose names and shapes no layout, checkpoint or optimizer "
                f"here would know; prune the trained model in one process"
            )


def copy_again(callbacks: Sequence[Any], module: Any) -> None:
    """Let callbacks that copied the whole module at their set-up hold a copy of this rank's part instead.

    Averages of weights are element-wise, so that each rank averages what it holds.
    """
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            device = callback._device or module.device
            kept: Any = {"use_buffers": callback._use_buffers, **callback._kwargs}
            callback._average_model = AveragedModel(module, device=device, **kept)
        elif isinstance(callback, StochasticWeightAveraging):
            callback._average_model = deepcopy(module)
