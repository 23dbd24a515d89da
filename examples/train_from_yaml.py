"""The same run without Hydra: plain OmegaConf, and the layout as keywords of the strategy.

    mpirun -n 8 python examples/train_from_yaml.py conf/layout/tp2_dp4_zero1.yaml
    python examples/train_from_yaml.py conf/layout/single.yaml trainer.max_steps=5
"""

from __future__ import annotations

import sys
from dataclasses import asdict

import lightning as L
from omegaconf import OmegaConf

import parallax
from causal_lm import CausalLM
from parallax.conf.reading import read
from text_data import TextData


def main(layout_file: str, changes: list[str]) -> L.Trainer:
    """Train a tiny model at the layout of a YAML file; `changes` are "trainer.max_steps=5" and the like."""
    layout = OmegaConf.load(layout_file)
    strategy = parallax.ParallaxStrategy(**layout)
    conf = read({"trainer": {"accelerator": "cpu", "max_steps": 20, "limit_val_batches": 0}}, *changes)
    L.seed_everything(conf.seed, verbose=False)
    options = asdict(conf.trainer)
    trainer = L.Trainer(
        **options.pop("options"), **options, strategy=strategy, logger=False, enable_checkpointing=False
    )
    trainer.fit(CausalLM(conf.model, conf.optim), datamodule=TextData(**asdict(conf.data)))
    return trainer


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
