"""Wrong packages and missing ones, a rank that never comes, and the command Lightning's launcher starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers import subprocess_script
from omegaconf import open_dict

from parallax import STRATEGY_NAMES, ParallaxStrategy
from parallax.plugins.launch import script_launcher
from parallax.plugins.launch.errors import is_shared
from parallax.strategies.agreement import Agreement
from parallax.strategies.comm import CommError
from parallax.strategies.import_hook import after_import
from parallax.strategies.other_lightning import explain_to_other_lightning


def test_pytorch_lightnings_trainer_says_what_to_import() -> None:
    """Imported after parallax, as here, or before it."""
    import pytorch_lightning as other  # comes with lightning

    explain_to_other_lightning(["parallax_late"])
    for name in (*STRATEGY_NAMES, "parallax_late"):
        with pytest.raises(ValueError) as caught:
            other.Trainer(strategy=name, accelerator="cpu", logger=False)
        assert str(caught.value) == (
            f"strategy={name!r} was given to the Trainer of pytorch_lightning, but Parallax works with the package "
            f"lightning, whose classes and registry are separate: use `from lightning.pytorch import Trainer, "
            f"LightningModule` (pip install lightning)"
        )
        assert is_shared(caught.value)
    with pytest.raises(
        ValueError, match=r"'tp2', a strategy of lightning.pytorch.Trainer; the Trainer of pytorch_light"
    ):
        other.Trainer(strategy=ParallaxStrategy("tp2"), accelerator="cpu", logger=False)
    del sys.modules[other.__name__]
    try:
        assert repr(ParallaxStrategy("tp2")) == "<ParallaxStrategy 'tp2', a strategy of lightning.pytorch.Trainer>"
    finally:
        sys.modules[other.__name__] = other


def test_after_import_acts_once_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[ModuleType] = []
    finders = list(sys.meta_path)
    after_import("imported_later", seen.append)
    assert not seen and len(sys.meta_path) == len(finders) + 1
    import imported_later  # type: ignore[import-not-found]

    assert seen == [imported_later] and imported_later.value == 3
    assert sys.meta_path == finders and type(imported_later.__spec__.loader).__name__ == "SourceFileLoader"
    after_import("imported_later", seen.append)
    assert seen == [imported_later, imported_later] and sys.meta_path == finders
    del sys.modules["imported_later"]


WITHOUT = """
import importlib.metadata, sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "pytorch_lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def from_name(name, found=importlib.metadata.Distribution.from_name):
    if name in ("transformers", "pytorch_lightning"):
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

sys.meta_path.insert(0, Absent())
importlib.metadata.Distribution.from_name = staticmethod(from_name)

import parallax
from tests.mpi.bad_input_script import Lit, fit
done = fit(Lit())
try:
    import mpi4py.MPI
except (ImportError, RuntimeError) as error:
    print("without MPI:", type(error).__name__)
print("trained", done.strategy.mesh.layout, done.global_step, "transformers" in sys.modules)
"""


def test_a_plain_module_trains_without_transformers_and_without_an_mpi_library() -> None:
    environment = dict(os.environ) | {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "without MPI: " in done.stdout, done.stdout + done.stderr
    assert "trained dp1 4 False" in done.stdout, done.stdout + done.stderr


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    agreement = Agreement(0, 2, "nonce", timedelta(seconds=0.2), store=dist.HashStore())
    with (
        pytest.raises(CommError, match=r"rank 0 waited 0.2 s after training_step for all ranks; 1 of 2 came"),
        agreement.together("training_step"),
    ):
        pass


def test_children_do_not_outlive_a_failed_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = script_launcher.ScriptLauncher(LightningEnvironment(), 2, 1)
    child = subprocess.Popen(["sleep", "60"])
    launcher.procs = [child]
    try:
        launcher.end_children()
        assert child.poll() is None  # no error: a child may have more to do than its parent
        monkeypatch.setattr(sys, "last_value", ValueError("mine"), raising=False)
        monkeypatch.setattr(script_launcher, "FAREWELL", 0.1)
        launcher.end_children()
        assert child.wait(10) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_children_are_started_by_the_command_the_user_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", "parallax", "train.py", "lr=1"])
    monkeypatch.setattr(sys, "argv", ["train.py", "lr=1"])
    typed = [sys.executable, "-X", "dev", "-m", "parallax", "train.py", "lr=1"]
    with script_launcher._own_commands():
        assert subprocess_script._basic_subprocess_cmd() == typed
        try:
            with initialize(version_base=None, config_path=None):
                config = compose(return_hydra_config=True, overrides=["hydra.run.dir=out"])
                with open_dict(config):
                    config.hydra.runtime.cwd = "/typed/here"
                HydraConfig.instance().set_config(config)
                command, folder = subprocess_script._hydra_subprocess_cmd(1)
        finally:
            HydraConfig.instance().cfg = None
            GlobalHydra.instance().clear()
    assert list(command[: len(typed)]) == typed and folder == "/typed/here"
    assert list(command[len(typed) :]) == [
        'hydra.run.dir="out"',
        "hydra.job.name=train_ddp_process_1",
        "hydra.output_subdir=null",
    ]
    assert subprocess_script._basic_subprocess_cmd is not script_launcher.same_command
