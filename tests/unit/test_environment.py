"""Which launcher is recognised from which variables, and what follows from it, without starting any."""

from __future__ import annotations

import os
import shlex
import sys

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors import accelerator_connector

from parallax.plugins.launch import choose_environment, local_world_size, mpirun, prepare
from parallax.plugins.launch.choose import node_count
from parallax.plugins.launch.detect import MPILaunch, launched_rank, mpi_launch
from parallax.plugins.launch.mpi import ParallaxMPIEnvironment
from parallax.plugins.launch.rendezvous import addresses

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "prterun-node-1@1",
}
HYDRA = {"PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}
SRUN = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "PMI_SIZE": "8",
    "PMI_RANK": "5",
    "PMIX_RANK": "5",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
}
ONE_NODE = {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}
ALLOCATION = {"SLURM_JOB_ID": "12345", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
"""What a process under mpirun inherits inside a Slurm allocation, where srun has started mpirun's daemons."""


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        (OPEN_MPI, MPILaunch("Open MPI", 5, 8, 1)),
        (OPEN_MPI | ALLOCATION, MPILaunch("Open MPI", 5, 8, 1)),
        (HYDRA, MPILaunch("MPICH", 5, 8, 1)),
        (HYDRA | ALLOCATION, MPILaunch("MPICH", 5, 8, 1)),
        (HYDRA | {"I_MPI_ROOT": "/opt/intel/mpi"}, MPILaunch("MPICH", 5, 8, 1)),  # Intel's is merely installed
        (HYDRA | {"I_MPI_MPIRUN": "mpirun"}, MPILaunch("Intel MPI", 5, 8, 1)),
        (SRUN, None),
        ({"PMIX_RANK": "2"}, MPILaunch("PMIx", 2, None, None)),
        (TORCHRUN, None),
    ],
)
def test_mpi_is_recognised_from_variables(env, expected) -> None:  # type: ignore[no-untyped-def]
    assert mpi_launch(env) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        (OPEN_MPI, (5, 8)),
        (OPEN_MPI | ALLOCATION, (5, 8)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
        (HYDRA, (5, 8)),
        (SRUN, (5, 8)),
        (OPEN_MPI | TORCHRUN | {"RANK": "3"}, (3, 8)),  # mpirun has started torchrun: the inner one counts
        ({"LOCAL_RANK": "3", "NODE_RANK": "0", "WORLD_SIZE": "4"}, (3, 4)),  # a child of Lightning's launcher
    ],
)
def test_the_rank_is_known_before_anything_starts(env, expected) -> None:  # type: ignore[no-untyped-def]
    assert launched_rank(env) == expected


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Set the variables of a launcher, without those of whatever started pytest."""

    def launch(env: dict[str, str]) -> None:
        for key in list(os.environ):
            if key.startswith(("OMPI_", "PMI", "MPI_", "SLURM_", "TORCHELASTIC_")) or key in TORCHRUN:
                monkeypatch.delenv(key)
        for key, value in env.items():
            monkeypatch.setenv(key, value)

    return launch


@pytest.mark.parametrize(
    ("env", "kind", "here"),
    [
        ({}, LightningEnvironment, None),
        (TORCHRUN, TorchElasticEnvironment, 4),
        (OPEN_MPI | TORCHRUN, TorchElasticEnvironment, 4),
        (SRUN, SLURMEnvironment, 4),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x1),3"}, SLURMEnvironment, 3),
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_TASKS_PER_NODE"}, SLURMEnvironment, 4),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, LightningEnvironment, None),
    ],
)
def test_the_environment_and_the_size_of_the_node(launched, env, kind, here) -> None:  # type: ignore[no-untyped-def]
    launched(env)
    environment = choose_environment()
    assert type(environment) is kind
    assert local_world_size(environment) == here


@pytest.mark.parametrize(
    ("env", "nodes"),
    [({}, 3), (TORCHRUN, 2), (TORCHRUN | {"WORLD_SIZE": "4", "RANK": "0"}, 1), (SRUN, 2), (SRUN | ONE_NODE, 1)],
)
def test_the_number_of_nodes_is_the_launchers(launched, env, nodes) -> None:  # type: ignore[no-untyped-def]
    launched(env)
    assert node_count(choose_environment(), 3) == nodes


@pytest.mark.parametrize("env", [OPEN_MPI, OPEN_MPI | ALLOCATION, HYDRA])
def test_mpirun_is_detected_also_inside_an_allocation(launched, env, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)  # a plain Trainer of another test imports it
    launched(env)
    assert ParallaxMPIEnvironment.detect()
    assert "mpi4py.MPI" not in sys.modules  # seen from the variables alone


def test_a_named_strategy_gets_our_environment_and_no_other_does(
    launched,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector = accelerator_connector._AcceleratorConnector
    original = connector._choose_and_init_cluster_environment
    monkeypatch.setattr(connector, "_choose_and_init_cluster_environment", getattr(original, "__wrapped__", original))
    prepare.use_own_environment(["ddp"])
    launched(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    asked: list[str] = []
    monkeypatch.setattr(prepare, "choose_environment", lambda: asked.append("ours") or TorchElasticEnvironment())
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    Trainer(strategy="ddp", **quiet)
    assert asked == ["ours"]
    Trainer(strategy="ddp_find_unused_parameters_true", **quiet)
    Trainer(strategy="ddp", plugins=[TorchElasticEnvironment()], **quiet)
    assert asked == ["ours"]


def test_the_address_others_may_use_is_never_a_loopback_unless_there_is_none() -> None:
    found = addresses()
    assert found == ["127.0.0.1"] or not any(a.startswith("127.") or a == "::1" for a in found)


OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to ..."
OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to ..."
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260301"


def test_flags_by_the_make_of_mpirun() -> None:
    five = mpirun.mpirun_flags(OPEN_MPI_5, root=True)
    assert five[0] == "--allow-run-as-root" and "self,sm,tcp" in five
    assert five[1:5] == ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    four = mpirun.mpirun_flags(OPEN_MPI_4, root=False)
    assert "--allow-run-as-root" not in four and "self,vader,tcp" in four
    assert mpirun.mpirun_flags(MPICH, root=True) == mpirun.mpirun_flags(INTEL, root=True) == []
    with pytest.raises(ValueError, match="neither Open MPI nor MPICH"):
        mpirun.mpirun_flags("mpirun 1.0 of somebody", root=False)


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path,  # type: ignore[no-untyped-def]
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = tmp_path / "mpirun"
    fake.write_text(f"#!/bin/sh\necho '{OPEN_MPI_5.splitlines()[0]}'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert mpirun.main(["-n", "8", "--hosts", "a:4,b:4", "--dry-run", "train.py", "-n", "x y"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == str(fake)
    python = [str(tmp_path / "python"), "-m", "parallax", "train.py", "-n", "x y"]
    assert words[-len(python) - 4 :] == ["--host", "a:4,b:4", "-n", "8", *python]
    assert mpirun.main(["-n", "0", "train.py"]) == 2
    assert "at least 1, got 0" in capsys.readouterr().err
    assert mpirun.main(["-n", "2"]) == 2
    assert "nothing to run" in capsys.readouterr().err
    fake.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mpirun.main(["-n", "2", "train.py"]) == 2
    assert "lightning-parallax[mpi]" in capsys.readouterr().err
