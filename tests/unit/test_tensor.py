"""The tensor plugin without communication: plans, cuts, refusals, meta models and the shared entry."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.plugins.base import ParamShard
from parallax.plugins.tensor import TensorParallel
from parallax.plugins.tensor.embeddings import VocabParallelEmbedding
from parallax.plugins.tensor.entry import SharedInput
from parallax.plugins.tensor.plans import collect_rules, resolve
from parallax.plugins.tensor.shards import shard
from parallax.plugins.tensor.styles import Kind, parse_style
from parallax.strategies.assemble import make_plugins
from parallax.strategies.comm import AxisComm, Ledger
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.tensor_models import HIDDEN, VOCAB, Plain, build


def _apply(model: nn.Module, size: int, index: int, plan: dict[str, str] | None = None) -> TensorParallel:
    layout = Layout(tensor_parallel_size=size).resolve(size)
    plugin = TensorParallel(plan)
    plugin.check(layout, model)
    plugin.apply(model, mesh=Mesh.build(layout, index, groups=False), layout=layout)
    return plugin


def _check(model: nn.Module, size: int, plan: dict[str, str] | None = None) -> None:
    TensorParallel(plan).check(Layout(tensor_parallel_size=size).resolve(size), model)


def _llama(**kwargs: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, **kwargs)


class Wrapped(nn.Module):
    """A model one level down, as in a LightningModule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model


# Styles and plans


def test_packed_words_carry_their_blocks() -> None:
    assert parse_style("packed_colwise", "x").blocks == (1, 1)
    assert parse_style("packed_colwise(3)", "x").blocks == (1, 1, 1)
    assert parse_style("packed_rowwise(4, 1,1)", "x").blocks == (4, 1, 1)
    assert parse_style("qkv_colwise(8,2)", "x").blocks == (8, 2, 2)
    assert parse_style("grouped_qkv_colwise(8, 2)", "x").blocks == (4, 1, 1, 4, 1, 1)
    with pytest.raises(ValueError, match="the first a multiple of the second; got 8 and 3"):
        parse_style("qkv_colwise(8,3)", "x")


@pytest.mark.parametrize(
    "word",
    ["sequence_parallel", "refused: of its shape", "colwize", "packed_colwise(0)", "packed_colwise()", "colwise(2)"],
)
def test_words_not_implemented_are_refused_by_name(word: str) -> None:
    with pytest.raises(ValueError, match=r"blocks\.\*\.up.*") as error:
        _check(_with_plan({"blocks.*.up": word}), 2)
    assert word.removeprefix("refused: ") in str(error.value)


def test_expert_words_are_left_to_the_expert_plugin() -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=32, num_local_experts=2
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rules = collect_rules(model)
    assert not [fqn for fqn in resolve(model, rules, complete=True) if ".experts" in fqn]
    assert [r for r in rules if ".experts" in r.pattern], "the plan names experts"


def _with_plan(changes: dict[str, str]) -> Plain:
    model = Plain()
    model.tp_plan = model.tp_plan | changes
    return model


def test_a_plan_is_relative_to_its_carrier_and_the_outermost_word_counts() -> None:
    model = Wrapped(Plain())
    model.tp_plan = {"net.blocks.*.up": "replicate"}
    given = {"net.blocks.1.down2": "replicate"}
    words = {fqn: t.style.word for fqn, t in resolve(model, collect_rules(model, given), complete=True).items()}
    assert words["net.blocks.0.up"] == words["net.blocks.1.up"] == "replicate"
    assert words["net.blocks.1.down2"] == "replicate" and words["net.blocks.0.down2"] == "rowwise_split_input"
    assert words["net.head"] == "colwise_gather_output"
    assert "net.blocks.0.norm2" not in words and "net.blocks" not in words


