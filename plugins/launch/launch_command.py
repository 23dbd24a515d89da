"""`parallax launch --hostfile hosts.txt train.py`: a job on several machines, from its start to its end.

It is: the subcommand: options, checks that need no other machine, and the line that is printed and run. It is not: the
line itself (`mpirun.py`) or what happens while it runs (`watchdog.py`, `guard.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallax.plugins.launch import guard
from parallax.plugins.launch.detect import mpi_launch
from parallax.plugins.launch.hosts import Host, allot, parse_hosts, read_hostfile
from parallax.plugins.launch.mpi import INSTALL
from parallax.plugins.launch.mpirun import (
    INTEL,
    MPICH,
    OPEN_MPI,
    Launcher,
    add_script,
    find_launcher,
    make_of,
    mpirun_command,
    rank_program,
    script_of,
)
from parallax.plugins.launch.watchdog import Limits, supervise

HINTS = (
    *("NCCL_", "RCCL_", "UCX_", "FI_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "DS_", "WANDB_", "PYTHON"),
)
"""Beginnings of the names of variables that every rank gets, on every host."""
LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False\nfrom mpi4py import MPI\n"
    "print(MPI.Get_library_version().split(chr(0))[0])"
)
_FAMILY = {OPEN_MPI: "Open MPI", MPICH: "MPICH", INTEL: "MPICH"}
"""Makes that understand each other's processes: Intel MPI is made from MPICH."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print mpirun's line, run it, and watch it. The exit status is that of `supervise`; 2 for a mistake."""
    options = _parser().parse_args(argv)
    try:
        launcher = find_launcher(options.mpirun)
        hosts, ranks = _places(options)
        command = launch_command(options, launcher, hosts, ranks)
        if not options.dry_run:
            _check_script(script_of(options))
            check_library(launcher)
    except ValueError as error:
        print(f"parallax launch: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(shlex.join(command))
        return 0
    where = "this machine" if hosts is None else f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    print(f"parallax launch: {ranks} ranks on {where}: {shlex.join(command)}", file=sys.stderr, flush=True)
    return supervise(command, ranks, _limits(options), launcher.environ(os.environ))


def launch_command(
    options: argparse.Namespace, launcher: Launcher, hosts: Sequence[Host] | None, ranks: int
) -> list[str]:
    """The line for these options.

    Raises:
        ValueError: no script, an --env without a name, limits below 1 s, or started by mpirun already.
    """
    if mpi_launch() is not None:
        raise ValueError("this process was itself started by mpirun: start `parallax launch` once, outside of it")
    limits = _limits(options)
    asked = script_of(options)
    script = asked if options.layout is None else ["--layout", options.layout, *asked]
    program = rank_program(script, "-u")  # what a rank has printed must not be lost when it is killed
    if not asked:
        raise ValueError("nothing to run: name a script after the options")
    return mpirun_command(
        ranks,
        guarded(program, limits),
        hosts,
        launcher=launcher,
        names=hint_names(os.environ),
        values=_values(options.env),
        extra=shlex.split(options.mpirun_args),
    )


def guarded(program: Sequence[str], limits: Limits) -> list[str]:
    """`program` under the guard that `supervise` listens to."""
    beat = [] if limits.beat is None else ["--beat", f"{limits.beat:g}"]
    return [sys.executable, "-I", "-S", os.path.abspath(guard.__file__), *beat, "--", *program]


def hint_names(environ: Mapping[str, str]) -> list[str]:
    """Variables that the ranks on other hosts should get too, sorted."""
    return sorted(name for name in environ if name.startswith(HINTS))


def check_library(launcher: Launcher) -> None:
    """That mpi4py's MPI library belongs to `launcher`: otherwise every rank would believe that it is alone.

    Raises:
        ValueError: it does not, or mpi4py or the library is missing.
    """
    done = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, timeout=120, check=False)
    said = (done.stdout.strip() or done.stderr.strip()).splitlines() or [""]
    if done.returncode:
        raise ValueError(f"mpi4py cannot be used by {sys.executable} ({said[-1]}): {INSTALL}")
    try:
        make = make_of(done.stdout)
    except ValueError:
        return  # a library unknown here; each rank still checks that it is not alone
    if _FAMILY[make] != _FAMILY[launcher.make]:
        raise ValueError(
            f"two MPIs are mixed: {launcher.path} is of {launcher.make}, but mpi4py loads {said[0].strip()!r}: use the "
            f"mpirun that belongs to that library (--mpirun PATH), or install one of them alone: {INSTALL}"
        )


def _places(options: argparse.Namespace) -> tuple[list[Host] | None, int]:
    """The hosts with their ranks, None for this machine, and the number of ranks."""
    if options.hostfile is None and options.hosts is None:
        count = options.ranks if options.ranks is not None else options.ppn
        if count is None:
            raise ValueError("give --hostfile FILE, or -n N for ranks on this machine")
        found = allot([Host("localhost", count)], options.ranks, options.ppn)
        return None, sum(host.slots or 0 for host in found)
    hosts = read_hostfile(options.hostfile) if options.hostfile is not None else parse_hosts(options.hosts)
    found = allot(hosts, options.ranks, options.ppn)
    return found, sum(host.slots or 0 for host in found)


def _values(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"--env {text!r} is not NAME=VALUE, nor the NAME of a variable that is set here")
        if not equals and name not in os.environ:
            raise ValueError(f"--env {name}: this variable is not set here; write --env {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _limits(options: argparse.Namespace) -> Limits:
    for flag, seconds in (("--timeout", options.timeout), ("--hang-timeout", options.hang_timeout)):
        if seconds is not None and not seconds >= 1:
            raise ValueError(f"{flag} must be at least 1 second, got {seconds:g}")
    return Limits(options.timeout, options.hang_timeout)


def _check_script(script: Sequence[str]) -> None:
    if script and not script[0].startswith("-") and not Path(script[0]).exists():
        raise ValueError(f"there is no script {script[0]!r} in {os.getcwd()}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parallax launch",
        description="Run a script on several machines under mpirun: output labelled by rank, the first error shown "
        "at the end, and the whole job ended when a rank fails.",
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hostfile", metavar="FILE", help="one line for each machine: 'node1 slots=8' or 'node1:8'")
    where.add_argument("--hosts", metavar="H1:SLOTS,H2:SLOTS", help="the same on the command line")
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="ranks in all (default: every slot)")
    parser.add_argument("--ppn", type=int, metavar="P", help="ranks on each machine")
    parser.add_argument("--layout", metavar="LAYOUT", help="for Trainer(strategy='parallax_4d'), e.g. 'tp8 pp2 zero1'")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for every rank (may be repeated)"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds, with status 124")
    parser.add_argument(
        "--hang-timeout",
        type=float,
        metavar="S",
        help="end the job when a rank is stopped or unreachable for S seconds",
    )
    parser.add_argument("--mpirun", metavar="PATH", help="which mpirun (default: the one beside this Python)")
    parser.add_argument("--mpirun-args", default="", metavar="ARGS", help="further arguments of mpirun, in one string")
    parser.add_argument("--dry-run", action="store_true", help="print mpirun's line, run nothing")
    add_script(parser)
    return parser
