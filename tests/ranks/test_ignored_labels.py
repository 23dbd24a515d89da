"""A micro-batch, or a whole data rank, whose labels are all ignored: one process's step, and no nan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from parallax import ParallaxStrategy
from parallax.strategies.mesh import coordinates
from parallax.strategies.verify.given import Given
from tests.parity.harness import Lit
from tests.parity.models import BATCH, build, plain_loss, samples
from tests.procs import run_ranks


class Steep(Lit):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def batch() -> dict[str, Tensor]:
    """Half of the rows have no target at all."""
    found = samples("plain", steps=1)[0]
    found["labels"][: BATCH // 2] = -100
    return found


def ignoring_rank(rank: int, world: int, layout: str) -> Any:
    strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_steps=1, precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    sizes = strategy.requested_layout.resolve(world).axis_sizes()
    each = BATCH // sizes["dp"]
    first = coordinates(rank, sizes)["dp"] * each
    rows = [{k: v[i] for k, v in batch().items()} for i in range(first, first + each)]
    module = Steep("plain", torch.float64)
    trainer.fit(module, DataLoader(rows, batch_size=each))  # type: ignore[arg-type]
    weights = {n: strategy.engine.data.full_param(n).detach().clone() for n, _ in module.named_parameters()}
    loss = float(trainer.callback_metrics["train_loss"])
    strategy.close()
    return loss, weights


@pytest.mark.parametrize("layout", ["pp2 mb2", "dp2 zero2", "dp2"])
def test_ignored_micro_batches_equal_one_process(layout: str) -> None:
    model = build("plain", torch.float64)
    loss = plain_loss(model, batch())
    loss.backward()
    want = {n: (p - 0.5 * p.grad).detach() for n, p in model.named_parameters()}  # type: ignore[operator]
    for got, weights in run_ranks(2, ignoring_rank, layout, timeout=60):
        if layout.startswith("pp2"):
            assert got == pytest.approx(float(loss.detach()), rel=1e-9)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, want[name.removeprefix("model.")], rtol=1e-9, atol=1e-12)