def test_hugging_face_plans_are_found_at_any_depth() -> None:
    model = Wrapped(Wrapped(build("llama")))
    words = {fqn: t.style.word for fqn, t in resolve(model, collect_rules(model), complete=True).items()}
    layer = "net.net.model.layers.1"
    assert {fqn.removeprefix(layer): w for fqn, w in words.items() if fqn.startswith(layer)} == {
        **{f".self_attn.{n}_proj": "colwise" for n in "qkv"},
        ".self_attn.o_proj": "rowwise",
        **{f".mlp.{n}_proj": "colwise" for n in ("gate", "up")},
        ".mlp.down_proj": "rowwise",
    }
    assert words["net.net.lm_head"] == "colwise_gather_output"
    assert words["net.net.model.embed_tokens"] == "embedding_rowwise"
    assert len(words) == 2 * 7 + 2


def test_a_tied_owner_follows_the_cut_and_one_that_cannot_is_refused() -> None:
    model = Plain()
    model.head.weight = model.embed.weight
    del model.tp_plan["embed"]
    plugin = _apply(model, 4, 3)
    assert type(model.embed) is VocabParallelEmbedding and model.embed.weight is model.head.weight
    assert plugin.param_shard("embed.weight") == plugin.param_shard("head.weight")
    model = Plain()
    model.head.weight = model.embed.weight
    model.tp_plan["head"] = "colwise"
    del model.tp_plan["embed"]
    with pytest.raises(ValueError, match=r"embed.weight is tied .* of head, .*'colwise' .*no style"):
        TensorParallel().apply(model, mesh=Mesh.build(Layout(tensor_parallel_size=1), 0), layout=Layout())
    model = Plain()
    model.blocks[1].down2.weight = model.blocks[0].down2.weight
    _check(model, 2)
    model.tp_plan = {"blocks.1.down2": "replicate"} | model.tp_plan
    with pytest.raises(ValueError, match=r"blocks.1.down2.weight is tied .* of blocks.0.down2, .*has replicate"):
        _check(model, 2)


# Refusals


@pytest.mark.parametrize("chunks", [0, -1, True, 2.0])
def test_a_number_of_pieces_that_is_none_is_refused(chunks: Any) -> None:
    with pytest.raises(ValueError, match=f"tp_chunks must be a whole number, at least 1; got {chunks}"):
        TensorParallel(chunks=chunks)


def test_pieces_that_nothing_would_send_are_refused() -> None:
    with pytest.raises(ValueError, match="tp_chunks is set, but tensor_parallel_size is 1"):
        make_plugins(Layout.parse("auto").resolve(1), {"tp": {"plan": None, "chunks": 2}})


def test_heads_are_named_with_the_sizes_that_would_do() -> None:
    from transformers import AutoModelForCausalLM

    config = _llama(intermediate_size=192, num_key_value_heads=2)
    with torch.device("meta"):
        model = Wrapped(AutoModelForCausalLM.from_config(config))
    _check(model, 2)
    _check(model, 4)  # two ranks share each key-value head
    wrong = "num_attention_heads=8, num_key_value_heads=2 are not divisible by tensor_parallel_size=3"
    with pytest.raises(ValueError, match=f"{wrong}; valid sizes for this model: 1, 2, 4, 8"):
        _check(model, 3)


def test_a_linear_is_named_with_its_size() -> None:
    with pytest.raises(ValueError) as error:
        _check(Plain(), 16)
    text = str(error.value)
    assert "blocks.*.attn.num_heads=8" in text and "a block of blocks.*.attn.qkv.out_features=16" not in text
    assert "are not divisible by tensor_parallel_size=16; valid sizes for this model: 1, 2, 4" in text
    linear = nn.Sequential(nn.Linear(8, 12))
    linear.tp_plan = {"0": "rowwise"}
    with pytest.raises(ValueError, match="in_features=8 is not .*=3; valid sizes for this model: 1, 2, 4, 8"):
        _check(linear, 3)


def test_the_intermediate_size_is_called_by_its_name() -> None:
    from transformers import AutoModelForCausalLM

    config = _llama(intermediate_size=66, num_key_value_heads=4)
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match=r"gate_proj.out_features \(intermediate_size\)=66.*1, 2$"),
    ):
        _check(AutoModelForCausalLM.from_config(config), 4)


