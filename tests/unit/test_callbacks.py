"""Callbacks that read or change parameters: refused where they would go wrong silently, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from torch import nn

from parallax.strategies import callbacks
from parallax.strategies.layout import Layout


def _check(callback: Any, module: Any = None, **options: Any) -> None:
    callbacks.check([callback], module or nn.Linear(2, 2), **{"layout": Layout(), "resumes": False, **options})


@pytest.mark.parametrize("kind", [WeightAveraging, StochasticWeightAveraging])
def test_averages_of_weights_are_refused_where_no_rank_holds_them(kind: Any) -> None:
    callback = kind() if kind is WeightAveraging else kind(swa_lrs=0.1)
    for stage in (0, 1, 2):
        _check(callback, layout=Layout(zero_stage=stage))
    for layout, why in (("zero3", "zero_stage=3"), ("zero2 fsdp", "data_engine='fsdp'")):
        with pytest.raises(ValueError, match=f"{kind.__name__} .*{why} .*share.*use zero_stage=2 or less"):
            _check(callback, layout=Layout.parse(layout))


def test_stochastic_averaging_is_refused_where_it_would_do_something_else() -> None:
    callback = StochasticWeightAveraging(swa_lrs=0.1)
    with pytest.raises(ValueError, match="resume.*use WeightAveraging"):
        _check(callback, resumes=True)
    with pytest.raises(ValueError, match="BatchNorm.*use WeightAveraging"):
        _check(callback, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


@pytest.mark.parametrize(
    ("callback", "match"),
    [
        (BackboneFinetuning(), "BackboneFinetuning unfreezes parameters.*two fits"),
        (ModelPruning("l1_unstructured", amount=0.5), "ModelPruning replaces parameters.*one process"),
    ],
)
def test_callbacks_that_change_which_parameters_there_are_are_refused(callback: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _check(callback)


def test_other_callbacks_pass() -> None:
    for callback in (ModelCheckpoint(), EarlyStopping("loss"), LearningRateMonitor(), Timer()):
        _check(callback, layout=Layout.parse("zero3"), resumes=True)
