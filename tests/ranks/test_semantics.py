"""A Trainer at a layout does what a Trainer in one process does: same values, same hooks, in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from parallax import ParallaxStrategy
from parallax.strategies.layout import Layout
from parallax.strategies.verify.given import Given
from tests.procs import run_ranks
from tests.ranks.semantics_cases import AVERAGING, BATCH, SCENARIOS

COMMON = {
    "accelerator": "cpu",
    "precision": "64-true",
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
}


def plain_rank(rank: int, world: int, folder: str) -> Any:
    def make(**options: Any) -> Trainer:
        return Trainer(devices=1, **{**COMMON, **options})

    torch.set_num_threads(1)
    return {name: scenario(make, BATCH, f"{folder}/plain-{name}") for name, scenario in SCENARIOS.items()}


def layout_rank(rank: int, world: int, folder: str, layout: str) -> Any:
    strategies: list[ParallaxStrategy] = []

    def make(**options: Any) -> Trainer:
        strategies.append(ParallaxStrategy(layout, cluster_environment=Given(rank, world)))
        return Trainer(strategy=strategies[-1], devices=world, **{**COMMON, **options})

    dp = Layout.parse(layout).data_parallel_size or 1
    out = {}
    for name, scenario in SCENARIOS.items():
        if Layout.parse(layout).shards_weights and name in AVERAGING:
            continue
        out[name] = scenario(make, BATCH // dp, f"{folder}/{layout.replace(' ', '_')}-{name}")
        strategies[-1].close()
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory: Any) -> Any:
    return run_ranks(1, plain_rank, str(tmp_path_factory.mktemp("plain")), timeout=100)[0]


def compare(got: Any, want: Any, where: str) -> None:
    """Equal in structure; numbers to 1e-9, values that passed through torchmetrics' fp32 states to 1e-6."""
    if isinstance(want, dict):
        assert list(got) == list(want), f"{where}: {list(got)}, expected {list(want)}"
        for key in want:
            compare(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{where}: {got}, expected {want}"
        for at, (g, w) in enumerate(zip(got, want, strict=True)):
            compare(g, w, f"{where}[{at}]")
    elif isinstance(want, Tensor):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda m: f"{where}: {m}")
    elif isinstance(want, float):
        single = any(word in where for word in ("val_mean", "accuracy", "f1", "recall"))
        assert got == pytest.approx(want, rel=1e-6 if single else 1e-9), where
    else:
        assert got == want, where


@pytest.mark.parametrize(
    "layout", ["pp2 mb4 stage zb_v", "pp2 dp2 zero2 mb2", "pp2 tp2 mb2", "pp2 dp2 zero3", "tp2 dp2 fsdp"]
)
def test_as_in_one_process(layout: str, plain: Any, tmp_path: Path) -> None:
    world = 2 if layout.startswith("pp2 mb4") else 4
    for rank, got in enumerate(run_ranks(world, layout_rank, str(tmp_path), layout, timeout=200)):
        compare(got, {name: plain[name] for name in got}, f"rank {rank}")
