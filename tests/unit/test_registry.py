"""Plugins of real distributions on sys.path: discovery, clash, failed import, broken contract."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallax.plugins import registry
from parallax.plugins.base import ParallelPlugin
from parallax.plugins.data.base import DataEngine
from parallax.plugins.registry import GROUPS, Plugin, PluginError, available, load, names

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lay a distribution out as pip does, in a folder of its own on sys.path."""

    def make(name: str, entry_points: str, version: str = "1.0", folder: str = "", **modules: str) -> None:
        site = tmp_path / (folder or name)
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))

    return make


def _row(group: str, name: str) -> Plugin:
    (row,) = [row for row in available(group) if row.name == name]
    return row


def test_own_plugins_are_found_once_by_their_entry_points() -> None:
    assert {"tensor", "pipeline"} <= set(names("parallax.parallelism"))
    assert {"1f1b", "gpipe"} <= set(names("parallax.schedules"))
    assert {"ddp", "deepspeed"} <= set(names("parallax.data_engines"))
    rows = [row for group in GROUPS for row in available(group) if row.distribution == "lightning-parallax"]
    assert len({(row.group, row.name) for row in rows}) == len(rows) >= 6
    assert [row.error for row in rows] == [None] * len(rows)
    assert issubclass(load("parallax.parallelism", "tensor"), ParallelPlugin)
    assert issubclass(load("parallax.data_engines", "ddp"), DataEngine)


def test_a_third_partys_plugin_is_found_and_loaded(install: Install) -> None:
    install(
        "zigzag",
        "[parallax.schedules]\nzigzag = px_zigzag:make\n[parallax.probes]\nclock = px_zigzag:make\n",
        version="3.1",
        px_zigzag="def make():\n    return 'zz'\n",
    )
    assert "zigzag" in names("parallax.schedules")
    assert load("parallax.schedules", "zigzag")() == "zz"
    assert _row("parallax.schedules", "zigzag") == Plugin(
        "parallax.schedules", "zigzag", "zigzag", "3.1", "px_zigzag:make", None
    )
    assert "clock" in names("parallax.probes")


def test_a_plugin_that_is_gone_is_gone(install: Install) -> None:
    before = names("parallax.probes")
    install("brief", "[parallax.probes]\nbrief = math:sqrt\n")
    assert names("parallax.probes") == sorted([*before, "brief"])
    sys.path.pop(0)
    assert names("parallax.probes") == before


def test_one_distribution_found_twice_is_no_clash(install: Install) -> None:
    """An editable install: the same distribution on two folders of the path; the first one counts."""
    for folder, value in (("site", 1), ("src", 2)):
        install("twice", "[parallax.probes]\ntwice = px_twice:f\n", folder=folder, px_twice=f"f = lambda: {value}\n")
    assert load("parallax.probes", "twice")() == 2  # prepended last, so first on the path
    assert _row("parallax.probes", "twice").error is None


def test_a_clash_names_both_distributions_and_harms_no_other_plugin(install: Install) -> None:
    install("left", "[parallax.schedules]\nsame = math:sqrt\n")
    install("right", "[parallax.schedules]\nsame = math:floor\n", version="2.0")
    with pytest.raises(PluginError) as caught:
        load("parallax.schedules", "same")
    for part in ("schedule 'same'", "left 1.0", "math:sqrt", "right 2.0", "math:floor", "uninstall"):
        assert part in str(caught.value)
    rows = [row for row in available("parallax.schedules") if row.name == "same"]
    assert [row.distribution for row in rows] == ["left", "right"]
    assert "right 2.0" in str(rows[0].error) and "left 1.0" in str(rows[1].error)
    assert names("parallax.schedules").count("same") == 1
    assert callable(load("parallax.schedules", "gpipe"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_package_at_all\n", "ModuleNotFoundError"),
        ("raise KeyError('libamd_smi.so')\n", "KeyError"),
        ("", "AttributeError"),
    ],
)
def test_a_failed_import_names_the_distribution(install: Install, source: str, reason: str) -> None:
    install("broken", "[parallax.probes]\nbroken = px_broken:probe\n", px_broken=source)
    assert "broken" in names("parallax.probes")
    with pytest.raises(PluginError, match=rf"probe 'broken' of broken 1\.0 \(px_broken:probe\).*{reason}"):
        load("parallax.probes", "broken")
    assert reason in str(_row("parallax.probes", "broken").error)


PLUGINS = """
from parallax.plugins.base import ParallelPlugin
from parallax.plugins.data.base import DataEngine

class Good(ParallelPlugin):
    name, axis = "good", "cp"
    def check(self, layout, model): ...
    def apply(self, model, *, mesh, layout): ...

class Renamed(Good):
    name = "other"

class NoAxis(ParallelPlugin):
    name = "noaxis"
    def check(self, layout, model): ...
    def apply(self, model, *, mesh, layout): ...

class Abstract(ParallelPlugin):
    name, axis = "abstract", "cp"

class Engine(DataEngine):
    name, zero_stages = "engine", (0,)

number = 3
"""


def test_what_does_not_fit_its_contract_is_refused(install: Install) -> None:
    install(
        "contracts",
        "[parallax.parallelism]\ngood = px_c:Good\nrenamed = px_c:Renamed\nnoaxis = px_c:NoAxis\n"
        "abstract = px_c:Abstract\nengine = px_c:Engine\nnumber = px_c:number\n"
        "[parallax.data_engines]\nengine = px_c:Engine\ngood = px_c:Good\n"
        "[parallax.schedules]\nnumber = px_c:number\n",
        px_c=PLUGINS,
    )
    assert load("parallax.parallelism", "good").axis == "cp"
    for group, name, reason in (
        ("parallax.parallelism", "renamed", "name = 'other'"),
        ("parallax.parallelism", "noaxis", "lacks the class attribute axis"),
        ("parallax.parallelism", "abstract", "does not define apply, check"),
        ("parallax.parallelism", "engine", "subclass of parallax.plugins.base.ParallelPlugin"),
        ("parallax.parallelism", "number", "subclass of parallax.plugins.base.ParallelPlugin"),
        ("parallax.data_engines", "good", "subclass of parallax.plugins.data.base.DataEngine"),
        ("parallax.data_engines", "engine", "does not define backward, check"),
        ("parallax.schedules", "number", "must be callable, but is of type int"),
    ):
        with pytest.raises(PluginError, match="of contracts 1.0") as caught:
            load(group, name)
        assert reason in str(caught.value)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'gpip'; did you mean 'gpipe'.*1f1b"):
        load("parallax.schedules", "gpip")
    with pytest.raises(ValueError, match="unknown plugin group 'parallax.schedule'; did you mean 'parallax.schedules'"):
        names("parallax.schedule")
    with pytest.raises(ValueError, match="unknown probe 'nvm'; did you mean 'nvml'"):
        load("parallax.probes", "nvm")


def test_a_group_without_plugins_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "GROUPS", {"parallax.nobody_has_this": "thing"})
    with pytest.raises(ValueError, match="no thing 'x': no installed distribution has an entry point in parallax.nob"):
        load("parallax.nobody_has_this", "x")


def test_the_registry_keeps_nothing() -> None:
    kept = {k: v for k, v in vars(registry).items() if isinstance(v, dict | list | set) and not k.startswith("__")}
    assert kept == {}
