"""What a cluster asks of the kernel: namespaces and the processes that hold them, found and ended by id.

It is: helpers without knowledge of clusters. It is not: a cluster (`cluster.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE_ROOT = Path(os.environ.get("NETNS_CLUSTER_STATE", "/run/netns-cluster"))


class ClusterError(RuntimeError):
    """A setup step failed; the message holds the command and what it printed."""


def sh(cmd: list[str], check: bool = True, **kw: Any) -> subprocess.CompletedProcess[str]:
    r = subprocess.run(cmd, text=True, stdin=subprocess.DEVNULL, capture_output=True, **kw)
    if check and r.returncode:
        raise ClusterError(f"{shlex.join(cmd)}\n  exit {r.returncode}: {(r.stderr or r.stdout).strip()}")
    return r


def start_time(pid: int) -> int | None:
    """Kernel start time of a pid, which tells a reused pid from the one we knew."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] == "Z" else int(fields[19])


def netns_id(pid: int | str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def supported() -> str | None:
    """None when clusters can be made here, otherwise the reason why not."""
    if sys.platform != "linux":
        return "needs Linux namespaces"
    if os.geteuid() != 0:
        return "needs root"
    missing = [t for t in ("ip", "tc", "unshare", "nsenter") if shutil.which(t) is None]
    if missing:
        return f"missing tools: {', '.join(missing)} (Debian: iproute2, util-linux)"
    probe = (
        "ip link add b0 type bridge && ip link add v0 type veth peer name v1 && ip link set v0 master b0"
        " && mount -t tmpfs none /dev/shm"
    )
    r = sh(["unshare", "--net", "--uts", "--mount", "--ipc", "sh", "-c", probe], check=False)
    return None if r.returncode == 0 else f"kernel refuses namespaces, bridge or veth: {r.stderr.strip()}"


def qdisc_available(kind: str) -> bool:
    args = {"tbf": "rate 100mbit burst 64kb latency 50ms", "netem": "delay 1ms"}[kind]
    script = f"ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root {kind} {args}"
    return sh(["unshare", "--net", "sh", "-c", script], check=False).returncode == 0


def rate_to_bits(rate: str) -> float:
    m = re.fullmatch(r"\s*([\d.]+)\s*(k|m|g)?bit\s*", rate.lower())
    if not m:
        raise ClusterError(f"rate {rate!r}: write it like 200mbit or 1gbit")
    return float(m[1]) * {None: 1, "k": 1e3, "m": 1e6, "g": 1e9}[m[2]]


@dataclass
class Holder:
    """One sleeping process that keeps a set of namespaces alive."""

    name: str
    pid: int
    start: int
    addr: str = ""
    netns: str = ""

    def alive(self) -> bool:
        return start_time(self.pid) == self.start

    def enter(self, *flags: str) -> list[str]:
        # -r: the holder's root directory, which differs from / when all this runs in a chroot
        return ["nsenter", "-t", str(self.pid), *(flags or ("-n", "-u", "-m", "-i", "-r", "-W", "/"))]


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """One up or down at a time on this machine. Locks an existing directory: leaves no file behind."""
    fd = os.open(STATE_ROOT.parent, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _has_token(pid: str, tokens: set[str]) -> bool:
    try:
        env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(f"NETNS_CLUSTER_TOKEN={t}".encode() in env for t in tokens)


def pids_in(spaces: Set[str | None], tokens: set[str]) -> list[int]:
    """Living processes in one of our namespaces or with one of our tokens (never this process)."""
    if not spaces and not tokens:
        return []
    me = str(os.getpid())
    return [
        int(d)
        for d in os.listdir("/proc")
        if d.isdigit()
        and d != me
        and start_time(int(d)) is not None
        and (netns_id(d) in spaces or _has_token(d, tokens))
    ]


def send_signal(pids: list[int], sig: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)
