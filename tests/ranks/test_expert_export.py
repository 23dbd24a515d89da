"""The whole state dict put together from ranks that hold some experts each equals that of one process, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from parallax import ParallaxStrategy
from parallax.strategies.mesh import coordinates
from parallax.strategies.verify.given import Given
from tests.parity.harness import Lit, loader
from tests.procs import run_ranks

CASES = {"mixtral": "tp2 dp2 ep4 etp1", "deepseek_v3": "pp2 dp2 ep2 zero2 mb2", "gpt_oss": "tp2 dp2 ep2 zero3"}


class Export(Callback):
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.held = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found = trainer.strategy.whole_state_dict()
        self.held = sum(getattr(p, "ds_numel", p.numel()) for n, p in pl_module.named_parameters() if "experts." in n)


def run(rank: int, world: int) -> list[Any]:
    out = []
    for model, layout in CASES.items():
        export = Export()
        strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world))
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", devices=world, max_steps=1, logger=False, callbacks=[export],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )  # fmt: skip
        sizes = strategy.requested_layout.resolve(world).axis_sizes()
        data = loader(model, sizes["dp"], coordinates(rank, sizes)["dp"], steps=1)
        trainer.fit(Lit(model, torch.float32), data)
        strategy.close()
        out.append((export.found, export.held))
    return out


def test_export_gathers_the_experts_of_all_ranks() -> None:
    ranks = run_ranks(4, run, timeout=120)
    for at, model in enumerate(CASES):
        want = Lit(model, torch.float32).state_dict()
        found = ranks[0][at][0]
        assert sorted(found) == sorted(want)
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
        assert not any(rank[at][0] for rank in ranks[1:])
        experts = sum(t.numel() for n, t in want.items() if ".experts." in n)
        assert 0 < ranks[0][at][1] < experts
