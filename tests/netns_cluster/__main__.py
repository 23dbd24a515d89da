"""The command line of `tests/netns_cluster`; see there."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys

import tests.netns_cluster
from tests.netns_cluster.cluster import Cluster
from tests.netns_cluster.jobs import find_mpirun
from tests.netns_cluster.kernel import STATE_ROOT, ClusterError, qdisc_available, supported


def _doctor() -> int:
    why = supported()
    print(f"namespaces, bridge, veth : {'ok' if why is None else 'NO: ' + why}")
    if why:
        return 1
    print(f"rate limits  (sch_tbf)   : {'ok' if qdisc_available('tbf') else 'NO'}")
    print(f"added delay  (sch_netem) : {'ok' if qdisc_available('netem') else 'NO (rates still work)'}")
    try:
        exe = find_mpirun()
        print(f"mpirun                   : {exe}")
    except ClusterError as e:
        print(f"mpirun                   : NO: {e}")
    return 0


def _parser() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(
        prog="python -m tests.netns_cluster",
        description=tests.netns_cluster.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub = ap.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        p = sub.add_parser(name, help=text, description=text)
        p.add_argument("--name", default="px", help="cluster name and host name prefix (default px)")
        return p

    def making(p: argparse.ArgumentParser) -> None:
        p.add_argument("-n", "--nodes", type=int, default=2)
        p.add_argument("--slots", type=int, default=4, help="MPI slots per node (default 4)")
        p.add_argument("--rate", help="inter-node speed, e.g. 200mbit")
        p.add_argument("--delay", help="one-way delay, e.g. 200us (needs sch_netem)")
        p.add_argument("--ttl", type=int, default=3600, help="seconds until an abandoned cluster goes by itself")
        p.add_argument("--private", action="append", default=[], metavar="DIR", help="own empty DIR on each node")

    def launching(p: argparse.ArgumentParser) -> None:
        p.add_argument("-np", dest="np", type=int, help="ranks in all (default nodes x slots)")
        p.add_argument("--ppn", type=int, help="ranks per node")
        p.add_argument("--by-node", action="store_true", help="deal ranks out round-robin over the nodes")
        p.add_argument("--mpirun", help="mpirun to use (default: $MPIRUN, then this Python's, then PATH)")
        p.add_argument("-x", dest="env", action="append", default=[], metavar="VAR[=VALUE]")
        p.add_argument("--timeout", type=float, default=300)
        p.add_argument("--extra", default="", help="more mpirun options, as one quoted string")
        p.add_argument("--show", action="store_true", help="print the mpirun command to stderr")
        p.add_argument("cmd", nargs=argparse.REMAINDER)

    sub.add_parser("doctor", help="what this machine and kernel can do")
    making(verb("up", "make a cluster (replacing one of the same name)"))
    p = verb("down", "remove a cluster and every process in it")
    p.add_argument("--all", action="store_true")
    verb("status", "nodes, addresses, rates, bytes sent; exit 3 when not up")
    p = verb("link", "change speed or unplug")
    p.add_argument("--rate", help='e.g. 100mbit; "none" lifts the limit')
    p.add_argument("--delay")
    p.add_argument("--node")
    p.add_argument("--down", dest="plugged", action="store_const", const=False)
    p.add_argument("--up", dest="plugged", action="store_const", const=True)
    p = verb("exec", "run a command inside one node")
    p.add_argument("node")
    p.add_argument("cmd", nargs=argparse.REMAINDER)
    launching(verb("mpirun", "run an MPI job over the nodes (mpirun starts inside node 0)"))
    p = verb("run", "up, mpirun, down")
    making(p)
    launching(p)
    return ap


def _words(cmd: list[str]) -> list[str]:
    cmd = cmd[1:] if cmd[:1] == ["--"] else cmd
    if not cmd:
        raise ClusterError("no command given")
    return cmd


def _launch(c: Cluster, a: argparse.Namespace) -> int:
    env = {}
    for item in a.env:
        k, eq, v = item.partition("=")
        if eq or k in os.environ:
            env[k] = v if eq else os.environ[k]
    kw = dict(np=a.np, ppn=a.ppn, by_node=a.by_node, mpirun=a.mpirun, env=env, extra=shlex.split(a.extra))
    if a.show:
        print("+ " + shlex.join(c.mpirun_cmd(_words(a.cmd), **kw)), file=sys.stderr)
    r = c.mpirun(_words(a.cmd), timeout=a.timeout, capture=False, **kw)
    if r.returncode == 124:
        print(f"netns_cluster: timed out after {a.timeout} s", file=sys.stderr)
    return r.returncode


def main(argv: list[str] | None = None) -> int:
    a = _parser().parse_args(argv)
    # Ctrl-C and a polite kill must still reach the finally/except blocks above.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if a.verb == "doctor":
            return _doctor()
        if a.verb == "down":
            names = [p.parent.name for p in STATE_ROOT.glob("*/state.json")] if a.all else [a.name]
            for n in names:
                Cluster(n).down()
            return 0
        if a.verb in ("up", "run"):
            c = Cluster(a.name, a.nodes, a.slots, a.rate, a.delay, a.ttl, tuple(a.private))
            if a.verb == "run":
                with c:
                    return _launch(c, a)
            c.up()
            print("\n".join(f"{m.name} {m.addr} slots={c.slots}" for m in c.members))
            return 0
        if a.verb == "status":
            try:
                c = Cluster.load(a.name)
            except ClusterError as e:
                print(e)
                return 3
            print(f"cluster {c.name}: rate={c.rate or 'unlimited'} delay={c.delay or '0'} state={c.state}")
            for name, n in c.counters().items():
                m = c.node(name)
                print(f"  {name} {m.addr} holder={m.pid} sent={n['tx']} received={n['rx']}")
            return 0
        c = Cluster.load(a.name)
        if a.verb == "link":
            rate = None if a.rate in (None, "none", "0") else a.rate
            c.link(rate, a.delay, a.node, a.plugged)
            return 0
        if a.verb == "exec":
            return c.exec(a.node, _words(a.cmd), capture=False).returncode
        return _launch(c, a)
    except ClusterError as e:
        print(f"netns_cluster: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
