"""Pretrained weights: the same as `transformers` loads, and only the bytes of a rank's slices are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from parallax.plugins.base import ParamShard
from parallax.strategies.deferred import deferred_init
from parallax.strategies.materialize import materialize
from parallax.strategies.pretrained import load_pretrained
from parallax.strategies.pretrained_hf import _stacks
from parallax.strategies.recording import Recording
from parallax.strategies.weight_files import StoredWeight, WeightFiles

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 32,
}
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=1)
IDS = torch.arange(12).view(2, 6)


def saved(model: Any, folder: Path, **how: Any) -> Path:
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_()  # nothing is left at a value that initialisation would give
    model.save_pretrained(folder, **how)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(LlamaForCausalLM(LlamaConfig(**SMALL)), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama in several files."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
    folder = saved(model, tmp_path_factory.mktemp("tied"), max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def build(make: Callable[[], nn.Module]) -> tuple[Any, Recording]:
    with deferred_init() as recording:
        module = make()
    recording.capture(module)
    return module, recording


def real(make: Callable[[], nn.Module], shards: dict[str, ParamShard] | None = None) -> Any:
    module, recording = build(make)
    for fqn, shard in (shards or {}).items():
        owner, name = fqn.rsplit(".", 1)
        setattr(module.get_submodule(owner), name, nn.Parameter(shard.take(module.get_parameter(fqn))))
    materialize(module, recording, shard_of=(shards or {}).get, seed=0, device="cpu")
    return module


def same(ours: nn.Module, theirs: nn.Module) -> None:
    """Parameters, buffers (non-persistent too), dtypes, ties and mode are equal."""
    for kind in ("named_parameters", "named_buffers"):
        left, right = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert left.keys() == right.keys()
        for fqn, value in right.items():
            assert left[fqn].dtype == value.dtype and torch.equal(left[fqn], value), fqn
    assert [m.training for m in ours.modules()] == [m.training for m in theirs.modules()]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"dtype": torch.bfloat16},
        {"torch_dtype": "float64"},
        {"attn_implementation": "eager", "use_cache": False},
    ],
)
def test_equals_transformers(llama: Path, how: dict[str, Any]) -> None:
    ours = real(lambda: AutoModelForCausalLM.from_pretrained(llama, **how))
    theirs = AutoModelForCausalLM.from_pretrained(llama, **how)
    same(ours, theirs)
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.config._attn_implementation == theirs.config._attn_implementation
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


def test_construction_reads_nothing_and_sets_no_parameter(llama: Path) -> None:
    module, recording = build(lambda: LlamaForCausalLM.from_pretrained(llama))
    source = recording.source("lm_head.weight")
    assert isinstance(source, StoredWeight) and source.files.bytes_read == 0
    assert all(p.is_meta for p in module.parameters())
    assert not next(LlamaForCausalLM.from_pretrained(llama).parameters()).is_meta  # as before, afterwards


def test_several_files_and_tied_weights(tied: Path) -> None:
    ours = real(lambda: AutoModelForCausalLM.from_pretrained(tied))
    same(ours, AutoModelForCausalLM.from_pretrained(tied))
    assert ours.lm_head.weight is ours.model.embed_tokens.weight


def test_a_rank_reads_only_its_slices(tied: Path) -> None:
    """Index 1 of tp2: rows, columns, two KV blocks, and a vocabulary of 50 rows padded to 56."""
    q, down, embed = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"
    k = "model.layers.1.self_attn.k_proj.weight"
    shards = {
        q: ParamShard((32, 32), dim=0, ranges=((16, 32),)),
        down: ParamShard((32, 48), dim=1, ranges=((24, 48),)),
        k: ParamShard((16, 32), dim=0, ranges=((4, 8), (12, 16))),
    }
    vocabulary = ParamShard((50, 32), dim=0, ranges=((28, 50),), pad=6)

    def make() -> nn.Module:
        return nn.ModuleDict({"body": LlamaForCausalLM.from_pretrained(tied)})  # names gain a prefix

    module, recording = build(make)
    shards = {f"body.{fqn}": shard for fqn, shard in shards.items()}
    shards["body.model.embed_tokens.weight"] = shards[f"body.{embed}"] = vocabulary
    for fqn, shard in shards.items():
        owner, name = fqn.rsplit(".", 1)
        setattr(module.get_submodule(owner), name, nn.Parameter(shard.take(module.get_parameter(fqn))))
    module["body"].lm_head.weight = module["body"].model.embed_tokens.weight
    files = recording.source("body.lm_head.weight").files  # type: ignore[union-attr]
    materialize(module, recording, shard_of=shards.get, seed=0, device="cpu")

    whole = {fqn: p.numpy(force=True) for fqn, p in LlamaForCausalLM.from_pretrained(tied).state_dict().items()}
    ours = {fqn: p.numpy(force=True) for fqn, p in module["body"].state_dict().items()}
    assert (ours[q] == whole[q][16:]).all() and (ours[down] == whole[down][:, 24:]).all()
    assert (ours[k] == whole[k][[4, 5, 6, 7, 12, 13, 14, 15]]).all()
    assert ours[embed].shape == (28, 32)
    assert (ours[embed][:22] == whole[embed][28:]).all() and (ours[embed][22:] == 0).all()
    assert (ours["model.norm.weight"] == whole["model.norm.weight"]).all()
    assert module["body"].lm_head.weight is module["body"].model.embed_tokens.weight

    theory = 50 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32) + 32  # all elements of the model
    theory -= 28 * 32 + 16 * 32 + 32 * 24 + 8 * 32  # what this rank leaves out
    assert files.bytes_read == 4 * theory


def test_dropped_modules_are_not_read(llama: Path) -> None:
    module, recording = build(lambda: LlamaForCausalLM.from_pretrained(llama))
    files = recording.source("lm_head.weight").files  # type: ignore[union-attr]
    module.model.layers = nn.ModuleList([module.model.layers[1]])
    shared = {"model.layers.0.mlp.up_proj.weight"}
    module.model.layers[0] = nn.Identity()
    module.model.embed_tokens = nn.Identity()
    materialize(module, recording, shard_of=lambda fqn: None, seed=0, device="cpu")
    assert not shared & set(module.state_dict())
    assert files.bytes_read == 4 * (50 * 32 + 32)  # head and final norm


def test_weights_changed_after_loading_are_computed(llama: Path) -> None:
    def make() -> nn.Module:
        model = LlamaForCausalLM.from_pretrained(llama)
        with torch.no_grad():
            model.lm_head.weight[3].fill_(1.0)
            model.model.norm.weight.mul_(2)
        model.model.embed_tokens.weight.requires_grad_(False)
        model.half_head = nn.Parameter(model.lm_head.weight[:25].detach().clone())
        return model

    ours, stored = real(make), load_file(llama / "model.safetensors")
    head = stored["lm_head.weight"].clone()
    head[3] = 1.0
    assert torch.equal(ours.lm_head.weight, head) and torch.equal(ours.half_head, head[:25])
    assert torch.equal(ours.model.norm.weight, 2 * stored["model.norm.weight"])
    assert not ours.model.embed_tokens.weight.requires_grad


def test_base_model_prefix_is_taken_off_and_added(tmp_path: Path, llama: Path) -> None:
    with pytest.warns(UserWarning, match=r"no place for the stored lm_head.weight"):
        body = real(lambda: LlamaModel.from_pretrained(llama))
    same(body, LlamaModel.from_pretrained(llama))
    folder = saved(GPT2Model(GPT2), tmp_path)  # keys without "transformer.", and the head is tied
    assert "wte.weight" in load_file(folder / "model.safetensors")
    same(real(lambda: AutoModelForCausalLM.from_pretrained(folder)), GPT2LMHeadModel.from_pretrained(folder))
    same(real(lambda: AutoModel.from_pretrained(folder)), GPT2Model.from_pretrained(folder))


def test_names_and_shapes_that_do_not_fit_are_listed(tmp_path: Path, llama: Path) -> None:
    stored = load_file(llama / "model.safetensors")
    del stored["model.norm.weight"]
    stored["model.layers.0.extra"] = torch.ones(1)
    stored["lm_head.weight"] = torch.ones(49, 32)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(ValueError) as error, deferred_init():
        LlamaForCausalLM.from_pretrained(tmp_path)
    text = str(error.value)
    assert "not in the files: model.norm.weight" in text
    assert "not in the model: model.layers.0.extra" in text
    assert "lm_head.weight: (49, 32) in the file, (50, 32) in the model" in text
    with pytest.raises(ValueError, match=r"not in the files: score.weight"), deferred_init():
        AutoModelForSequenceClassification.from_pretrained(llama, num_labels=3)


def test_tied_weights_stored_twice(tmp_path: Path, tied: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tied)
    (tmp_path / "config.json").write_text((tied / "config.json").read_text())
    stored = {fqn: value.clone() for fqn, value in model.state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    same(real(lambda: LlamaForCausalLM.from_pretrained(tmp_path)), model)
    stored["lm_head.weight"][0, 0] += 1
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="tie_word_embeddings=False"), deferred_init():
        LlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"device_map": "auto"}, "device_map='auto'"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"output_loading_info": True}, "output_loading_info=True"),
        ({"use_safetensors": False}, "use_safetensors=False"),
        ({"dtype": "float33"}, "dtype must be .* got 'float33'"),
    ],
)
def test_options_without_support_are_named(llama: Path, kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text), deferred_init():
        LlamaForCausalLM.from_pretrained(llama, **kwargs)


@pytest.mark.parametrize("cls", [LlamaForCausalLM, AutoModelForCausalLM])
def test_hub_ids_are_refused(cls: Any) -> None:
    with pytest.raises(ValueError, match="'some/model' is not a local folder"), deferred_init():
        cls.from_pretrained("some/model")


def test_other_formats_are_refused(tmp_path: Path, llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds no weights"), deferred_init():
        LlamaForCausalLM.from_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"\.bin weights.*save_pretrained"), deferred_init():
        LlamaForCausalLM.from_pretrained(tmp_path)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="not there: model-00001-of-00002"), deferred_init():
        LlamaForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="quantization_config"), deferred_init():
        LlamaForCausalLM.from_pretrained(tmp_path)


MOE = MixtralConfig(**{**SMALL, "num_hidden_layers": 1}, num_local_experts=4, experts_implementation="eager")


def test_experts_that_are_stored_one_by_one(tmp_path: Path) -> None:
    """transformers writes each expert's matrices by themselves, and stacks them when it loads."""
    saved(MixtralForCausalLM(MOE), tmp_path)
    keys = WeightFiles(tmp_path).keys()
    assert any(".experts.0.w1" in key or ".experts.0.gate_proj" in key for key in keys)
    model, recording = build(lambda: MixtralForCausalLM.from_pretrained(tmp_path, experts_implementation="eager"))
    materialize(model, recording, shard_of=lambda fqn: None, seed=0, device="cpu")
    want = MixtralForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in want.state_dict().items()}
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in want.state_dict().items())
    assert torch.equal(model(IDS).logits, want.eval()(IDS).logits)


