"""Train an unmodified Hugging Face Llama on real text, split over processes by one line: the strategy.

    mpirun -n 8 python examples/train_llama.py layout=tp2_pp2_dp2_zero1
    torchrun --nproc-per-node 8 examples/train_llama.py data.path=$HOME/texts
    python examples/train_llama.py                        # one process
    python examples/train_llama.py trainer.devices=8      # Lightning starts the other seven

Every `name=value` changes the files in `conf/` (see conf/train_llama.yaml). It writes a loss plot, a metrics file and
a checkpoint. Nothing in `LitLlama` knows of parallelism.
"""

from __future__ import annotations

import math
import sys
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf
from torch import Tensor

import parallax
import parallax.conf
from parallax.plugins.launch import same_on_every_rank
from parallax.plugins.launch.detect import launched_rank
from parallax.strategies.layout import Layout
from reporting import TokensPerSecond, plot_losses
from text_data import TextData

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as missing:
    with same_on_every_rank():
        raise ValueError("this example needs transformers: pip install 'lightning-parallax[hf]'") from missing


class LitLlama(L.LightningModule):
    """A causal language model with AdamW and a warm-up, then cosine, learning rate.

    Args:
        model: keyword arguments of `LlamaConfig`.
        optim: lr, min_lr_ratio, warmup_steps, weight_decay, betas.
    """

    def __init__(self, model: dict[str, Any], optim: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: LlamaForCausalLM | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = LlamaForCausalLM(LlamaConfig(**self.hparams["model"]))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        conf = self.hparams["optim"]
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=conf["lr"], betas=tuple(conf["betas"]), weight_decay=conf["weight_decay"]
        )
        warmup, total = conf["warmup_steps"], max(self.trainer.max_steps, conf["warmup_steps"] + 1)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            done = min(1.0, (step - warmup) / (total - warmup))
            return conf["min_lr_ratio"] + (1 - conf["min_lr_ratio"]) * 0.5 * (1 + math.cos(math.pi * done))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def read_conf(overrides: list[str]) -> dict[str, Any]:
    """conf/train_llama.yaml changed by `overrides` from the command line. No folder is changed or made."""
    with initialize_config_dir(str(Path(parallax.conf.__file__).resolve().parent), version_base="1.3"):
        conf = OmegaConf.to_container(compose("train_llama", overrides=overrides), resolve=True)
    assert isinstance(conf, dict)
    return {str(key): value for key, value in conf.items()}


def count_processes(trainer: dict[str, Any]) -> int:
    """Processes of the whole job: as the launcher says, else as `trainer` says, else one a GPU, else 1."""
    _, launched = launched_rank() or (0, None)
    devices = trainer["devices"]
    if devices == "auto":
        devices = 1 if trainer["accelerator"] == "cpu" else max(1, torch.cuda.device_count())
    return launched or int(devices * trainer["num_nodes"])


def choose_layout(conf: dict[str, Any], processes: int) -> Layout:
    """The layout `conf` spells out; for `auto: true`, tp2 x pp2 where it fits, and data parallel over the rest."""
    if not conf.get("auto"):
        return Layout.from_any(conf)
    model = 4 if processes % 4 == 0 else 1
    words = ["tp2 pp2 mb4"] if model == 4 else []
    words += ["zero1"] if processes > model else []
    return Layout.parse(" ".join(words))


def main(overrides: list[str]) -> None:
    """Train as `conf/` and `overrides` say."""
    warnings.filterwarnings("ignore", ".*LeafSpec")  # lightning 2.6 calls a function that torch 2.13 has renamed
    conf = read_conf(overrides)
    L.seed_everything(conf["seed"], verbose=False)
    layout = choose_layout(conf["layout"], count_processes(conf["trainer"]))
    parallax.register_strategies(layout=layout)  # what strategy="parallax_4d" stands for below
    out = Path(conf["output_dir"] or f"outputs/train_llama/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    best = ModelCheckpoint(out / "checkpoints", "step{step}", monitor="val_loss", auto_insert_metric_name=False)
    trainer = L.Trainer(
        **conf["trainer"],
        strategy="parallax_4d",
        logger=CSVLogger(out, name="", version=""),
        callbacks=[
            TokensPerSecond(conf["data"]["global_batch_size"] * conf["data"]["seq_len"]),
            LearningRateMonitor("step"),
            best,
            TQDMProgressBar(refresh_rate=5),
        ],
        check_val_every_n_epoch=None,  # validate by steps, not by epochs
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    trainer.fit(LitLlama(conf["model"], conf["optim"]), datamodule=TextData(**conf["data"]))
    if trainer.is_global_zero:
        text = conf["data"]["path"] or "Python's standard library"
        title = f"Llama on {text}, layout {layout.resolve(trainer.world_size)}"
        plot_losses(out / "metrics.csv", out / "loss.png", title)
        print(f"\nloss plot   {out / 'loss.png'}\nmetrics     {out / 'metrics.csv'}")
        print(f"checkpoint  {out / 'checkpoints' / Path(best.best_model_path).name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
