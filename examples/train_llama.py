"""Train a Llama (or another model of `conf/model`) on real text, split over processes by one line: the strategy.

    mpirun -n 8 python examples/train_llama.py layout=tp2_pp2_dp2_zero1
    torchrun --nproc-per-node 8 examples/train_llama.py 'layout=tp2 dp4' data.path=$HOME/texts
    python examples/train_llama.py                        # one process
    python examples/train_llama.py trainer.devices=8      # Lightning starts the other seven
    python examples/train_llama.py -m +sweep=layouts_8    # every layout of 8 processes, one after the other

Every `name=value` changes the files in `conf/` (see conf/train_llama.yaml; `python -m parallax config` lists all). It
writes a loss plot, a metrics file, a checkpoint and a record of what it measured. Nothing in `CausalLM` knows of
parallelism.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path

import hydra
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig

import parallax
from causal_lm import CausalLM
from parallax.conf import CONF_DIR
from parallax.conf.hydra_app import run_hydra
from parallax.conf.reading import read
from parallax.conf.schema import RunConf, TrainerConf
from parallax.plugins.launch import same_on_every_rank
from parallax.plugins.launch.detect import launched_rank
from parallax.plugins.sweep.record import RunRecord
from parallax.strategies.layout import Layout
from reporting import TokensPerSecond, plot_losses
from text_data import TextData


def count_processes(trainer: TrainerConf) -> int:
    """Processes of the whole job: as the launcher says, else as `trainer` says, else one a GPU, else 1."""
    _, launched = launched_rank() or (0, None)
    devices = trainer.devices
    if isinstance(devices, str):
        devices = 1 if trainer.accelerator == "cpu" else max(1, torch.cuda.device_count())
    return launched or devices * trainer.num_nodes


def choose_layout(conf: RunConf, processes: int) -> Layout:
    """The layout `conf` spells out; where it says nothing, tp2 x pp2 where it fits, and data parallel over the rest."""
    if conf.layout != Layout():
        return conf.layout
    model = 4 if processes % 4 == 0 else 1
    words = ["tp2 pp2 mb4"] if model == 4 else []
    words += ["zero1"] if processes > model else []
    return Layout.parse(" ".join(words))


def callbacks(conf: RunConf, out: Path) -> list[Callback]:
    """What measures and shows the run; with `save` also what keeps it."""
    tokens = conf.data.global_batch_size * conf.data.seq_len
    made: list[Callback] = [
        TokensPerSecond(tokens),
        RunRecord(out, tokens * conf.trainer.accumulate_grad_batches, model=asdict(conf.model)),
        LearningRateMonitor("step"),
        TQDMProgressBar(refresh_rate=5),
    ]
    if conf.save:
        watched = "val_loss" if conf.trainer.limit_val_batches else "train_loss"
        made.append(ModelCheckpoint(out / "checkpoints", "step{step}", watched, auto_insert_metric_name=False))
    return made


def train(conf: RunConf) -> None:
    """Train as `conf` says."""
    warnings.filterwarnings("ignore", ".*LeafSpec")  # lightning 2.6 calls a function that torch 2.13 has renamed
    L.seed_everything(conf.seed, verbose=False)
    processes = count_processes(conf.trainer)
    with same_on_every_rank():
        if conf.cluster.ranks not in (None, processes):
            raise ValueError(f"cluster.ranks={conf.cluster.ranks}, but this run has {processes} processes")
    out = conf.output_dir or Path(f"outputs/train_llama/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    layout = choose_layout(conf, processes)
    strategy = parallax.ParallaxStrategy(
        layout, timeout=timedelta(seconds=conf.cluster.timeout), reorder_ranks=conf.cluster.reorder_ranks
    )
    options = asdict(conf.trainer)
    trainer = L.Trainer(
        **options.pop("options"),
        **options,
        strategy=strategy,
        logger=CSVLogger(out, name="", version=""),
        callbacks=callbacks(conf, out),
        check_val_every_n_epoch=None,  # validate by steps, not by epochs
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_checkpointing=conf.save,
    )
    trainer.fit(CausalLM(conf.model, conf.optim), datamodule=TextData(**asdict(conf.data)))
    if trainer.is_global_zero and conf.save:
        title = f"{conf.model.family} on {conf.data.path or 'the standard library'}, layout {strategy.mesh.layout}"
        plot_losses(out / "metrics.csv", out / "loss.png", title)
        print(f"\nloss plot   {out / 'loss.png'}\nmetrics     {out / 'metrics.csv'}\nrecord      {out / 'record.json'}")
        best = trainer.checkpoint_callback
        assert isinstance(best, ModelCheckpoint)
        print(f"checkpoint  {out / 'checkpoints' / Path(best.best_model_path).name}", flush=True)


@hydra.main(version_base="1.3", config_path=CONF_DIR, config_name="train_llama")
def main(config: DictConfig) -> None:
    train(read(config))


if __name__ == "__main__":
    run_hydra(main)
