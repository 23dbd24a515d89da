"""Where the ranks of an MPI job meet: a TCP store held by the first rank, and an address all nodes can reach.

It is: opening the store and agreeing on its address over MPI. The store's port is bound once and handed over open, so
nobody can take it in between. It is not: the process group.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined] # not in its __all__

from parallax.plugins.launch.errors import mark_shared

CONNECT_WAIT = 5.0
"""Seconds a rank tries one address."""


@dataclass(frozen=True)
class Meeting:
    """An open store and where it is. Rank 0's object holds the server: it closes when the object goes."""

    store: TCPStore
    address: str
    port: int


def meet(comm: Any, *, one_node: bool, timeout: timedelta) -> Meeting:
    """Open a store on rank 0 of the MPI communicator `comm` and connect every rank to it. Collective.

    MASTER_ADDR and MASTER_PORT, where set, are used as they are. Otherwise the port is free and the address is the
    loopback when all ranks are on one node, else the first of rank 0's addresses that every rank can connect to.

    Raises:
        ValueError: on every rank, when the port is taken or no address serves all.
    """
    store: TCPStore | None = None
    failure: str | None = None
    port, candidates = 0, [""]
    if comm.rank == 0:
        asked = os.environ.get("MASTER_ADDR")
        candidates = [asked] if asked else (["127.0.0.1"] if one_node else addresses())
        try:
            store = TCPStore(
                "127.0.0.1",
                int(os.environ.get("MASTER_PORT", "0")),
                comm.size,
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
            )
            port = store.port
        except (RuntimeError, ValueError) as error:
            failure = f"rank 0 cannot open port {os.environ.get('MASTER_PORT', '0')} (MASTER_PORT): {error}"
    failure, port, candidates = comm.bcast((failure, port, candidates))
    if failure is not None:
        raise mark_shared(ValueError(failure))
    address = candidates[0] if one_node else _common_address(comm, candidates, port)
    if store is None:
        store = TCPStore(address, port, comm.size, is_master=False, timeout=timeout)
    return Meeting(store, address, port)


def _common_address(comm: Any, candidates: list[str], port: int) -> str:
    reached = [can_connect(address, port) for address in candidates]
    by_rank = comm.allgather((socket.gethostname(), reached))
    for i, address in enumerate(candidates):
        if all(works[i] for _, works in by_rank):
            return address
    cut_off = sorted({host for host, works in by_rank if not any(works)}) or sorted({host for host, _ in by_rank})
    raise mark_shared(
        ValueError(
            f"no address of rank 0 serves every node: tried {', '.join(candidates)} at port {port}; no connection from "
            f"{', '.join(cut_off)}. Set MASTER_ADDR to an address all nodes reach, and MASTER_PORT if a firewall "
            f"allows only some ports"
        )
    )


def addresses() -> list[str]:
    """IP addresses of this host that other hosts may reach, likely ones first; never a loopback address."""
    found: list[str] = []
    for name in (socket.gethostname(), socket.getfqdn()):
        try:
            found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except OSError:
            continue  # a host without DNS
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:  # connecting a datagram socket sends nothing; it only picks the interface of the default route
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((anywhere, 9))
                found.append(str(probe.getsockname()[0]))
        except OSError:
            continue
    usable = [a for a in dict.fromkeys(found) if not a.startswith("127.") and a != "::1" and not a.startswith("fe80")]
    return usable or ["127.0.0.1"]


def can_connect(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_WAIT):
            return True
    except OSError:
        return False
