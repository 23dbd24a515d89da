"""Sequences that are cut: steps of many kinds give the loss and gradients of one process; results are whole; what
cannot be followed is refused.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from parallax import ParallaxStrategy
from parallax.strategies.verify.given import Given
from tests.procs import run_ranks
from tests.ranks.context_cases import CASES, Case, reference

FOUR = ("cp4 all_gather", "cp4 hybrid inner2", "cp4 ulysses contiguous", "cp4 ring contiguous")
LAYOUTS = {name: {2: "cp2 ring", 4: FOUR[i % len(FOUR)]} for i, name in enumerate(CASES)}
"""Case -> ranks -> layout: methods and orders take turns."""


class Lit(LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.step = case.model().train(), case.step

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.step(self.model, batch)
        self.log("loss", loss)
        self.log("perplexity", loss.detach().exp())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Grads(Callback):
    """The gradients of the one step, and its loss."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        data = trainer.strategy.engine.data
        names = [n for n, p in module.named_parameters() if p.requires_grad]
        self.grads = {n.removeprefix("model."): g.clone() for n in names if (g := data.full_grad(n)) is not None}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.loss = float(outputs["loss"])


def trainer(rank: int, world: int, layout: str, **options: Any) -> Trainer:
    strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world), **options.pop("plans", {}))
    options = {"use_distributed_sampler": False, **options}
    return Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def loader(batch: Any) -> DataLoader[Any]:
    return DataLoader([batch], batch_size=None)  # type: ignore[arg-type]


def one_step(rank: int, world: int, layout: str, case: Case) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    seen = Grads()
    t = trainer(rank, world, layout, callbacks=[seen])
    t.fit(Lit(case), loader(case.batch()))
    logged = {name: float(value) for name, value in t.callback_metrics.items()}
    t.strategy.close()  # type: ignore[attr-defined]
    return seen.loss, seen.grads, logged


def all_cases(rank: int, world: int) -> Any:
    return {name: one_step(rank, world, LAYOUTS[name][world], case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def runs() -> Any:
    return {n: run_ranks(n, all_cases, timeout=170) for n in (2, 4)}


@pytest.mark.limit(240)
@pytest.mark.parametrize("name", list(CASES))
def test_step_is_that_of_one_process(name: str, runs: Any) -> None:
    case = CASES[name]
    loss, grads = reference(case)
    largest = max(float(g.abs().max()) for g in grads.values())
    for n, layout in LAYOUTS[name].items():
        for got_loss, got, logged in (rank[name] for rank in runs[n]):
            assert got_loss == pytest.approx(loss, rel=case.tolerance), layout
            assert logged["loss"] == pytest.approx(loss, rel=case.tolerance)
            if name not in ("regression", "auxiliary"):  # a mean of exponentials is not the exponential of a mean
                assert logged["perplexity"] == pytest.approx(math.exp(loss), rel=10 * case.tolerance)
            assert got.keys() == grads.keys()
            for parameter, grad in grads.items():
                scale = max(float(grad.abs().max()), 1e-3 * largest)
                error = float((got[parameter] - grad).abs().max()) / scale
                assert error < case.tolerance, f"{layout}: gradient of {parameter} is off by {error:.1e}"