def test_a_model_without_a_plan_is_told_how_to_give_one() -> None:
    with pytest.raises(ValueError, match="Sequential has no tensor-parallel plan.*tp_plan"):
        _check(nn.Sequential(nn.Linear(4, 4)), 2)
    from transformers import AutoModelForCausalLM, BioGptConfig

    config = BioGptConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with torch.device("meta"):
        model = Wrapped(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ValueError, match="BioGptForCausalLM .*'biogpt'.*no tensor-parallel plan for its layers"):
        _check(model, 2)
    _check(model, 2, {"net.biogpt.layers.*.fc1": "colwise", "net.biogpt.layers.*.fc2": "rowwise"})


def test_entries_that_name_nothing_or_a_foreign_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks.\*.upp', which matches nothing in Plain"):
        _check(_with_plan({"blocks.*.upp": "colwise"}), 2)
    with pytest.raises(ValueError, match=r"'blocks.0.norm2' is a torch.nn.*LayerNorm, which style 'colwise'"):
        _check(_with_plan({"blocks.*.norm2": "colwise"}), 2)
    with pytest.raises(ValueError, match="parameter by itself"):
        _check(_with_plan({"head.bias": "embedding_rowwise"}), 2)
    model = Plain()
    model.embed.max_norm = 1.0
    with pytest.raises(ValueError, match="max_norm"):
        _check(model, 2)


# Cuts


def test_padding_and_blocks_fall_where_they_should() -> None:
    assert [shard((5, 2), 0, (5,), 4, i).ranges for i in range(4)] == [((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)]
    assert [shard((5, 2), 0, (5,), 4, i).pad for i in range(4)] == [0, 0, 1, 2]
    assert shard((2, 12), 1, (8, 4), 2, 1).ranges == ((4, 8), (10, 12))


@pytest.mark.parametrize("name", ["llama-bias", "llama-tied", "gpt2", "plain", "olmo2"])
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_together_hold_every_element_and_share_only_whole_parameters(name: str, size: int) -> None:
    original = build(name)
    names = [n for n, _ in original.named_parameters(remove_duplicate=False)]
    wholes = {n: torch.full_like(original.get_parameter(n), float("nan")) for n in names}
    holders = {n: torch.zeros(original.get_parameter(n).shape) for n in names}
    held = 0
    for rank in range(size):
        model = build(name)
        plugin = _apply(model, size, rank)
        assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == names
        for n in names:
            part, local = plugin.param_shard(n), model.get_parameter(n)
            assert part is not None and tuple(local.shape) == part.local_shape and local.is_contiguous()
            part.put(wholes[n], local.detach())
            if part.owner:
                part.put(holders[n], torch.ones(part.local_shape) + holders[n].max() * (part.dim is None))
            if part.pad and part.dim is not None:
                assert not local.narrow(part.dim, local.shape[part.dim] - part.pad, part.pad).any()
            assert part.dim is not None or part.owner == (rank == 0)
        held += sum(p.numel() for p in model.parameters())
    for n in names:
        assert torch.equal(wholes[n], original.get_parameter(n)), n
        assert bool((holders[n] == 1).all()), n
    assert held < size * sum(p.numel() for p in original.parameters()) * (0.75 if size == 2 else 0.5)


def test_gpt2_blocks_are_cut_separately() -> None:
    plugin = _apply(build("gpt2"), 2, 1)
    part = plugin.param_shard("transformer.h.1.attn.c_attn.weight")
    assert part is not None and (part.shape, part.dim) == ((HIDDEN, 3 * HIDDEN), 1)
    assert part.ranges == ((16, 32), (48, 64), (80, 96))
    assert plugin.param_shard("transformer.wpe.weight") == ParamShard((16, HIDDEN), owner=False)
    assert plugin.param_shard("lm_head.weight") == plugin.param_shard("transformer.wte.weight")
    assert plugin.param_shard("nonsense") is None


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "plain"])
def test_a_meta_model_is_cut_like_a_real_one(name: str) -> None:
    real, meta = build(name), build(name).to("meta")
    meta.load_state_dict(meta.state_dict(), assign=True)
    if name != "plain":
        meta.tie_weights()
    next(p for n, p in meta.named_parameters() if n.endswith("0.down.weight") or "0.mlp" in n).requires_grad_(False)
    frozen = [n for n, p in meta.named_parameters() if not p.requires_grad]
    _apply(real, 4, 3)
    _apply(meta, 4, 3)
    assert {n: p.shape for n, p in real.named_parameters()} == {n: p.shape for n, p in meta.named_parameters()}
    assert all(p.is_meta for p in meta.parameters())
    assert [n for n, p in meta.named_parameters() if not p.requires_grad] == frozen and len(frozen) == 1


