"""Replica sentinels name what has drifted, where and since when; the traffic logger logs what the ledger counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from parallax import ParallaxStrategy, ReplicaDrift, ReplicaSentinel, TrafficLogger
from parallax.strategies.mesh import coordinates
from parallax.strategies.verify.given import Given
from tests.parity.harness import Lit, loader
from tests.procs import run_ranks


class Corrupt(Callback):
    """Changes one number on a rank after step 2, as a bad memory cell would: of a weight, or with `state` of what the
    optimizer keeps for it, or without a name of the batch."""

    def __init__(self, name: str, rank: int, state: str) -> None:
        self._name, self._rank, self._state = name, rank, state

    def _now(self, trainer: Any) -> bool:
        return bool(trainer.global_step == 2 and trainer.strategy.mesh.rank == self._rank)

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self._now(trainer) and self._name:
            param = dict(module.named_parameters())[self._name]
            with torch.no_grad():
                (optimizer.state[param][self._state] if self._state else param).view(-1)[0] += 1e-3

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self._now(trainer) and not self._name:
            batch["ids"][0, 0] ^= 1


def watched(rank: int, world: int, layout: str, name: str | None, model: str = "plain", state: str = "") -> Any:
    strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world))
    callbacks: list[Callback] = [ReplicaSentinel(every=1)]
    if name is not None:
        callbacks.insert(0, Corrupt(name, world - 1, state))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_steps=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, callbacks=callbacks,
    )  # fmt: skip
    module = Lit(model, torch.float32)
    sizes = strategy.requested_layout.resolve(world).axis_sizes()
    try:
        trainer.fit(module, loader(model, sizes["dp"], coordinates(rank, sizes)["dp"]))
    except ReplicaDrift as error:
        return str(error)
    return trainer.global_step


def cases(rank: int, world: int) -> list[Any]:
    return [
        watched(rank, world, "dp2", None),
        watched(rank, world, "tp2 sp0", None),
        watched(rank, world, "dp2 zero1", None),
        watched(rank, world, "dp2", "model.layers.1.up.weight"),
        watched(rank, world, "tp2 sp0", "model.layers.0.norm1.weight"),
        watched(rank, world, "dp2", "model.layers.1.up.weight", state="exp_avg"),
        watched(rank, world, "tp2 sp0", ""),
        watched(rank, world, "pp2", "model.lm_head.weight", model="gpt2"),
    ]


@pytest.mark.limit(120)
def test_drift_is_named_with_ranks_and_steps() -> None:
    for found in run_ranks(2, cases, timeout=100):
        assert found[:3] == [4, 4, 4]
        for text, name, group in (
            (found[3], "model.layers.1.up.weight", "data"),
            (found[4], "model.layers.0.norm1.weight", "tp"),
            (found[5], "model.layers.1.up.weight (exp_avg)", "data"),
            (found[6], "batch tensor 0", "model"),
            (found[7], "tied weight of shape (61, 32)", "tie"),
        ):
            assert f"{name} on rank(s) [1] from rank 0 (group '{group}')" in text
            assert "(they agreed after step 2)" in text or "(they agreed after step 1)" in text


def logged(rank: int, world: int, folder: str) -> Any:
    strategy = ParallaxStrategy("dp2", cluster_environment=Given(rank, world))
    logger = CSVLogger(folder)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_steps=2, logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[TrafficLogger(every=1)],
    )  # fmt: skip
    module = Lit("plain", torch.float32)
    trainer.fit(module, loader("plain", 2, rank))
    params = list(module.parameters())
    return sum(p.numel() for p in params), len(params)


@pytest.mark.limit(60)
def test_bytes_per_step_are_logged(tmp_path: Any) -> None:
    elements, tensors = run_ranks(2, logged, str(tmp_path), timeout=50)[0]
    table = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    column = table[0].split(",").index("bytes/data")
    values = [float(row.split(",")[column]) for row in table[1:] if row.split(",")[column]]
    # the gradients, one number per parameter, the count of valid tokens, and the loss that is logged with sync_dist
    assert values == [(elements + tensors) * 4 + 8 + 4] * 2


def test_a_sentinel_looks_at_least_every_step() -> None:
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        ReplicaSentinel(every=0)
