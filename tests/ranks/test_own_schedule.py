"""A user's own schedule, as a function, "module:function" or a file, trains as one process; what ran when is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from parallax import ParallaxStrategy
from parallax.plugins.pipeline.actions import Action
from parallax.plugins.pipeline.catalog import find_schedule, make_lists
from parallax.plugins.pipeline.schedule_csv import save_csv
from parallax.plugins.pipeline.trace import compare, load_trace
from parallax.plugins.pipeline.trace_callback import PipelineTrace
from parallax.strategies.verify.given import Given
from tests.parity import reference
from tests.parity.harness import Lit, loader
from tests.procs import run_ranks


def backwards(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """GPipe in a V, every order reversed, whatever the neighbours do."""
    order, last = range(num_microbatches), num_ranks * stages_per_rank - 1
    mine = [[s for s in range(last + 1) if rank in (s, last - s)] for rank in range(num_ranks)]
    return [
        [Action("F", i, s) for s in stages for i in (order if rank % 2 else reversed(order))]
        + [Action("B", i, s) for s in reversed(stages) for i in (reversed(order) if rank % 2 else order)]
        for rank, stages in enumerate(mine)
    ]


def own_rank(rank: int, world: int, path: str) -> dict[str, Any]:
    ways = {
        "function": ("pp2 mb4 v2", backwards),
        "name": (f"pp2 mb4 v2 schedule={__name__}:backwards", None),
        "file": (f"pp2 mb4 schedule={path}", None),
    }
    found: dict[str, Any] = {}
    for way, (layout, schedule) in ways.items():
        strategy = ParallaxStrategy(layout, schedule=schedule, cluster_environment=Given(rank, world))
        trace = PipelineTrace(Path(path).with_suffix(".json") if way == "file" else None, step=1)
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", devices=world, max_epochs=1, precision="64-true", logger=False,
            gradient_clip_val=reference.CLIP, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, callbacks=[trace],
        )  # fmt: skip
        module = Lit("plain", torch.float64)
        trainer.fit(module, loader("plain"))
        assert trace.comparison is not None
        names = [n for n, _ in module.named_parameters()]
        weights = {n: strategy.engine.data.full_param(n).detach().clone() for n in names}
        found[way] = weights, [list(actions) for actions in trace.comparison.measured.lists], str(strategy)
        strategy.close()
    return found


def test_a_users_schedule_trains_as_one_process_and_runs_as_written(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    lists = make_lists(find_schedule("zb_v"), 2, 4)
    save_csv(lists, path)
    want = {f"model.{name}": tensor for name, tensor in reference.train("plain", torch.float64).weights.items()}
    ranks = run_ranks(2, own_rank, str(path), timeout=120)
    for way, ran in (("function", backwards(2, 4, 2)), ("name", backwards(2, 4, 2)), ("file", lists)):
        weights: dict[str, Any] = {}
        for found in ranks:
            weights |= found[way][0]
            assert found[way][1] == ran
        assert weights.keys() == want.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, want[name], rtol=1e-9, atol=1e-9)
    assert f"schedule={__name__}:backwards" in ranks[0]["function"][2]
    trace = load_trace(path.with_suffix(".json"))
    measured = compare(trace)
    assert [list(actions) for actions in trace.lists] == lists
    for ends, starts in zip(trace.ends, trace.starts, strict=True):
        assert all(end >= start for start, end in zip(starts, ends, strict=True))
        assert all(start >= end for start, end in zip(starts[1:], ends, strict=False))
    # Nothing starts before what it needs has begun (a result is handed on within its action, so a receiver may start a
    # moment before the sender's action ends), and no step is shorter than its longest rank's work.
    begun = {a: start for rank in trace.ranks() for a, start, _ in rank}
    for rank in trace.ranks():
        for action, start, _ in rank:
            source = Action(action.kind, action.microbatch, action.stage + (-1 if action.kind == "F" else 1))
            assert action.kind == "W" or start >= begun.get(source, start)
    assert measured.measured.makespan >= max(measured.measured.busy)
    assert path.with_suffix(".html").read_text().count("<svg") == 2
    assert json.loads(path.with_suffix(".json").read_text())["unit"] == "s"


def test_a_trace_of_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0; got -1"):
        PipelineTrace(step=-1)