def test_sizes_say_what_the_forward_shows() -> None:
    llama, gpt2 = build("llama"), build("gpt2")
    report = (_apply(llama, 2, 0).describe(), _apply(gpt2, 2, 0))[0]
    layer = llama.model.layers[0]
    assert (layer.self_attn.k_proj.in_features, layer.self_attn.k_proj.out_features) == (HIDDEN, 8)
    assert (layer.mlp.down_proj.in_features, layer.mlp.down_proj.out_features) == (32, HIDDEN)
    assert llama.lm_head.out_features == llama.model.embed_tokens.num_embeddings == VOCAB
    assert isinstance(layer.mlp.down_proj, nn.Linear)
    assert gpt2.transformer.h[0].attn.split_size == HIDDEN // 2
    assert gpt2.transformer.h[0].attn.c_attn.nf == 3 * HIDDEN // 2
    assert report["sends"] == (
        "per micro-batch forward 5 reduce-scatters, 5 all-gathers; "
        "backward 10 all-gathers, 5 reduce-scatters"
    )
    assert report["sequence"] == "sharded in model.layers"


class Stub(nn.Module):
    is_foreign = True


def test_what_a_pipeline_took_away_is_passed_over() -> None:
    model = build("llama")
    layout = Layout(tensor_parallel_size=2).resolve(2)
    plugin = TensorParallel()
    plugin.check(layout, model)
    model.lm_head, model.model.embed_tokens, model.model.layers[0] = Stub(), Stub(), Stub()
    model.model.layers[1].mlp = nn.Identity()
    plugin.apply(model, mesh=Mesh.build(layout, 0, groups=False), layout=layout)
    assert type(model.lm_head) is Stub
    assert model.model.layers[1].self_attn.q_proj.weight.shape == (16, HIDDEN)
    assert plugin.param_shard("lm_head.weight") is None


def test_ties_marks_and_word_kinds_survive() -> None:
    model = build("llama-tied")
    model.lm_head.weight.mark = "kept"
    _apply(model, 2, 0)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.mark == "kept"
    assert parse_style("rowwise", "x").kind is Kind.ROW


# The shared entry of a region


@dataclass
class Case:
    entry: SharedInput
    x: Tensor

    def read(self, x: Tensor, member: int) -> Tensor | None:
        """Layer `member` reads x; returns what is kept for the layers after it."""
        weight = torch.eye(3) * (member + 2)
        assert torch.equal(self.entry.linear(x, member, weight, None), x @ weight)
        return self.entry._output


@pytest.fixture
def case() -> Case:
    x = torch.ones(2, 3, requires_grad=True) * 2
    return Case(SharedInput(AxisComm("tp", [0], 0, None, Ledger()), 3), x)


def test_layers_that_read_one_tensor_share_one_leader_each_once(case: Case) -> None:
    first = case.read(case.x, 0)
    assert first is not None and torch.equal(first, case.x) and first._base is None
    assert case.read(case.x, 1) is first
    assert case.read(case.x, 1) is not first  # a second use of the same layer starts anew
    second = case.entry._output
    assert case.read(case.x + 0, 2) is not second


def test_nothing_is_kept_once_all_have_it_or_the_input_is_gone(case: Case) -> None:
    kept = [case.read(case.x, member) for member in range(3)]
    assert kept[0] is kept[1] and kept[2] is None
    assert case.read(case.x, 0) is not None
    assert copy.deepcopy(case.entry)._output is None
    case.x = torch.zeros(1)
    gc.collect()
    assert case.entry._output is None


def test_without_gradients_nothing_is_kept(case: Case) -> None:
    with torch.no_grad():
        assert case.read(case.x, 0) is None
    assert case.read(case.x.detach(), 0) is None


def test_an_input_changed_in_place_is_entered_again(case: Case) -> None:
    first = case.read(case.x, 0)
    case.x.add_(1)
    assert case.read(case.x, 1) is not first
