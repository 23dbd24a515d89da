"""The shipped configuration files: every layout resolves, every model can be cut as the layouts cut it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import lightning as L
import pytest
from omegaconf import OmegaConf

import parallax.conf
from parallax.strategies.layout import Layout

CONF = Path(parallax.conf.__file__).parent
LAYOUTS = sorted(p.stem for p in (CONF / "layout").glob("*.yaml") if p.stem != "auto")
MODELS = sorted(p.stem for p in (CONF / "model").glob("*.yaml"))


def load(group: str, name: str) -> dict:
    return OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))


def world_in_name(name: str) -> int:
    """The world size a file name promises: tp2_pp2_dp2_zero1 -> 8."""
    return math.prod(int(size) for size in re.findall(r"[tpcd]p(\d+)", name))


def test_there_are_layouts_and_models() -> None:
    assert {"single", "tp2_pp2_dp2_zero1", "dp8_zero2"} <= set(LAYOUTS)
    assert {"llama_tiny", "llama_small"} <= set(MODELS)


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
    assert found == {"tp": 1, "pp": 1, "dp": 1, "zero": 0} | said
    with pytest.raises(ValueError, match=f"there are {world + 1}"):
        Layout.from_any(CONF / "layout" / f"{name}.yaml").resolve(world + 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_fits_the_default_batch_and_model(name: str) -> None:
    layout = Layout.from_any(CONF / "layout" / f"{name}.yaml").resolve(world_in_name(name))
    data, model = load("data", "stdlib"), load("model", "llama_tiny")
    share, left = divmod(data["global_batch_size"], layout.data_parallel_size)
    assert left == 0 and share % layout.num_microbatches == 0
    assert model["num_hidden_layers"] >= layout.pipeline_parallel_size
    for key in ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size"):
        assert model[key] % layout.tensor_parallel_size == 0


@pytest.mark.parametrize("name", MODELS)
def test_model_takes_every_key(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    conf = load("model", name)
    config = transformers.LlamaConfig(**conf)
    assert set(conf) <= set(transformers.LlamaConfig().to_dict())  # an unknown key would be kept without a word
    assert {key: getattr(config, key) for key in conf} == conf


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "trainer").glob("*.yaml")))
def test_trainer_takes_every_key(name: str, tmp_path: Path) -> None:
    conf = load("trainer", name) | {"accelerator": "cpu", "devices": 1}
    trainer = L.Trainer(**conf, logger=False, enable_checkpointing=False, default_root_dir=tmp_path, barebones=False)
    assert trainer.max_steps == conf["max_steps"]
    assert trainer.gradient_clip_val == conf["gradient_clip_val"]


def test_root_composes_with_overrides() -> None:
    hydra = pytest.importorskip("hydra")
    with hydra.initialize_config_dir(str(CONF.resolve()), version_base="1.3"):
        changes = ["layout=dp8_zero2", "trainer.max_steps=5", "data.path=/some/texts"]
        conf = hydra.compose("train_llama", overrides=changes)
    assert conf.layout.zero_stage == 2 and conf.layout.data_parallel_size == 8
    assert conf.trainer.max_steps == 5 and conf.data.path == "/some/texts"
    assert conf.model.hidden_size == load("model", "llama_tiny")["hidden_size"]
