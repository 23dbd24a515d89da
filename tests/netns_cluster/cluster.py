"""A cluster: its nodes come up, are joined by cables of some rate, and go again.

It is: the life of namespaces, bridge and cables. It is not: what runs in the nodes (`jobs.py`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.netns_cluster.jobs import Jobs
from tests.netns_cluster.kernel import (
    STATE_ROOT,
    ClusterError,
    Holder,
    lock,
    netns_id,
    pids_in,
    rate_to_bits,
    send_signal,
    sh,
    start_time,
    supported,
)

# 198.18.0.0/15 is set aside by RFC 2544 for benchmarks on closed networks.
SUBNET = "198.18.77"
FIRST_HOST = 10
MAX_NODES = 64
# What the rsh stand-in keeps: CPU quirk settings that every process here needs.
RSH_KEEP = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


HOLDERS: dict[int, subprocess.Popen[bytes]] = {}
"""Handles of the holders that this process started, to be reaped by it."""


@dataclass
class Cluster(Jobs):
    name: str = "px"
    nodes: int = 2
    slots: int = 4
    rate: str | None = None
    delay: str | None = None
    ttl: int = 3600
    private: tuple[str, ...] = ()
    token: str = ""
    hub: Holder | None = None
    members: list[Holder] = field(default_factory=list)

    @property
    def state(self) -> Path:
        return STATE_ROOT / self.name

    def __enter__(self) -> Cluster:
        return self.up()

    def __exit__(self, *exc: object) -> None:
        self.down()

    def up(self) -> Cluster:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,15}", self.name):
            raise ClusterError("name: lower-case letters, digits, dashes; it becomes the host name")
        if not 1 <= self.nodes <= MAX_NODES:
            raise ClusterError(f"nodes: 1 to {MAX_NODES}")
        if why := supported():
            raise ClusterError(why)
        with lock():
            self._remove()
            self.state.mkdir(parents=True, exist_ok=True)
            self.token = secrets.token_hex(8)
            try:
                self._build()
            except BaseException:
                self._remove()
                raise
        return self

    def down(self) -> None:
        """Remove the cluster; safe to call at any time, any number of times."""
        with lock():
            self._remove()

    def _build(self) -> None:
        self._save()  # the token first: whatever is started from here on can be found again
        names = [f"{self.name}-{i}" for i in range(self.nodes)]
        addrs = [f"{SUBNET}.{FIRST_HOST + i}" for i in range(self.nodes)]
        # The ::ffff: lines answer reverse look-ups of dual-stack sockets (torch's TCPStore does them).
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{a} {n}\n::ffff:{a} {n}\n" for a, n in zip(addrs, names, strict=True)
        )
        (self.state / "hosts").write_text(hosts)
        # Names come from that file alone: a node has no route to a name server, and waiting for
        # one that cannot answer costs 10 s and more a look-up.
        old = Path("/etc/nsswitch.conf").read_text() if Path("/etc/nsswitch.conf").exists() else ""
        rest = "".join(line + "\n" for line in old.splitlines() if not line.startswith("hosts:"))
        (self.state / "nsswitch.conf").write_text(rest + "hosts: files\n")
        (self.state / "hostfile").write_text("".join(f"{n} slots={self.slots}\n" for n in names))
        # MPICH and Intel MPI write slots differently.
        (self.state / "machinefile").write_text("".join(f"{n}:{self.slots}\n" for n in names))

        self.hub = self._spawn(f"{self.name}-hub", ["--net"], "true")
        hub_in = self.hub.enter("-n")
        sh([*hub_in, "sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 2>/dev/null; true"])
        sh([*hub_in, "ip", "link", "add", "br0", "type", "bridge"])
        sh([*hub_in, "ip", "link", "set", "br0", "up"])
        for i, (name, addr) in enumerate(zip(names, addrs, strict=True)):
            node = self._spawn(
                name, ["--net", "--uts", "--mount", "--ipc", "--propagation", "private"], self._node_setup(name)
            )
            node.addr = addr
            self.members.append(node)
            # One end stays in the hub, the other is born inside the node as eth0.
            sh([*hub_in, "ip", "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0", "netns", str(node.pid)])
            sh([*hub_in, "ip", "link", "set", f"p{i}", "master", "br0", "up"])
            net_in = node.enter("-n")
            sh([*net_in, "sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 2>/dev/null; true"])
            sh([*net_in, "ip", "link", "set", "lo", "up"])
            sh([*net_in, "ip", "addr", "add", f"{addr}/24", "dev", "eth0"])
            sh([*net_in, "ip", "link", "set", "eth0", "up"])
        self._write_rsh()
        self._save()
        self.link(rate=self.rate, delay=self.delay)

    def _node_setup(self, name: str) -> str:
        """Shell lines the holder runs inside its fresh namespaces before it sleeps."""
        q = shlex.quote
        lines = [
            f"hostname {q(name)}",
            "mount -t tmpfs -o mode=1777 none /dev/shm",
            # bind, do not edit: the machine's own /etc/hosts is left alone
            f"mount --bind {q(str(self.state / 'hosts'))} /etc/hosts",
            f"{{ [ ! -e /etc/nsswitch.conf ] || mount --bind {q(str(self.state))}/nsswitch.conf /etc/nsswitch.conf; }}",
        ]
        lines += [f"mkdir -p {q(p)} && mount -t tmpfs -o mode=1777 none {q(p)}" for p in self.private]
        # A sysfs mounted here lists this node's interfaces; cgroups hang below it.
        lines.append(
            "mkdir -p /dev/shm/.cg && mount --rbind /sys/fs/cgroup /dev/shm/.cg 2>/dev/null"
            " && mount -t sysfs none /sys && mount --rbind /dev/shm/.cg /sys/fs/cgroup"
            " && umount -R -l /dev/shm/.cg; rmdir /dev/shm/.cg 2>/dev/null; true"
        )
        return " && ".join(lines[:-1]) + " && { " + lines[-1] + "; }"

    def _spawn(self, name: str, unshare_flags: list[str], setup: str) -> Holder:
        ready = self.state / f"{name}.ready"
        log = open(self.state / f"{name}.log", "w")  # noqa: SIM115 - the child keeps it
        script = f"set -e; {setup}; : > {shlex.quote(str(ready))}; exec sleep {int(self.ttl)}"
        p = subprocess.Popen(
            ["unshare", *unshare_flags, "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "NETNS_CLUSTER_TOKEN": self.token},
        )
        log.close()
        deadline = time.monotonic() + 20
        while not ready.exists():
            if p.poll() is not None or time.monotonic() > deadline:
                p.kill()
                raise ClusterError(f"node {name} did not start: {(self.state / f'{name}.log').read_text().strip()}")
            time.sleep(0.01)
        HOLDERS[p.pid] = p  # keep the handle, so that down() in this process can reap it
        return Holder(name, p.pid, start_time(p.pid) or 0, netns=netns_id(p.pid) or "")

    def _write_rsh(self) -> None:
        table = "".join(f"{m.name} {m.addr} {m.pid}\n" for m in self.members)
        (self.state / "nodes").write_text(table)
        keep = " ".join(f'${{{k}:+{k}="${k}"}}' for k in RSH_KEEP)
        rsh = self.state / "rsh"
        rsh.write_text(f"""#!/bin/sh