@pytest.mark.parametrize("stored", ["one by one", "in one tensor"])
def test_a_rank_reads_its_own_experts_only(tmp_path: Path, stored: str) -> None:
    """Experts 2 and 3 of 4, cut inside over two ranks as well."""
    model = MixtralForCausalLM(MOE)
    if stored == "one by one":
        saved(model, tmp_path)
    else:
        torch.manual_seed(3)
        save_file({n: torch.randn_like(t) for n, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    whole = MixtralForCausalLM(MOE)
    load_pretrained(whole, tmp_path)
    experts = "model.layers.0.mlp.experts"
    inner = {
        f"{experts}.gate_up_proj": ParamShard((2, 96, 32), 1, ((0, 24), (48, 72))),
        f"{experts}.down_proj": ParamShard((2, 32, 48), 2, ((24, 48),)),
    }
    state = whole.state_dict()
    shards = {n: ParamShard(tuple(state[n].shape), 0, ((2, 4),), axis="ep", inner=cut) for n, cut in inner.items()}
    part = MixtralForCausalLM(MOE)
    for name in shards:
        local = nn.Parameter(torch.zeros(shards[name].local_shape))
        setattr(part.get_submodule(experts), name.rpartition(".")[2], local)
    read = load_pretrained(part, tmp_path, shards.get)
    for name, tensor in part.state_dict().items():
        assert torch.equal(tensor, shards[name].take(state[name]) if name in shards else state[name])
    everything = 4 * sum(t.numel() for t in state.values())
    assert read == everything - 4 * sum(state[n].numel() for n in shards) // 2


def test_experts_of_which_pieces_are_missing(tmp_path: Path) -> None:
    saved(MixtralForCausalLM(MOE), tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    del stored[next(key for key in stored if ".experts.2." in key and ("w1" in key or "gate_proj" in key))]
    save_file(stored, file)
    with pytest.raises(ValueError, match="unequal numbers of pieces"), deferred_init():
        MixtralForCausalLM.from_pretrained(tmp_path)


def test_rules_that_do_more_than_stack_are_not_taken_for_it() -> None:
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

    one, two = ".experts.*.w1.weight", ".experts.*.w3.weight"
    target = ".experts.gate_up_proj"
    assert _stacks(WeightConverter([one, two], target, [MergeModulelist(dim=0), Concatenate(dim=1)]))
    assert _stacks(WeightConverter(one, target, [MergeModulelist(dim=0)]))
    assert not _stacks(WeightConverter([one, two], target, [MergeModulelist(dim=0), Concatenate(dim=2)]))
    assert not _stacks(WeightConverter(one, target, [MergeModulelist(dim=0), Transpose(1, 2)]))
    assert not _stacks(WeightConverter([one, two], target, [Concatenate(dim=0)]))


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    stored = {"0.weight": torch.randn(6, 4), "0.bias": torch.randn(6)}
    save_file(stored, tmp_path / "model.safetensors")
    yield tmp_path, stored


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_pretrained_into_a_module(plain: tuple[Path, dict[str, Tensor]], device: str) -> None:
    folder, stored = plain
    module = nn.Sequential(nn.Linear(4, 6, device=device, dtype=torch.float64))
    weight = module[0].weight
    assert load_pretrained(module, folder) == 4 * (24 + 6)
    assert torch.equal(module[0].weight, stored["0.weight"].double())
    assert torch.equal(module[0].bias, stored["0.bias"].double())
    assert (module[0].weight is weight) == (device == "cpu")

    part = nn.Sequential(nn.Linear(4, 2, device=device))
    shards = {
        "0.weight": ParamShard((6, 4), dim=0, ranges=((4, 6),)),
        "0.bias": ParamShard((6,), dim=0, ranges=((4, 6),)),
    }
    assert load_pretrained(part, folder, shards.get) == 4 * (8 + 2)
    assert torch.equal(part[0].weight, stored["0.weight"][4:])
    assert torch.equal(part[0].bias, stored["0.bias"][4:])


def test_load_pretrained_checks_names_and_shapes(plain: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = plain
    with pytest.raises(ValueError, match="not in the model: 0.bias"):
        load_pretrained(nn.Sequential(nn.Linear(4, 6, bias=False)), folder)
    assert load_pretrained(nn.Sequential(nn.Linear(4, 6, bias=False)), folder, strict=False) == 4 * 24
    with pytest.raises(ValueError, match=r"0.weight: \(6, 4\) in the file, \(6, 5\) in the model"):
        load_pretrained(nn.Sequential(nn.Linear(5, 6)), folder)


def test_load_pretrained_into_a_transformers_model(tied: Path) -> None:
    module = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)).eval()
    load_pretrained(module, tied)
    same(module, LlamaForCausalLM.from_pretrained(tied))


def test_files_know_shape_and_dtype(plain: tuple[Path, dict[str, Tensor]]) -> None:
    files = WeightFiles(plain[0])
    assert files.keys() == ["0.bias", "0.weight"]
    assert (files.shape("0.weight"), files.dtype("0.weight"), files.bytes_read) == ((6, 4), torch.float32, 0)
    with pytest.raises(ValueError, match=r"0.weight in .* has shape \(6, 4\), the model expects \(8, 4\)"):
        files.read("0.weight", ParamShard((8, 4), dim=0, ranges=((0, 4),)))
