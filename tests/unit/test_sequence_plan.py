"""Where residual streams can be cut: found from plans and module trees of real models, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallax.plugins.expert.plans import find_experts
from parallax.plugins.tensor import TensorParallel
from parallax.plugins.tensor.plans import collect_rules, resolve
from parallax.plugins.tensor.sequence_functions import Tokens, local_part
from parallax.plugins.tensor.sequence_plan import Trunk, find_trunk, is_token_wise
from parallax.plugins.tensor.streams import Streams
from parallax.strategies.layout import Layout
from tests.tensor_models import build


def _trunk(model: nn.Module) -> Trunk | str:
    return find_trunk(model, resolve(model, collect_rules(model), complete=True))


def _hf(kind: str, **settings: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    config = AutoConfig.for_model(kind, **{**common, "intermediate_size": 64, **settings})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_blocks_and_the_last_norm_of_hugging_face_models() -> None:
    llama = _trunk(build("llama"))
    assert isinstance(llama, Trunk)
    names = [f"model.layers.{i}.{block}" for i in (0, 1) for block in ("self_attn", "mlp")]
    assert (llama.layers, llama.depth, llama.blocks, llama.exit) == ("model.layers", 2, names, "model.norm")
    assert llama.opaque == llama.direct == []
    assert llama.is_sharded("model.layers.0.input_layernorm.weight") and llama.is_sharded("model.norm.weight")
    assert not llama.is_sharded("model.embed_tokens.weight") and not llama.is_sharded("lm_head.weight")
    gpt2 = _trunk(build("gpt2"))
    assert isinstance(gpt2, Trunk) and gpt2.exit == "transformer.ln_f"  # which has no pipeline plan


def test_what_gathers_or_routes_tokens_gets_the_whole_sequence() -> None:
    model = build("olmo2")
    summed = _trunk(model)
    assert isinstance(summed, Trunk) and not summed.opaque
    assert summed.is_sharded("model.layers.0.self_attn.q_norm.weight")
    words = {"q": "colwise_gather_output", "k": "colwise_gather_output", "v": "colwise_gather_output"}
    gathers = {f"model.layers.*.self_attn.{n}_proj": w for n, w in (words | {"o": "rowwise_split_input"}).items()}
    gathers |= {f"model.layers.*.self_attn.{n}_norm": "replicate" for n in "qk"}
    olmo2 = find_trunk(model, resolve(model, collect_rules(model, gathers), complete=True))
    assert isinstance(olmo2, Trunk)
    assert olmo2.opaque == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    assert olmo2.blocks == [f"model.layers.{i}.mlp" for i in (0, 1)]
    assert not olmo2.is_sharded("model.layers.0.self_attn.q_norm.weight")
    hybrid = _hf("olmo2", num_key_value_heads=4)
    hybrid.model.layers[1].mlp = nn.Conv1d(4, 4, 3)  # of which the plan knows nothing
    found = _trunk(hybrid)
    assert isinstance(found, Trunk) and "model.layers.1.mlp" in found.opaque


@pytest.mark.parametrize(("kind", "dense"), [("qwen2_moe", ["shared_expert"]), ("mixtral", [])])
def test_blocks_of_experts_that_fold_over_the_axis_send_from_shards(kind: str, dense: list[str]) -> None:
    model = _hf(kind, num_key_value_heads=4, num_experts=8)
    targets, experts = resolve(model, collect_rules(model), complete=True), find_experts(model)

    def found(*, folded: bool = True) -> Trunk:
        trunk = find_trunk(model, targets, experts, folded=folded)
        assert isinstance(trunk, Trunk)
        return trunk

    whole, shards = found(folded=False), found()
    blocks = [f"model.layers.{i}.mlp" for i in (0, 1)]
    assert shards.experts == [f"{block}.experts" for block in blocks]
    assert set(blocks) <= {*whole.opaque} and not {*blocks} & {*shards.opaque}
    assert set(shards.blocks) - set(whole.blocks) == {f"{block}.{name}" for block in blocks for name in dense}
    assert shards.is_sharded(f"{blocks[0]}.gate.weight") and not whole.is_sharded(f"{blocks[0]}.gate.weight")
    assert not shards.is_sharded(f"{blocks[0]}.experts.down_proj"), "averaged over the ranks that hold it"
    mixtures = [layer.mlp for layer in model.model.layers]
    mixtures[0].mixer = nn.Conv1d(4, 4, 3)  # which may mix tokens
    mixtures[1].__class__ = own = type("Own", (type(mixtures[1]),), {"__module__": "own"})
    assert set(blocks) <= {*found().opaque}
    own.token_wise = True
    assert found().experts == [f"{blocks[1]}.experts"] and set(blocks) <= {*found(folded=False).opaque}


def test_an_mlp_written_out_gathers_by_itself() -> None:
    model = build("modular")
    found = _trunk(model)
    assert isinstance(found, Trunk)
    assert found.direct == ["layers.1.fc1", "layers.1.fc2"]
    assert found.blocks == ["layers.0.attn", "layers.0.mlp", "layers.1.attn"]
    assert found.opaque == ["layers.0.shift", "layers.1.shift"]
    assert found.exit is None and found.end == "layers.1"  # no plan says which norm is the last
    model.pp_plan = {"embed": ([], []), "layers": ([], []), "norm": ([], []), "head": ([], [])}
    found = _trunk(model)
    assert isinstance(found, Trunk) and found.end == "norm"


def test_what_cannot_be_cut_says_why_and_stays_whole() -> None:
    plain = build("plain")
    reason = _trunk(plain)
    assert isinstance(reason, str) and "blocks.0 (Block) holds up, down, down2 itself" in reason
    assert "no list of layers" in str(_trunk(Shallow()))
    shared = build("modular")
    shared.layers[0].norm.weight = shared.norm.weight
    assert "layers.0.norm.weight and norm.weight are one parameter" in str(_trunk(shared))
    bare = build("modular")
    bare.layers[0].router = nn.Linear(4, 4)
    assert "layers.0.router is a linear of the layer itself" in str(_trunk(bare))
    plugin, layout = TensorParallel(), Layout(tensor_parallel_size=2).resolve(2)
    plugin.check(layout, plain)  # not asked for: not an error
    with pytest.raises(ValueError, match="sequence_parallel=True, but the residual stream of Plain cannot be cut"):
        plugin.check(Layout(tensor_parallel_size=2, sequence_parallel=True).resolve(2), plain)


class Shallow(nn.Module):
    """No layers."""

    tp_plan = {"a": "colwise", "b": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def test_token_wise_modules_are_known_ones_and_those_that_say_so() -> None:
    class Router(nn.Linear):
        token_wise = True

    assert all(map(is_token_wise, (nn.LayerNorm(4), nn.RMSNorm(4), nn.Dropout(), nn.GELU(), Router(4, 4))))
    for other in (nn.BatchNorm1d(4), nn.Linear(4, 4), nn.MultiheadAttention(4, 2), nn.Sequential(nn.LayerNorm(4))):
        assert not is_token_wise(other)


@pytest.mark.parametrize(("shape", "ranks"), [((2, 5), 2), ((2, 5), 4), ((1, 1), 4), ((3, 4, 5), 7)])
def test_shards_in_order_are_the_tokens(shape: tuple[int, ...], ranks: int) -> None:
    tokens, whole = Tokens(shape, ranks), torch.randn(*shape, 3)
    parts = [local_part(whole, tokens, i) for i in range(ranks)]
    assert {tuple(p.shape) for p in parts} == {(*tokens.shard_shape, 3)}
    rows = torch.cat([p.flatten(0, -2) for p in parts])
    assert torch.equal(rows[: tokens.count].view(*shape, 3), whole) and not rows[tokens.count :].any()
    assert tokens.as_seen(2).shape == (tokens.count,) and tokens.as_seen(3) is tokens


# Random numbers


def test_streams_agree_outside_and_differ_inside() -> None:
    drawn = {}
    for rank in (0, 1):
        torch.manual_seed(3)
        streams = Streams(rank)
        numbers = [torch.rand(4)]
        with streams.local():
            numbers.append(torch.rand(4))
            with streams.shared():
                numbers.append(torch.rand(4))
            numbers.append(torch.rand(4))
        numbers.append(torch.rand(4))
        drawn[rank] = numbers
    same = [torch.equal(a, b) for a, b in zip(drawn[0], drawn[1], strict=True)]
    assert same == [True, False, True, False, True]
    everything = [tuple(n.tolist()) for numbers in drawn.values() for n in numbers]
    assert len(set(everything)) == 3 + 2 * 2


def test_a_part_is_repeated_from_the_state_at_its_entry_and_one_that_draws_nothing_leaves_no_trace() -> None:
    streams = Streams(1)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with streams.local():
        pass
    assert torch.equal(torch.get_rng_state(), state)

    def part() -> torch.Tensor:
        with streams.local():
            return torch.rand(3)

    first, second = part(), part()
    torch.set_rng_state(state)
    assert torch.equal(part(), first) and torch.equal(part(), second) and not torch.equal(first, second)


def test_a_failure_inside_leads_back_to_the_shared_stream() -> None:
    streams = Streams(0)
    with pytest.raises(RuntimeError), streams.whole():
        streams.enter()
        raise RuntimeError
    assert not streams.is_local
