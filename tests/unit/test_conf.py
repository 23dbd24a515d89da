"""The shipped configuration files: every layout resolves, every model is the one its name says, each can be cut."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path

import lightning as L
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from parallax.conf import CONF_DIR
from parallax.conf.models import NAMES, arguments, build_model, hf_config, parameter_count
from parallax.conf.reading import read
from parallax.conf.schema import FAMILIES, ModelConf, RunConf
from parallax.strategies.layout import Layout

CONF = Path(CONF_DIR)
LAYOUTS = sorted(p.stem for p in (CONF / "layout").glob("*.yaml") if p.stem != "auto")
MODELS = sorted(p.stem for p in (CONF / "model").glob("*.yaml"))
GROUPS = ("model", "layout", "cluster", "trainer", "data", "sweep")

PARAMETERS = {
    "gpt2": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
}
"""Of the published models, from their weight files."""


def load(group: str, name: str) -> RunConf:
    return read({group: OmegaConf.load(CONF / group / f"{name}.yaml")})


def composed(*overrides: str) -> RunConf:
    with initialize_config_dir(CONF_DIR, version_base="1.3"):
        return read(compose("train_llama", overrides=list(overrides)))


def world_in_name(name: str) -> int:
    """The world size a file name promises: tp2_pp2_dp2_zero1 -> 8."""
    return math.prod(int(size) for size in re.findall(r"[tpcd]p(\d+)", name))


def test_groups_hold_what_they_should() -> None:
    assert {"single", "tp2_pp2_dp2_zero1", "dp8_zero2"} <= set(LAYOUTS)
    assert {"llama_tiny", "gpt2_tiny", "mixtral_tiny", "plain_tiny", *PARAMETERS} <= set(MODELS)
    assert {load("model", name).model.family for name in MODELS} == set(FAMILIES)
    assert all(any((CONF / group).glob("*.yaml")) for group in GROUPS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_what_its_name_says(name: str) -> None:
    world = world_in_name(name)
    layout = Layout.from_any(CONF / "layout" / f"{name}.yaml").resolve(world)
    assert layout.world_size == world
    said = {word: int(number) for word, number in re.findall(r"([a-z]+)(\d+)", name)}
    found = {
        "tp": layout.tensor_parallel_size,
        "pp": layout.pipeline_parallel_size,
        "dp": layout.data_parallel_size,
        "zero": layout.zero_stage,
    }
    micro = said.pop("mb", None)
    assert found == {"tp": 1, "pp": 1, "dp": 1, "zero": 0} | said
    assert micro in (None, layout.num_microbatches)
    with pytest.raises(ValueError, match=f"there are {world + 1}"):
        Layout.from_any(CONF / "layout" / f"{name}.yaml").resolve(world + 1)


def test_a_file_named_like_a_layout_in_words_is_that_layout() -> None:
    for name in LAYOUTS:
        try:
            words = Layout.parse(name)
        except ValueError:
            continue
        world = words.ranks_needed
        assert Layout.from_any(CONF / "layout" / f"{name}.yaml").resolve(world) == words.resolve(world), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_fits_the_default_batch_and_model(name: str) -> None:
    layout = Layout.from_any(CONF / "layout" / f"{name}.yaml").resolve(world_in_name(name))
    data, model = load("data", "stdlib").data, load("model", "llama_tiny").model
    share, left = divmod(data.global_batch_size, layout.data_parallel_size)
    assert left == 0 and share % layout.num_microbatches == 0
    assert model.num_layers >= layout.pipeline_parallel_size
    for key in ("num_heads", "num_kv_heads", "hidden_size", "intermediate_size", "vocab_size"):
        assert getattr(model, key) % layout.tensor_parallel_size == 0


@pytest.mark.parametrize("name", MODELS)
def test_model_is_the_one_it_says(name: str) -> None:
    model = load("model", name).model
    if model.family != "plain":
        config = hf_config(model)
        asked = {key: value for key, value in {**arguments(model), **model.options}.items() if key != "rope_theta"}
        assert {key: getattr(config, key) for key in asked} == asked
        kept = [key for key in asked if not hasattr(type(config)(), key)]  # by any configuration class, but never read
        assert set(kept) <= {"head_dim"}  # which the attention of Qwen3-MoE reads, as the parameters show
        if model.rope_theta is not None:
            assert config.rope_parameters["rope_theta"] == model.rope_theta
    count = parameter_count(model)
    if name in PARAMETERS:
        assert count == PARAMETERS[name]
    else:
        said = re.search(r"([\d.]+) million", (CONF / "model" / f"{name}.yaml").read_text().replace("\n# ", " "))
        assert float(said[1]) == round(count / 1e6, 1 if count < 1e7 else 0)


def test_each_family_computes_its_loss() -> None:
    import torch

    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(3))
    for name in (name for name in MODELS if name.endswith("_tiny")):
        torch.manual_seed(0)
        loss = build_model(load("model", name).model)(input_ids=ids, labels=ids).loss
        assert abs(loss.item() - math.log(256)) < 0.5, name  # untrained: all bytes are about as likely


def test_keys_of_other_families_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model.num_experts=8 is of no use to family 'llama'"):
        arguments(ModelConf(num_experts=8))
    with pytest.raises(ValueError, match=r"family 'plain' takes neither"):
        arguments(ModelConf(family="plain", options={"bias": True}))
    with pytest.raises(ValueError, match=r"did you mean 'attention_bias'"):
        hf_config(ModelConf(options={"atention_bias": True}))
    assert all(set(names) <= set(asdict(ModelConf())) for names in NAMES.values())


def test_weights_of_a_local_folder(tmp_path: Path) -> None:
    import torch

    conf = ModelConf(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48)
    saved = build_model(conf)
    saved.save_pretrained(tmp_path)
    again = build_model(ModelConf(**{**asdict(conf), "weights": tmp_path}))
    for (name, a), (_, b) in zip(saved.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(ValueError, match=r"model.num_layers is 2, but num_hidden_layers in .* is 1: set"):
        build_model(ModelConf(**{**asdict(conf), "weights": tmp_path, "num_layers": 2}))
    with pytest.raises(ValueError, match=r"holds a 'llama', but model.family=gpt2"):
        build_model(ModelConf(family="gpt2", hidden_size=32, num_heads=2, weights=tmp_path))
    with pytest.raises(ValueError, match="there is no .*config.json"):
        build_model(ModelConf(**{**asdict(conf), "weights": tmp_path / "nowhere"}))


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "trainer").glob("*.yaml")))
def test_trainer_takes_every_key(name: str, tmp_path: Path) -> None:
    conf = asdict(load("trainer", name).trainer) | {"accelerator": "cpu", "devices": 1}
    trainer = L.Trainer(
        **conf.pop("options"), **conf, logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    assert trainer.max_steps == conf["max_steps"]
    assert trainer.gradient_clip_val == conf["gradient_clip_val"]


def test_root_composes_with_overrides() -> None:
    conf = composed("layout=dp8_zero2", "trainer.max_steps=5", "data.path=/some/texts", "model.num_layers=2")
    assert conf.layout == Layout.parse("dp8 zero2")
    assert (conf.trainer.max_steps, conf.data.path, conf.model.num_layers) == (5, Path("/some/texts"), 2)
    assert conf.model.hidden_size == load("model", "llama_tiny").model.hidden_size


def test_layouts_need_no_file() -> None:
    assert composed("layout=tp2 pp2 dp2 zero1 gpipe mb4").layout == Layout.parse("tp2 pp2 dp2 zero1 gpipe mb4")
    assert composed("layout=tp2 dp4", "layout.zero_stage=2").layout == Layout.parse("tp2 dp4 zero2")
    assert composed().layout == Layout()


def test_every_sweep_composes() -> None:
    for ranks in (2, 4, 8):
        conf = composed(f"+sweep=layouts_{ranks}")
        assert (conf.sweep.ranks, conf.cluster.ranks) == (ranks, ranks)
        assert conf.trainer.limit_val_batches == 0 and not conf.save


def test_all_clusters_and_data_compose() -> None:
    assert composed("cluster=here_torchrun").cluster.starter == "torchrun"
    conf = composed("cluster=hosts", "cluster.hostfile=h.txt", "cluster.ranks=16", "data=folder", "data.path=/t")
    assert (conf.cluster.hostfile, conf.cluster.ranks, conf.data.path) == (Path("h.txt"), 16, Path("/t"))
