"""What ranks that hold some experts each say of the whole model: its state dict, and its loss on batches of one.

The state dict equals that of one process bit for bit, also through a file that transformers saves and loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from parallax import ParallaxStrategy
from parallax.strategies.mesh import coordinates
from parallax.strategies.verify.given import Given
from tests.parity.harness import Lit, loader
from tests.parity.models import BUILD, build, samples
from tests.procs import run_ranks

CASES = {"mixtral": "tp2 dp2 ep4 etp1", "deepseek_v3": "pp2 dp2 ep2 zero2 mb2", "gpt_oss": "tp2 dp2 ep2 zero3"}


class Evaluated(Lit):
    """Also evaluates, and keeps the losses of batches."""

    def validation_step(self, batch: Any, index: int) -> Tensor:
        return BUILD[self.kind][1](self.model, batch)


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs))


class Export(Callback):
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.held = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found = trainer.strategy.whole_state_dict()
        self.held = sum(getattr(p, "ds_numel", p.numel()) for n, p in pl_module.named_parameters() if ".experts." in n)


def run(rank: int, world: int) -> list[Any]:
    out = []
    for model, layout in CASES.items():
        export, losses = Export(), Losses()
        strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world))
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", devices=world, max_steps=1, logger=False, callbacks=[export, losses],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, num_sanity_val_steps=-1, limit_val_batches=1.0,
        )  # fmt: skip
        sizes = strategy.requested_layout.resolve(world).axis_sizes()
        at = sizes["dp"], coordinates(rank, sizes)["dp"]
        trainer.fit(
            Evaluated(model, torch.float32), loader(model, *at, steps=1), loader(model, *at, steps=2, size=sizes["dp"])
        )
        strategy.close()
        out.append((export.found, export.held, at[1], losses.found[:2]))
    return out


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(4, run, timeout=120)


def test_export_gathers_the_experts_of_all_ranks(ranks: Any) -> None:
    for at, model in enumerate(CASES):
        want = Lit(model, torch.float32).state_dict()
        found = ranks[0][at][0]
        assert sorted(found) == sorted(want)
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
        assert not any(rank[at][0] for rank in ranks[1:])
        experts = sum(t.numel() for n, t in want.items() if ".experts." in n)
        copies = 2 if model == "gpt_oss" else 1  # its tp_plan does not cut inside of experts
        assert sum(rank[at][1] for rank in ranks) == copies * experts


def test_exported_experts_are_loaded_by_transformers(ranks: Any, tmp_path: Path) -> None:
    """`model.safetensors` of one process's form: what it gives, another process reads."""
    for at, name in enumerate(CASES):
        model: Any = build(name, torch.float32)
        state = {fqn.removeprefix("model."): tensor for fqn, tensor in ranks[0][at][0].items()}
        with torch.no_grad():
            ids = samples(name)[0]["input_ids"]
            want = model(ids).logits
            for param in model.parameters():
                param.zero_()
        model.save_pretrained(tmp_path / name, state_dict=state)
        assert (tmp_path / name / "model.safetensors").exists()
        loaded = type(model).from_pretrained(tmp_path / name, experts_implementation="eager")
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, want)


@pytest.mark.parametrize("model", CASES)
def test_batches_of_one_are_evaluated(model: str, ranks: Any) -> None:
    """Two batches of one row on each data rank, before training; a row's loss is that of one process."""
    whole, at = build(model, torch.float32), list(CASES).index(model)
    batches = samples(model, 2, size=2)
    for rank in ranks:
        _, _, data_index, losses = rank[at]
        rows = [{key: value[data_index : data_index + 1] for key, value in batch.items()} for batch in batches]
        with torch.no_grad():
            want = [float(BUILD[model][1](whole, row)) for row in rows]
        assert losses == pytest.approx(want, rel=1e-5)
