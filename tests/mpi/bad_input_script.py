"""A user's script with a mistake, as launchers run it: `bad_input_script.py CASE FOLDER`; it does not import parallax.

FOLDER only marks the processes. It is: an ordinary script. It is not imported by tests.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Lit(LightningModule):
    pp_plan = {"layers": (["x"], ["x"])}

    def __init__(self, returns: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.returns = returns

    def training_step(self, batch: Tensor, index: int) -> Any:
        loss = self.layers(batch).square().mean()
        return loss if self.returns else None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: LightningModule, rows: int = 8, **options: Any) -> Trainer:
    trainer = Trainer(
        strategy="parallax_4d",
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(torch.randn(rows, 4), batch_size=2))  # type: ignore[arg-type]
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = sys.argv[1]
    if case == "no_loss":
        fit(Lit(returns=False))
    elif case == "layout":
        fit(Lit())
    elif case == "loaders":
        done = fit(Lit(), devices=2, use_distributed_sampler=False)
        print(f"trained {done.strategy.mesh.layout} on rank {done.global_rank} of {done.world_size}", flush=True)
        fit(Lit(), rows=8 + 4 * done.global_rank, devices=2, use_distributed_sampler=False)
