"""The three ways to configure a run, as the examples show them: `hydra.main`, plain OmegaConf, LightningCLI."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from parallax.conf import CONF_DIR
from tests.procs import run_ranks

SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
SMALL = {"model": {"family": "plain", "hidden_size": 32, "num_layers": 2},
         "data": {"seq_len": 16, "global_batch_size": 4, "max_bytes": 20000}}  # fmt: skip


def dotted(tree: dict) -> list[str]:
    return [f"{group}.{key}={value}" for group, keys in tree.items() for key, value in keys.items()]


def by_hydra(rank: int, world: int, folder: Path) -> float:
    import train_llama
    from parallax.conf.hydra_app import run_hydra

    sys.argv = ["train_llama.py", "layout=tp2", "model=plain_tiny", "trainer=cpu_timing", "trainer.max_steps=3",
                "save=false", f"output_dir={folder}", *dotted(SMALL)]  # fmt: skip
    run_hydra(train_llama.main)
    dist.destroy_process_group()
    return json.loads((folder / "record.json").read_text())["loss"] if rank == 0 else 0.0


def by_omegaconf(rank: int, world: int) -> float:
    import train_from_yaml

    trainer = train_from_yaml.main(f"{CONF_DIR}/layout/tp2.yaml", ["trainer.max_steps=3", *dotted(SMALL)])
    dist.destroy_process_group()
    return float(trainer.callback_metrics["train_loss"])


def by_lightning_cli(rank: int, world: int, config: str, layout: str) -> float:
    import train_cli

    cli = train_cli.main(["fit", "--config", config, "--trainer.strategy.init_args.layout", layout])
    dist.destroy_process_group()
    return float(cli.trainer.callback_metrics["train_loss"])


@pytest.mark.limit(400)
def test_three_ways_are_one_run(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    example = yaml.safe_load((Path(__file__).parents[2] / "examples" / "train_cli.yaml").read_text())
    example["model"]["model"] = SMALL["model"]
    example["data"] = SMALL["data"]
    example["trainer"] |= {"max_steps": 3, "gradient_clip_val": 1.0}
    config = tmp_path / "cli.yaml"
    config.write_text(yaml.safe_dump(example))
    runs = {
        "hydra": (by_hydra, (tmp_path,)),
        "omegaconf": (by_omegaconf, ()),
        "cli, layout in words": (by_lightning_cli, (str(config), "tp2")),
        "cli, layout as a mapping": (by_lightning_cli, (str(config), "{tensor_parallel_size: 2}")),
    }
    losses = {
        name: run_ranks(2, fn, *args, init=False, timeout=90, allow_env=SEEDS)[0] for name, (fn, args) in runs.items()
    }
    assert 3 < losses["hydra"] < 6
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["hydra"], rel=1e-5), name
