"""Which machines a job may use, and how many ranks each gets.

It is: the reader of hostfiles ("node1 slots=8", as Open MPI and DeepSpeed write them, or "node1:8", as MPICH does) and
of "node1:8,node2:8", and the division of the ranks. It is not: a look at the machines; no name is resolved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]*[A-Za-z0-9_])?"
_LINE = re.compile(
    rf"(?P<name>{_NAME})(?::(?P<colon>\S+))?(?P<words>(?:\s+[A-Za-z_\-]+\s*=\s*\S+)*)\s*$",
)
_WORD = re.compile(r"([A-Za-z_\-]+)\s*=\s*(\S+)")
_SAYS_NOTHING_NEW = frozenset({"max_slots", "max-slots"})
_THIS_MACHINE = re.compile(r"localhost(\..*)?|127\.[\d.]+", re.IGNORECASE)


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        name: host name or IPv4 address.
        slots: ranks it may get; None when the source does not say.
        where: "hosts.txt line 3", for messages.
    """

    name: str
    slots: int | None
    where: str = ""


def read_hostfile(path: str) -> list[Host]:
    """The hosts of a hostfile, in its order. `#` starts a comment.

    Raises:
        ValueError: no such file, no host in it, a line that is neither form, slots below 1, a host listed twice.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ValueError(f"hostfile {path}: {reason}") from error
    lines = ((f"{path} line {number}", line.partition("#")[0]) for number, line in enumerate(text.splitlines(), 1))
    hosts = _hosts((where, line.strip()) for where, line in lines)
    if not hosts:
        raise ValueError(f"hostfile {path} names no host: write one line for each, for example 'node1 slots=8'")
    return hosts


def parse_hosts(text: str) -> list[Host]:
    """The hosts of "node1:8,node2:8".

    Raises:
        ValueError: as `read_hostfile`.
    """
    hosts = _hosts((f"--hosts {text!r}", part.strip()) for part in text.split(","))
    if not hosts:
        raise ValueError("--hosts names no host: write, for example, 'node1:8,node2:8'")
    return hosts


def allot(hosts: Sequence[Host], ranks: int | None = None, per_host: int | None = None) -> list[Host]:
    """The hosts that get ranks, in order, each with the exact number as its slots.

    Args:
        hosts: as read.
        ranks: how many in all; None for every slot. Without `per_host` a host is filled before the next gets any.
        per_host: ranks on each host; with `ranks` as many hosts as that takes.

    Raises:
        ValueError: the numbers do not fit, or slots are not told and needed.
    """
    for what, value in (("the number of ranks (-n)", ranks), ("the ranks per host (--ppn)", per_host)):
        if value is not None and value < 1:
            raise ValueError(f"{what} must be at least 1, got {value}")
    if per_host is not None:
        return _even(hosts, ranks, per_host)
    for host in hosts:
        if host.slots is None:
            raise ValueError(
                f"{host.where}: {host.name} has no slots: write '{host.name} slots=8' for 8 ranks, or give --ppn"
            )
    total = sum(host.slots or 0 for host in hosts)
    left = total if ranks is None else ranks
    if left > total:
        counts = ", ".join(f"{host.name} {host.slots}" for host in hosts[:8]) + (", ..." if len(hosts) > 8 else "")
        raise ValueError(f"-n {left} is more than the {total} slots ({counts}): ask for fewer ranks or add slots")
    found = []
    for host in hosts:
        count = min(left, host.slots or 0)
        if count:
            found.append(replace(host, slots=count))
        left -= count
    return found


def _even(hosts: Sequence[Host], ranks: int | None, per_host: int) -> list[Host]:
    if ranks is not None and ranks % per_host:
        raise ValueError(f"-n {ranks} cannot be divided into hosts of --ppn {per_host}: choose a multiple, or drop one")
    used = list(hosts if ranks is None else hosts[: ranks // per_host])
    if ranks is not None and len(used) * per_host < ranks:
        raise ValueError(
            f"-n {ranks} with --ppn {per_host} takes {ranks // per_host} hosts, but there are {len(hosts)}"
        )
    for host in used:
        if host.slots is not None and host.slots < per_host:
            raise ValueError(f"{host.where}: {host.name} has {host.slots} slots, fewer than --ppn {per_host}")
    return [replace(host, slots=per_host) for host in used]


def _hosts(lines: Iterable[tuple[str, str]]) -> list[Host]:
    hosts = [_host(where, line) for where, line in lines if line]
    seen: dict[str, Host] = {}
    for host in hosts:
        first = seen.setdefault(host.name.lower(), host)
        if first is not host:
            at = first.where if first.where == host.where else f"{first.where} and {host.where}"
            raise ValueError(f"{host.name} is listed twice ({at}): give each host once, with all its slots")
    here = next((host for host in hosts if _THIS_MACHINE.fullmatch(host.name)), None)
    if here is not None and len(hosts) > 1:
        raise ValueError(
            f"{here.where}: {here.name} is another machine on each node: write this machine's host name instead"
        )
    return hosts


def _host(where: str, line: str) -> Host:
    match = _LINE.match(line)
    if match is None:
        raise ValueError(f"{where}: {line!r} is neither 'node1 slots=8' nor 'node1:8'")
    words = dict(_WORD.findall(match["words"]))
    unknown = sorted(words.keys() - {"slots"} - _SAYS_NOTHING_NEW)
    if unknown:
        raise ValueError(f"{where}: {unknown[0]}= is not understood here; only slots= is")
    if match["colon"] is not None and "slots" in words:
        raise ValueError(f"{where}: {line!r} gives the slots twice")
    told = match["colon"] if match["colon"] is not None else words.get("slots")
    if told is None:
        return Host(match["name"], None, where)
    if not told.isascii() or not told.isdigit() or int(told) < 1:
        raise ValueError(f"{where}: {match['name']} has {told!r} slots: it must be a whole number of at least 1")
    return Host(match["name"], int(told), where)
