"""Models built in `configure_model`: the same first weights at every layout, and pretrained weights read in slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from parallax import ParallaxStrategy
from parallax.strategies.verify.given import Given
from tests.parity.harness import loader, whole
from tests.parity.models import BUILD
from tests.procs import run_ranks

LAYOUTS = {1: ["dp1"], 4: ["tp2 pp2", "pp2 dp2 zero3", "tp4", "dp4 zero1", "tp2 dp2 fsdp"]}


class Lit(LightningModule):
    """Builds its model where Lightning recommends it; a learning rate of 0 keeps the first weights."""

    def __init__(self, name: str, folder: str = "") -> None:
        super().__init__()
        self.kind, self.folder = name, folder

    def configure_model(self) -> None:
        if self.folder:
            from transformers import AutoModelForCausalLM

            self.model = AutoModelForCausalLM.from_pretrained(self.folder).train()
        else:
            self.model = BUILD[self.kind][0]()

    def training_step(self, batch: Any, index: int) -> Tensor:
        return BUILD[self.kind][1](self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def first_weights(rank: int, world: int, names: list[str], folders: dict[str, str]) -> Any:
    out = {}
    for name in names:
        for layout in LAYOUTS[world]:
            torch.manual_seed(99 + 0 * rank)
            strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world))
            trainer = Trainer(
                strategy=strategy, accelerator="cpu", devices=world, max_steps=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                use_distributed_sampler=False,
            )  # fmt: skip
            module = Lit(name, folders.get(name, ""))
            trainer.fit(module, loader(name))
            params = [n for n, _ in module.named_parameters()]
            values = {n: strategy.engine.data.full_param(n).detach().clone() for n in params}
            out[name, layout] = values, {n: strategy.shard_of(n) for n in params}
            strategy.close()
    return out


@pytest.mark.limit(200)
def test_the_same_at_every_layout() -> None:
    names = ["llama", "gpt2", "plain"]
    single = run_ranks(1, first_weights, names, {}, timeout=60)[0]
    ranks = run_ranks(4, first_weights, names, {}, timeout=120)
    for name in names:
        want = {n.removeprefix("model."): t for n, t in single[name, "dp1"][0].items()}
        spread = max(float(t.std()) for t in want.values() if t.dim() > 1)
        assert spread > 0.01, "weights must be random for the test to mean anything"
        for layout in LAYOUTS[4]:
            got = whole([rank[name, layout] for rank in ranks], want)
            for fqn, tensor in want.items():
                assert torch.equal(got[fqn], tensor), f"{fqn} of {name} at {layout}"


@pytest.mark.limit(200)
def test_pretrained_weights_arrive_whole(tmp_path: Path) -> None:
    want, folders = {}, {}
    for name in ("llama", "gpt2"):
        torch.manual_seed(7)
        model: Any = BUILD[name][0]()
        model.save_pretrained(tmp_path / name)
        folders[name] = str(tmp_path / name)
        want[name] = {n: p.detach().clone() for n, p in model.named_parameters()}
    ranks = run_ranks(4, first_weights, list(folders), folders, timeout=120)
    for name in folders:
        for layout in LAYOUTS[4]:
            got = whole([rank[name, layout] for rank in ranks], want[name])
            for fqn, tensor in want[name].items():
                assert torch.equal(got[fqn], tensor), f"{fqn} of {name} at {layout}"
