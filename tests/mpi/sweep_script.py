"""The example's script, with seeds that make a run fail on purpose: a sweep's tests run it.

Seed 13: rank 1 raises; 14: rank 1 is killed; 15: rank 1 waits for longer than any test; 16: rank 0 finds no memory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hydra
import lightning as L
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_llama
from parallax.conf import CONF_DIR
from parallax.conf.hydra_app import run_hydra
from parallax.conf.reading import read


class Fail(L.Callback):
    """Does what the seed says at the second step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        if index != 1:
            return
        if trainer.global_rank == 1 and self.seed == 13:
            raise RuntimeError("on purpose")
        if trainer.global_rank == 1 and self.seed == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_rank == 1 and self.seed == 15:
            time.sleep(300)
        if trainer.global_rank == 0 and self.seed == 16:
            raise MemoryError("on purpose")


@hydra.main(version_base="1.3", config_path=CONF_DIR, config_name="train_llama")
def main(config: DictConfig) -> None:
    conf = read(config)
    made = train_llama.callbacks
    train_llama.callbacks = lambda *given: [*made(*given), Fail(conf.seed)]
    train_llama.train(conf)


if __name__ == "__main__":
    run_hydra(main)
