"""Callbacks around the load of experts, against one process that counts its routers' choices itself.

Also what a sweep's record keeps of it.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from parallax import ExpertBiasBalance, ExpertLoad, ParallaxStrategy
from parallax.plugins.sweep.record import RunRecord
from parallax.strategies.mesh import coordinates
from parallax.strategies.verify.exact import KeepDouble
from parallax.strategies.verify.given import Given
from tests.parity import reference
from tests.parity.harness import Lit, loader
from tests.parity.models import BUILD, SEQ, build, samples
from tests.procs import run_ranks

MODEL, RATE, EXPERTS, TOP_K, HIDDEN, FP64 = "deepseek_v3", 0.05, 8, 2, 32, 8
LAYOUTS = ["dp2 ep2", "pp2 mb2", "tp2", "tp2 ep2 etp1"]
DROPPING, FACTOR = "dp2 ep2, capacity", 0.75
RUNS: dict[str, tuple[str, dict[str, Any]]] = {layout: (layout, {}) for layout in LAYOUTS}
RUNS[DROPPING] = "dp2 ep2", {"expert_capacity_factor": FACTOR}
LAYERS = ["model.model.layers.2.mlp.experts", "model.model.layers.3.mlp.experts"]


class Record(Callback):
    """Logged values and biases after every batch."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.biases: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items() if "expert_load" in k})
        self.biases.append({n: b.clone() for n, b in module.named_buffers() if n.endswith("bias")})


def train(rank: int, world: int, picture: str) -> dict[str, Any]:
    out = {}
    for name, (layout, options) in RUNS.items():
        record, load = Record(), ExpertLoad(every=1, heat_map=picture)
        strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world), **options)
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", devices=world, precision="64-true", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            gradient_clip_val=reference.CLIP, use_distributed_sampler=False,
            callbacks=[ExpertBiasBalance(RATE), load, record, RunRecord(Path(picture).parent / name, 8 * SEQ)],
        )  # fmt: skip
        sizes = strategy.requested_layout.resolve(world).axis_sizes()
        with KeepDouble():
            module = Lit(MODEL, torch.float64)
            trainer.fit(module, loader(MODEL, sizes["dp"], coordinates(rank, sizes)["dp"]))
        strategy.close()
        out[name] = record.logged, record.biases, load.loads
    return out


def add_choices(count: Tensor, module: Any, args: Any, out: tuple[Tensor, ...]) -> None:
    count += torch.bincount(out[2].flatten(), minlength=EXPERTS)


def train_alone() -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Loads of each layer and biases after each step, by the rule of the paper."""
    model: Any = build(MODEL, torch.float64)
    routers = [model.model.layers[i].mlp.gate for i in (2, 3)]
    counts = [torch.zeros(EXPERTS) for _ in routers]
    for count, router in zip(counts, routers, strict=True):
        router.register_forward_hook(partial(add_choices, count))
    optimizer = reference.optimizer(model.parameters(), torch.float64)
    loads, biases = [], []
    for batch in samples(MODEL):
        BUILD[MODEL][1](model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), reference.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        loads.append([count.clone() for count in counts])
        for count, router in zip(counts, routers, strict=True):
            for expert in range(EXPERTS):
                if count[expert] != count.mean():
                    router.e_score_correction_bias[expert] += RATE if count[expert] < count.mean() else -RATE
            count.zero_()
        biases.append([router.e_score_correction_bias.clone() for router in routers])
    return loads, biases


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    picture = tmp_path_factory.mktemp("heat") / "load.png"
    return run_ranks(2, train, str(picture), timeout=100), picture


@pytest.fixture(scope="module")
def alone() -> Any:
    with KeepDouble():
        return train_alone()


@pytest.mark.limit(150)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_move_as_in_one_process(layout: str, ranks: Any, alone: Any) -> None:
    held = set()
    for rank in ranks[0]:
        for got, want in zip(rank[layout][1], alone[1], strict=True):
            for name, bias in got.items():
                layer = int(name.split(".")[3])
                held.add(layer)
                torch.testing.assert_close(bias, want[layer - 2], rtol=0, atol=1e-12)
    assert held == {2, 3}
    assert float(alone[1][-1][0].abs().max()) >= RATE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_logs_the_load_of_all_ranks_and_stages(layout: str, ranks: Any, alone: Any) -> None:
    for rank in ranks[0]:
        logged, _, loads = rank[layout]
        for step, (values, want) in enumerate(zip(logged, alone[0], strict=True)):
            for layer, load, right in zip(LAYERS, loads[step], want, strict=True):
                assert load.tolist() == right.tolist()
                assert values[f"expert_load/{layer}/imbalance"] == pytest.approx(float(right.max() / right.mean()))
                assert values[f"expert_load/{layer}/idle"] == pytest.approx(float((right == 0).float().mean()))
                assert values[f"expert_load/{layer}/dropped"] == 0
                rows = right.sum() * HIDDEN * FP64 * 4 if "ep2" in layout else 0
                assert values[f"expert_load/{layer}/bytes"] == float(rows)
            assert right.sum() == 8 * SEQ * TOP_K
            assert values["expert_load/imbalance"] == pytest.approx(max(float(r.max() / r.mean()) for r in want))


def test_choices_beyond_the_capacity_are_counted(ranks: Any) -> None:
    """In the first layer with experts, whose tokens no earlier one has changed: each data rank has half of them."""
    model: Any = build(MODEL, torch.float64)
    seen: list[Tensor] = []
    model.model.layers[2].mlp.gate.register_forward_hook(lambda module, args, out: seen.append(out[2]))
    with KeepDouble(), torch.no_grad():
        model(samples(MODEL)[0]["input_ids"])
    room = math.ceil(FACTOR * 4 * SEQ * TOP_K / EXPERTS)
    chosen = [torch.bincount(half.flatten(), minlength=EXPERTS) for half in seen[0].chunk(2)]
    kept = sum(each.clamp(max=room) for each in chosen)
    assert 0 < kept.sum() < 8 * SEQ * TOP_K
    for rank in ranks[0]:
        (values, *_), _, ((load, _), *_) = rank[DROPPING]
        assert load.tolist() == kept.tolist()
        assert values[f"expert_load/{LAYERS[0]}/dropped"] == pytest.approx(1 - float(kept.sum()) / (8 * SEQ * TOP_K))
        assert values[f"expert_load/{LAYERS[0]}/bytes"] == float(kept.sum() * HIDDEN * FP64 * 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_has_the_load_of_all_steps(layout: str, ranks: Any, alone: Any) -> None:
    record = json.loads((ranks[1].parent / layout / "record.json").read_text())
    totals = [sum(step[i] for step in alone[0]).tolist() for i in (0, 1)]
    assert record["expert_load"] == dict(zip(LAYERS, totals, strict=True))


def test_heat_map_is_a_picture(ranks: Any) -> None:
    picture: Path = ranks[1]
    assert picture.read_bytes().startswith(b"\x89PNG")
