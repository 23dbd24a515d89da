"""The schema: what it lists, and what it refuses, with the nearest thing that is right."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallax.cli import main
from parallax.conf import CONF_DIR
from parallax.conf.hydra_app import explain_hydra
from parallax.conf.keys import attribute_docs, keys
from parallax.conf.reading import read, relative_paths
from parallax.conf.schema import RunConf
from parallax.strategies.layout import Layout
from parallax.strategies.strategy import ParallaxStrategy


class Documented:
    first: int = 1
    """One
    line."""
    second: str = "a"
    third: int = 2
    """Third."""


def test_docstrings_below_attributes_are_found() -> None:
    assert attribute_docs(Documented) == {"first": "One line.", "second": "", "third": "Third."}


def test_every_key_has_a_meaning_and_every_size_a_unit() -> None:
    listed = {key.name: key for key in keys(RunConf)}
    assert {f"layout.{field.name}" for field in fields(Layout)} <= set(listed)
    assert [name for name, key in listed.items() if not key.meaning] == []
    ends = ("_size", "num_layers", ".ranks", "_steps", "_bytes")
    sizes = [key for name, key in listed.items() if name.endswith(ends)]
    assert len(sizes) > 10 and [key.name for key in sizes if not key.unit] == []


def test_defaults_and_units_are_those_of_the_dataclass() -> None:
    listed = {key.name: key for key in keys(RunConf)}
    plain = OmegaConf.to_container(OmegaConf.structured(RunConf))
    for name, key in listed.items():
        value = plain
        for part in name.split("."):
            value = value[part]
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        assert key.default == shown, name
    assert listed["layout.tensor_parallel_size"].unit == "ranks"
    assert listed["layout.zero_stage"].meaning.endswith("3 parameters too.")


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--help"]) == 0
    out = capsys.readouterr().out
    for key in keys(RunConf):
        assert f"\n{key.name}: {key.type} = {key.default}" in out
    assert "hydra.launcher.time_limit: float | None = 1800.0 (seconds)" in out
    assert main(["config", "cluster"]) == 0
    out = capsys.readouterr().out
    assert "cluster.ranks" in out and "layout." not in out
    assert main(["config", "clutser"]) == 2
    assert "did you mean 'cluster'" in capsys.readouterr().err


def test_a_file_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("layout: {tensor_parallel_size: 2}\nmodel: {num_layers: 3}\n")
    assert main(["config", str(file)]) == 0
    capsys.readouterr()
    file.write_text("model: {num_layer: 3}\n")
    assert main(["config", str(file)]) == 2
    assert "did you mean 'num_layers'" in capsys.readouterr().err


WRONG = {
    "unknown key": ({"model": {"num_layer": 3}}, r"key in 'model' 'num_layer'; did you mean 'num_layers'"),
    "unknown group": ({"modle": {}}, r"unknown key 'modle'; did you mean 'model'"),
    "unknown layout key": ({"layout": {"tensor_paralel_size": 2}}, r"did you mean 'tensor_parallel_size'"),
    "type": ({"model": {"num_layers": "four"}}, r"model.num_layers: .*int is expected, in layers \(default 4\)"),
    "type of a union": ({"trainer": {"devices": [1]}}, r"trainer.devices: .*int \| str is expected"),
    "layout value": ({"layout": {"tensor_parallel_size": 0}}, r"must be a whole number, at least 1; got 0"),
    "schedule": ({"layout": {"schedule": "1f1v"}}, r"did you mean '1f1b'"),
    "family": ({"model": {"family": "lama"}}, r"unknown model.family 'lama'; did you mean 'llama'"),
    "starter": ({"cluster": {"starter": "mpirn"}}, r"did you mean 'mpirun'"),
    "size": ({"model": {"num_layers": 0}}, r"model.num_layers=0 must be at least 1"),
    "heads": ({"model": {"num_heads": 3}}, r"hidden_size=128 is not divisible by model.num_heads=3; use num_heads=2"),
    "kv heads": ({"model": {"num_kv_heads": 3}}, r"num_kv_heads=3 does not divide num_heads=4; use one of 1, 2, 4"),
    "axis": ({"sweep": {"sizes": ["tp", "xp"]}}, r"unknown sweep.sizes 'xp'.*Valid: tp, pp, cp, ep, dp"),
    "varied key": ({"sweep": {"vary": {"zero_stag": [1]}}}, r"did you mean 'zero_stage'"),
    "varied size": ({"sweep": {"vary": {"tp": [1, 2]}}}, r"sweep.vary.tp: sizes of axes are divided by sweep.sizes"),
    "interpolation": ({"data": {"path": "${nowhere}/texts"}}, r"data.path: an interpolation leads nowhere: "),
    "missing": ({"data": {"path": "???"}}, r"data.path must be given"),
    "torchrun on hosts": ({"cluster": {"starter": "torchrun", "hostfile": "h"}}, r"serves this machine only"),
    "no file": ("nowhere.yaml", r"there is no configuration file 'nowhere.yaml'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    given, expected = WRONG[name]
    with pytest.raises(ValueError, match=expected):
        read(given)


COMMAND_LINES = {
    "model=lama_tiny": r"unknown option of group 'model' 'lama_tiny'; did you mean 'llama_tiny'",
    "modle=llama_tiny": r"unknown key 'modle'; did you mean 'model'",
    "layout=tq2 dp4": r"neither a file \(auto, .* nor a layout in words: .*did you mean 'tp2'",
    "layout.tensor_size=2": r"key in 'layout' 'tensor_size'; did you mean 'tensor_parallel_size'",
    "model.num_layers=four": r"model.num_layers: .*int is expected, in layers",
    "hydra/launcher=submitit_local": r"unknown option of group 'hydra/launcher' 'submitit_local'.*parallax",
    "model.num_layers=[1": r"no viable alternative at input",
}


@pytest.mark.parametrize("text", COMMAND_LINES)
def test_command_lines_are_explained(text: str) -> None:
    with (
        initialize_config_dir(CONF_DIR, version_base="1.3"),
        pytest.raises((HydraException, OmegaConfBaseException)) as caught,
    ):
        compose("train_llama", overrides=[text])
    with pytest.raises(ValueError, match=COMMAND_LINES[text]):
        raise explain_hydra(caught.value)


def test_a_mistyped_group_that_is_added_is_found_when_read() -> None:
    with initialize_config_dir(CONF_DIR, version_base="1.3"):
        conf = compose("train_llama", overrides=["+sweeep=layouts_8"])
    with pytest.raises(ValueError, match=r"unknown key 'sweeep'; did you mean 'sweep'"):
        read(conf)


def test_changes_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {max_steps: 7}\nmodel: {num_layers: 3}\n")
    conf = read(str(file), "trainer.max_steps=9", "layout.zero_stage=1")
    assert (conf.trainer.max_steps, conf.model.num_layers, conf.layout.zero_stage) == (9, 3, 1)


def test_relative_paths_are_found() -> None:
    conf = read({"data": {"path": "texts"}, "output_dir": "/absolute", "model": {"weights": "~/llama"}})
    assert list(relative_paths(conf)) == [("data.path", Path("texts"))]


def test_a_layout_file_is_the_strategys_keywords() -> None:
    strategy = ParallaxStrategy(**OmegaConf.load(Path(CONF_DIR) / "layout" / "tp2_dp4_zero1.yaml"))
    assert strategy.requested_layout == Layout.parse("tp2 dp4 zero1")


def test_hydra_finds_the_plugin_without_importing_torch() -> None:
    code = (
        "import sys; from hydra.core.plugins import Plugins; from hydra.plugins.launcher import Launcher\n"
        "print([c.__name__ for c in Plugins.instance().discover(Launcher)], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "ParallaxLauncher" in done.stdout and done.stdout.strip().endswith("False")