# Stand-in for ssh between the nodes of cluster {self.name}: rsh [options] HOST COMMAND...
while [ $# -gt 0 ]; do
  case "$1" in
    -l|-p|-o|-i|-F|-b|-c|-m) shift 2 ;;   # ssh options that take a value
    -*) shift ;;
    *) break ;;
  esac
done
host=$1; shift
pid=$(awk -v h="$host" '$1 == h || $2 == h {{ print $3 }}' {self.state}/nodes)
[ -n "$pid" ] || {{ echo "rsh: no node $host in cluster {self.name}" >&2; exit 255; }}
# As with ssh: the words are joined, the far side's shell reads them anew, and
# almost nothing of the caller's environment arrives.
exec nsenter -t "$pid" -n -u -m -i -r -W / env -i HOME="$HOME" USER=root LOGNAME=root SHELL=/bin/sh \\
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
  NETNS_CLUSTER_TOKEN={self.token} {keep} \\
  sh -c "cd \\"$HOME\\" && $*"
""")
        rsh.chmod(0o755)

    def _remove(self) -> None:
        old = self._load_or_none()
        known = [c for c in (self, old) if c]
        holders = {h.pid: h for c in known for h in [*c.members, c.hub] if h}
        # A namespace number is reused once its namespace is gone, so it proves nothing unless the
        # holder lives. What outlived its holder is known by the token in its environment.
        spaces = {h.netns for h in holders.values() if h.netns and h.alive()} - {netns_id("self")}
        tokens = {c.token for c in known if c.token}

        def ours() -> list[int]:
            return pids_in(spaces, tokens)

        for sig, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
            send_signal(ours(), sig)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and ours():
                for pid in holders:
                    if pid in HOLDERS:
                        HOLDERS[pid].poll()  # reap our own children
                time.sleep(0.02)
        for pid in holders:
            if p := HOLDERS.pop(pid, None):
                p.wait(timeout=5)
        self.members, self.hub = [], None
        shutil.rmtree(self.state, ignore_errors=True)
        with suppress(OSError):
            STATE_ROOT.rmdir()

    def _save(self) -> None:
        (self.state / "state.json").write_text(json.dumps(asdict(self), indent=1))

    def _load_or_none(self) -> Cluster | None:
        try:
            raw = json.loads((self.state / "state.json").read_text())
        except (OSError, ValueError):
            return None
        raw["members"] = [Holder(**m) for m in raw["members"]]
        raw["hub"] = Holder(**raw["hub"]) if raw["hub"] else None
        raw["private"] = tuple(raw["private"])
        return Cluster(**raw)

    @classmethod
    def load(cls, name: str = "px") -> Cluster:
        c = cls(name)._load_or_none()
        if c is None or not c.members:
            raise ClusterError(f"no cluster {name!r} is up (netns_cluster.py up)")
        dead = [m.name for m in c.members if not m.alive()]
        if dead:
            raise ClusterError(f"cluster {name!r} has lost {dead} (ttl passed?); run up again")
        return c

    def node(self, which: str | int) -> Holder:
        for i, m in enumerate(self.members):
            if which in (i, str(i), m.name, m.addr):
                return m
        raise ClusterError(f"no node {which!r}; have {[m.name for m in self.members]}")

    def link(
        self,
        rate: str | None = None,
        delay: str | None = None,
        node: str | int | None = None,
        plugged: bool | None = None,
    ) -> None:
        """Set the speed (and delay) of all nodes' cables, or of one node's; None lifts the limit."""
        assert self.hub is not None
        for i, m in enumerate(self.members):
            if node is not None and m is not self.node(node):
                continue
            if plugged is not None:
                sh([*self.hub.enter("-n"), "ip", "link", "set", f"p{i}", "up" if plugged else "down"])
                continue
            # Both ends: what the node sends, and what the switch sends to it.
            for enter, dev in ((m.enter("-n"), "eth0"), (self.hub.enter("-n"), f"p{i}")):
                sh([*enter, "tc", "qdisc", "del", "dev", dev, "root"], check=False)
                if delay:
                    cmd = ["netem", "delay", delay] + (["rate", rate] if rate else [])
                elif rate:
                    # A bucket of about 2 ms at line rate, and room for any GSO packet.
                    burst = max(int(rate_to_bits(rate) / 8 * 0.002), 70_000)
                    cmd = ["tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]
                else:
                    continue
                try:
                    sh([*enter, "tc", "qdisc", "add", "dev", dev, "root", *cmd])
                except ClusterError as e:
                    hint = "this kernel has no sch_netem: use a rate without a delay" if delay else "needs sch_tbf"
                    raise ClusterError(f"{e}\n  ({hint})") from None
        if plugged is None:
            if node is None:
                self.rate, self.delay = rate, delay
            self._save()

    def counters(self) -> dict[str, dict[str, int]]:
        """Bytes each node sent and received through its cable so far (proof of what crossed)."""
        out = {}
        for m in self.members:
            j = json.loads(sh([*m.enter("-n"), "ip", "-j", "-s", "link", "show", "eth0"]).stdout)[0]["stats64"]
            out[m.name] = {"tx": j["tx"]["bytes"], "rx": j["rx"]["bytes"]}
        return out
