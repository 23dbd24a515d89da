"""Vocabulary padding stays inside: saved files, exports and optimizer states have the model's own 37 rows.

Two, three and four tensor ranks pad 37 rows to 38, 39 and 40. Right values are those of one process in plain torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from parallax import ParallaxStrategy
from parallax.strategies.verify.given import Given
from tests.parity.models import hf_loss
from tests.procs import run_ranks

VOCAB, SEQ, BATCH, STEPS = 37, 6, 2, 2
CASES = [("tp2", "64-true"), ("tp2", "bf16-true"), ("tp2 zero1", "64-true")]
CUT = ("model.embed_tokens.weight", "lm_head.weight")


def build() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=24, num_hidden_layers=1, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=SEQ, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def rows(steps: int) -> list[dict[str, Tensor]]:
    """The same batch in every step: which one a resumed run begins with is no question here."""
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(3)).repeat(steps, 1)
    return [{"input_ids": row, "labels": row} for row in ids]


def adam(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


class Lit(LightningModule):
    def __init__(self, folder: str, dtype: str = "float64") -> None:
        super().__init__()
        self.folder, self.width = folder, dtype

    def configure_model(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=getattr(torch, self.width), attn_implementation="eager"
        ).train()

    def training_step(self, batch: Any, index: int) -> Tensor:
        return hf_loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self)


class Keep(Callback):
    """The whole weights before training, weights and optimizer state after `STEPS` steps (saved to `path`) and last."""

    def __init__(self, path: str | None) -> None:
        self.path, self.found = path, {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found["first"] = trainer.strategy.whole_state_dict()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        at = trainer.global_step
        self.found[at] = trainer.strategy.whole_state_dict(), trainer.strategy.whole_optimizer_state()
        if self.path and at == STEPS:
            trainer.save_checkpoint(self.path)


def fit(at: tuple[int, int], layout: str, folder: str, steps: int, precision: str = "64-true", **paths: str) -> Any:
    """What `Keep` has found in a run of `steps` steps, from a checkpoint `start` and saved at `end` if given."""
    keep, strategy = Keep(paths.get("end")), ParallaxStrategy(layout, cluster_environment=Given(*at))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=at[1], precision=precision, max_steps=steps, logger=False,
        callbacks=[keep, *([WeightAveraging()] if layout == "tp2" else [])], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    lit = Lit(folder, "float64" if precision == "64-true" else "bfloat16")
    size = strategy.requested_layout.resolve(at[1]).axis_sizes()["dp"]
    mine = [row for i, row in enumerate(rows(STEPS + 1)) if i % size == at[0] * size // at[1]]
    trainer.fit(lit, DataLoader(mine, BATCH // size), ckpt_path=paths.get("start"), weights_only=False)  # type: ignore[arg-type]
    strategy.close()
    return keep.found


def save_and_resume(rank: int, world: int, root: str) -> Any:
    out, at, first = {}, (rank, world), f"{root}/first"
    for layout, precision in CASES:
        saved = f"{root}/{layout}-{precision}"
        whole = fit(at, layout, first, STEPS + 1, precision, end=saved)
        out[layout, precision] = whole, fit(at, layout, first, STEPS + 1, precision, start=saved)
    return out


def train_and_load(rank: int, world: int, root: str, layouts: list[str]) -> Any:
    at = rank, world
    return {
        layout: (fit(at, layout, f"{root}/first", STEPS)[STEPS], fit(at, layout, f"{root}/tp2", 1)["first"])
        for layout in layouts
    }


def equal_to(want: Any, found: Any) -> dict[str, Tensor]:
    """Compares weights and moments; the weights found."""
    close(found[0], want[0])
    assert found[1].keys() == want[1].keys()
    for name, state in want[1].items():
        close(found[1][name], state)
    whole: dict[str, Tensor] = found[0]
    return whole


def close(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(want)
    for name, tensor in want.items():
        assert found[name].shape == tensor.shape, name
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def want() -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights and moments of one process after `STEPS` steps."""
    model = build()
    optimizer = adam(model)
    for batch in DataLoader(rows(STEPS), BATCH):  # type: ignore[arg-type]
        hf_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = {n: {k: optimizer.state[p][k] for k in ("exp_avg", "exp_avg_sq")} for n, p in model.named_parameters()}
    return {f"model.{n}": p.detach() for n, p in model.named_parameters()}, {f"model.{n}": s for n, s in kept.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    build().save_pretrained(folder / "first")
    return folder


@pytest.fixture(scope="module")
def two(root: Path) -> Any:
    ranks = run_ranks(2, save_and_resume, str(root), timeout=120)
    exported = ranks[0]["tp2", "64-true"][0][STEPS][0]
    build().save_pretrained(root / "tp2", state_dict={name.removeprefix("model."): t for name, t in exported.items()})
    return ranks


def test_files_hold_no_padding(two: Any, root: Path) -> None:
    """37 rows, not 38, in both ranks' files together: weights, moments, fp32 copies of narrow weights."""
    for precision in ("64-true", "bf16-true"):
        folder = root / f"tp2-{precision}"
        files = [torch.load(folder / f"rank-0000{i}-of-00002.pt", weights_only=False) for i in range(2)]
        for fqn in (f"model.{name}" for name in CUT):
            for weights in ("state_dict", "current_model_state"):
                assert [len(file[weights][fqn]) for file in files] == [19, 18]
            states = [file["optimizer_states"][0] for file in files]
            at = states[0]["names"].index(fqn)
            for key in ("exp_avg", "exp_avg_sq"):
                assert [len(state["optimizer"]["state"][at][key]) for state in states] == [19, 18]
            if precision == "bf16-true":
                assert [len(state["masters"][fqn]) for state in states] == [19, 18]


def test_what_resumes_goes_on_as_if_never_stopped(two: Any) -> None:
    for case, (through, resumed) in two[0].items():
        weights, states = through[STEPS + 1]
        for name, tensor in weights.items():
            assert torch.equal(resumed["first"][name], through[STEPS][0][name]), f"{name} loaded at {case}"
            assert torch.equal(resumed[STEPS + 1][0][name], tensor), f"{name} at {case}"
        for name, state in states.items():
            assert state and all(torch.equal(resumed[STEPS + 1][1][name][key], t) for key, t in state.items()), name


def test_exports_have_the_models_own_vocabulary(two: Any, root: Path, want: Any) -> None:
    exported = equal_to(want, two[0]["tp2", "64-true"][0][STEPS])
    assert two[1]["tp2", "64-true"][0][STEPS] == ({}, {})
    assert LlamaConfig.from_pretrained(root / "tp2").vocab_size == VOCAB
    file = load_file(root / "tp2" / "model.safetensors")
    for name in CUT:
        assert torch.equal(file[name], exported[f"model.{name}"]) and len(file[name]) == VOCAB
    one: Any = AutoModelForCausalLM.from_pretrained(root / "tp2", dtype=torch.float64)
    assert all(torch.equal(exported[f"model.{name}"], param) for name, param in one.named_parameters())


@pytest.mark.parametrize(("world", "layouts"), [(3, ["tp3"]), (4, ["tp4", "tp2 dp2 zero3"])])
def test_every_layout_loads_what_two_ranks_exported(
    world: int, layouts: list[str], two: Any, root: Path, want: Any
) -> None:
    """Bit for bit; and trained there the weights and moments are one process's too."""
    exported = two[0]["tp2", "64-true"][0][STEPS][0]
    for trained, loaded in run_ranks(world, train_and_load, str(root), layouts, timeout=120)[0].values():
        assert sorted(loaded) == sorted(exported)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in exported.items())
        equal_to(want, trained)
