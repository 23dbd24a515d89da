"""What a run prints when it starts, with Lightning's defaults: whole sizes, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from parallax import ParallaxStrategy
from parallax.strategies.verify.given import Given
from tests.parity.harness import Lit, loader
from tests.parity.models import build
from tests.procs import run_ranks


def start(rank: int, world: int, layout: str) -> None:
    strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Lit("gpt2", torch.float32), loader("gpt2"))
    strategy.close()


@pytest.mark.parametrize("layout", ["tp2 pp2", "dp4 zero3", "pp2 dp2 zero2"])
def test_the_whole_model_is_counted_once(layout: str) -> None:
    printed: list[str] = []
    run_ranks(4, start, layout, timeout=100, outputs=printed)
    # 61 is odd: tp pads the vocabulary, and the head is tied to the embedding, on another stage under pp
    whole = sum(p.numel() for p in build("gpt2", torch.float32).parameters())
    assert printed[0].count(f"{whole / 1000:.1f}k parameters in the whole model") == 1
    assert all("parameters in the whole model" not in text for text in printed[1:])
    if layout == "dp4 zero3":
        summary: Any = [line for line in printed[0].splitlines() if line.startswith("Total params:")]
        assert summary and summary[0].split()[2:4] == [f"{whole / 1000:.1f}", "K"]
