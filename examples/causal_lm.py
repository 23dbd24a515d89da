"""The LightningModule of the examples: any causal language model that a configuration describes.

It is: an ordinary LightningModule; nothing in it knows of parallelism. It is not: the model (`parallax.conf.models`
builds it) or the data (`text_data.py`).
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from torch import Tensor

from parallax.conf.models import build_model
from parallax.conf.schema import ModelConf, OptimConf


class CausalLM(L.LightningModule):
    """A causal language model with AdamW and a warm-up, then cosine, learning rate.

    Args:
        model: which model.
        optim: learning rate and the rest.
    """

    def __init__(self, model: ModelConf, optim: OptimConf) -> None:
        super().__init__()
        self.save_hyperparameters({"model": asdict(model), "optim": asdict(optim)})
        self.conf, self.optim = model, optim
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build_model(self.conf)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        conf = self.optim
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=conf.lr, betas=(conf.betas[0], conf.betas[1]), weight_decay=conf.weight_decay
        )
        warmup, total = conf.warmup_steps, max(self.trainer.max_steps, conf.warmup_steps + 1)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            done = min(1.0, (step - warmup) / (total - warmup))
            return conf.min_lr_ratio + (1 - conf.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
