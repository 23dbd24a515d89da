"""Schedules, their simulation, the split into stages and the cut of a model, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.plugins.pipeline.actions import Action
from parallax.plugins.pipeline.plans import find_structure
from parallax.plugins.pipeline.plugin import PipelineParallel
from parallax.plugins.pipeline.schedules.basic import gpipe, one_f_one_b
from parallax.plugins.pipeline.simulator import Costs, check, simulate
from parallax.plugins.pipeline.stage import StageOutput
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.parity.models import Plain, gpt2, llama

SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2), (4, 8), (8, 32), (16, 16), (64, 512)]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_bubble_is_the_papers(schedule: Any, stages: int, microbatches: int) -> None:
    lists = schedule(stages, microbatches)
    check(lists, microbatches)
    # GPipe and 1F1B: (p - 1) / (m + p - 1) of the time idle, for any ratio of backward to forward.
    for backward in (1.0, 2.0, 3.5):
        bubble = simulate(lists, Costs(1.0, backward)).bubble
        assert bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_activations_in_flight(stages: int, microbatches: int) -> None:
    assert simulate(gpipe(stages, microbatches)).peak_in_flight == (microbatches,) * stages
    want = tuple(min(stages - s, microbatches) for s in range(stages))
    assert simulate(one_f_one_b(stages, microbatches)).peak_in_flight == want


def test_1f1b_of_two_stages_is_written_as_in_the_paper() -> None:
    first, second = one_f_one_b(2, 3)
    assert " ".join(map(str, first)) == "F0@0 F1@0 B0@0 F2@0 B1@0 B2@0"
    assert " ".join(map(str, second)) == "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1"


def acts(text: str, stage: int) -> list[Action]:
    return [Action(word[0], int(word[1:]), stage) for word in text.split()]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (["F0 B0", "F0"], "rank 1 never runs B0@1"),
        (["F0 F1 B0 B1", "B0 F0 F1 B1"], "rank 1 runs B0@1 before F0@1"),
        (["F0 B0 F1 B1", "F1 B1 F0 B0"], "deadlocks: rank 0 at B0@0, rank 1 at F1@1"),
    ],
)
def test_bad_lists_are_refused(lists: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check([acts(text, rank) for rank, text in enumerate(lists)], 1 if "F1" not in lists[0] else 2)


class Lit(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def test_structure_of_models() -> None:
    found = find_structure(Lit(llama()))
    assert (found.layers, found.num_layers) == ("model.model.layers", 5)
    assert found.before == ("model.model.embed_tokens",)
    assert found.after == ("model.model.norm", "model.lm_head")
    found = find_structure(Lit(gpt2()))
    assert (found.layers, found.num_layers) == ("model.transformer.h", 4)
    assert found.before == ("model.transformer.wte", "model.transformer.wpe")
    assert found.after == ("model.transformer.ln_f", "model.lm_head")
    found = find_structure(Lit(Plain()))
    assert (found.layers, found.direct) == ("model.layers", ("model.position",))
    found = find_structure(Lit(Plain()), {"model.head": None, "model.layers": None})
    assert found.before == ("model.embed", "model.head") and found.after == ("model.norm",)


def cut(build: Any, stage: int, stages: int = 2) -> tuple[Any, PipelineParallel]:
    layout = Layout(pipeline_parallel_size=stages).resolve(stages)
    model = Lit(build())
    plugin = PipelineParallel()
    plugin.check(layout, model)
    plugin.apply(model, mesh=Mesh.build(layout, stage, groups=False), layout=layout)
    plugin.finish(model)
    return model, plugin


@pytest.mark.parametrize("build", [llama, gpt2, Plain])
@pytest.mark.parametrize("stages", [2, 4])
def test_every_parameter_lives_on_one_stage_under_its_own_name(build: Any, stages: int) -> None:
    """But for a container's own, which are on all."""
    whole = dict(Lit(build()).named_parameters(remove_duplicate=False))
    homes: dict[str, list[int]] = {}
    for stage in range(stages):
        for name, param in cut(build, stage, stages)[0].named_parameters(remove_duplicate=False):
            assert param.shape == whole[name].shape
            homes.setdefault(name, []).append(stage)
    assert homes.keys() == whole.keys()
    everywhere = find_structure(Lit(build())).direct
    assert all(len(found) == (stages if name in everywhere else 1) for name, found in homes.items())


def test_of_a_parameter_elsewhere_only_the_form_is_known() -> None:
    model, plugin = cut(Plain, 1)
    there = model.double().model.embed.weight
    assert (there.dtype, there.device, there.shape) == (torch.float64, torch.device("cpu"), (61, 32))
    text = "'model.embed' lives on the first stage of the pipeline, so its 'weight' cannot be used here"
    with pytest.raises(ValueError, match=text):
        torch.nn.functional.linear(torch.ones(2, 32), there)
    with pytest.raises(AttributeError, match=text):
        there.T  # noqa: B018


@pytest.mark.parametrize("stage", [0, 1])
def test_a_call_outside_a_step_is_refused(stage: int) -> None:
    with pytest.raises(ValueError, match="called outside a pipelined step.*example_input_array"):
        cut(Plain, stage)[0].model(torch.zeros(1, 4, dtype=torch.long))


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize("build", [llama, gpt2, Plain])
def test_stages_in_one_process_give_the_whole_models_output(build: Any) -> None:
    torch.manual_seed(0)
    reference: Any = build().eval()
    ids = torch.randint(0, 61, (2, 7))
    want = logits(reference(ids))
    received = None
    for stage in range(4):
        model, plugin = cut(build, stage, 4)
        model.model.load_state_dict(reference.state_dict(), strict=False)
        plugin._state.begin(stage, received)
        try:
            got = logits(model.model.eval()(ids))
            assert stage == 3
        except StageOutput as output:
            received = output.value
        plugin._state.end()
    assert torch.equal(got, want)


def test_tied_weights_count_once() -> None:
    first, last = cut(gpt2, 0)[1], cut(gpt2, 1)[1]
    assert first.param_shard("model.transformer.wte.weight") is None
    shard = last.param_shard("model.lm_head.weight")
    assert shard is not None and not shard.owner


class Reused(nn.Module):
    """A head registered before the layers and used after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    pp_plan = {"embed": None, "layers": None}

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_module_on_the_wrong_stage_says_so() -> None:
    model, plugin = cut(Reused, 1)
    plugin._state.begin(1, torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match="'model.head' is registered before the layers.*pp_plan"):
        model.model(torch.zeros(1, 2, dtype=torch.long))


def test_refusals() -> None:
    layout = Layout(pipeline_parallel_size=8).resolve(8)
    with pytest.raises(ValueError, match="pipeline_parallel_size=8 needs at least 8 layers, but 'model.layers' has 4"):
        PipelineParallel().check(layout, Lit(Plain()))
    with pytest.raises(ValueError, match="Linear has no pp_plan and is not a Hugging Face model"):
        PipelineParallel().check(layout, nn.Linear(2, 2))
    shared = Plain()
    shared.layers[3].q = shared.layers[0].q
    with pytest.raises(ValueError, match=r"layers.0.q.weight.*shared by several layers"):
        PipelineParallel().check(Layout(pipeline_parallel_size=2).resolve(2), Lit(shared))
    with pytest.raises(ValueError, match=r"pp_plan names \['model.heads'\]"):
        find_structure(Lit(Plain()), {"model.layers": None, "model.heads": None})
