"""Measured bandwidth and latency between ranks, to confirm or correct what the description claims.

It is: a plan of rounds (pure), a runner over MPI or a torch process group, and the correction of a cluster by the
result (pure). It is not: a benchmark; messages are few and small, and the time is bounded.

In a round every rank exchanges with at most one other. First all pairs of each node, all nodes at once; then the first
rank of each node with that of 1, 2, 4, ... nodes further on: every network port is seen several times in few rounds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any, Protocol

from parallax.plugins.topology.description import Cluster, Link, Node, Slot
from parallax.plugins.topology.rates import Rates

Round = tuple[tuple[int, int], ...]
"""Pairs of ranks; each rank occurs at most once, the lower one first."""

LATENCY_BYTES = 8
DEVIATION = 2.0
"""A pair this many times slower or faster than the median of its label is believed rather than the label."""


@dataclass(frozen=True)
class Sample:
    """What one pair of ranks measured.

    Attributes:
        a, b: the ranks.
        rate: GB/s one way.
        latency: seconds one way of a few bytes.
    """

    a: int
    b: int
    rate: float
    latency: float


class Transport(Protocol):
    """What the runner needs of a communicator."""

    rank: int

    def ping(self, peer: int, first: bool, nbytes: int) -> None:
        """Send `nbytes` to `peer` and receive as many back, or the other way round when not `first`; blocking."""

    def largest(self, value: float) -> float:
        """The largest of every rank's value. Collective."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. Collective."""


def plan_rounds(nodes: Sequence[int], inside: int = 15, between: int = 6) -> list[Round]:
    """Rounds for ranks on `nodes` (the node of each rank).

    Args:
        nodes: number of the node of each rank.
        inside: most rounds inside nodes; 15 see every pair of up to 16 ranks.
        between: most rounds between nodes; round k pairs nodes 2^k apart.

    The number of rounds does not grow with the number of nodes.
    """
    on: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        on.setdefault(node, []).append(rank)
    plans = [_tournament(ranks)[:inside] for ranks in on.values()]
    rounds = [
        tuple(chain.from_iterable(plan[k] for plan in plans if k < len(plan)))
        for k in range(max((len(plan) for plan in plans), default=0))
    ]
    leaders = [ranks[0] for ranks in on.values()]
    step = 1
    for _ in range(between):
        if step >= len(leaders):
            break
        # node i with node i + step, in blocks of twice the step: nobody is in two pairs
        starts = [i for i in range(len(leaders) - step) if i // step % 2 == 0]
        rounds.append(tuple(_pair(leaders[i], leaders[i + step]) for i in starts))
        step *= 2
    return [pairs for pairs in rounds if pairs]


def _tournament(ranks: Sequence[int]) -> list[Round]:
    """Every pair once, in as few rounds as possible (the circle method of round-robin tournaments)."""
    circle: list[int | None] = [*ranks, None] if len(ranks) % 2 else list(ranks)
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append(tuple(_pair(a, b) for a, b in facing if a is not None and b is not None))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def _pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


def measure(
    transport: Transport, rounds: Sequence[Round], nbytes: int = 2**18, repeats: int = 4, limit: float = 8.0
) -> list[Sample]:
    """Run the rounds; the same samples on every rank. Collective.

    Args:
        transport: the communicator.
        rounds: from `plan_rounds`, the same on every rank.
        nbytes: size of a message. 256 KiB reach most of the bandwidth of a link at 1 % of a second's traffic.
        repeats: exchanges of each pair; the fastest counts, because anything else on the machine only slows them down.
        limit: seconds after which no new round begins: ranks agree on it between rounds.
    """
    mine: list[Sample] = []
    started = time.perf_counter()
    for pairs in rounds:
        for a, b in pairs:
            if transport.rank in (a, b):
                sample = _exchange(transport, a, b, nbytes, repeats)
                mine += [sample] if transport.rank == a else []
        if transport.largest(time.perf_counter() - started) > limit:
            break
    return list(chain.from_iterable(transport.gather(mine)))


def _exchange(transport: Transport, a: int, b: int, nbytes: int, repeats: int) -> Sample:
    first = transport.rank == a
    peer = b if first else a

    def best(size: int) -> float:
        times = []
        for _ in range(repeats):
            begun = time.perf_counter()
            transport.ping(peer, first, size)
            times.append(time.perf_counter() - begun)
        return min(times) / 2

    transport.ping(peer, first, nbytes)  # connections and buffers are made here
    latency = best(LATENCY_BYTES)
    return Sample(a, b, rate_of(nbytes, best(nbytes), latency), latency)


def rate_of(nbytes: int, seconds: float, latency: float) -> float:
    """GB/s of a message of `nbytes` that took `seconds`, of which `latency` is not transfer.

    On a busy machine a small message can by chance take as long as a large one; so at most nine tenths of the time are
    put down to latency, or noise would be measured as an unlimited rate.
    """
    return nbytes / max(seconds - latency, seconds / 10) / 1e9


def correct(
    cluster: Cluster, slots: Sequence[Slot], samples: Sequence[Sample], rates: Rates | None = None, *, devices: bool
) -> tuple[Cluster, Rates, tuple[str, ...]]:
    """The cluster and the rates as measured, and what did not agree with the labels.

    Args:
        cluster, slots: what was measured.
        samples: from `measure`.
        rates: rates to start from.
        devices: whether messages went from device to device. If not, as over an MPI that knows no GPUs, samples inside
            nodes say nothing of GPU links: only those between ranks without devices and those of the network count.
    """
    rates = rates or Rates()
    across = [s.rate for s in samples if slots[s.a].node != slots[s.b].node]
    local = [s for s in samples if slots[s.a].node == slots[s.b].node]
    host = [s.rate for s in local if slots[s.a].device is None]
    if across:
        rates = replace(rates, network=median(across), ports=rates.ports or 1)
    if host:
        rates = replace(rates, host=median(host))
    if not devices:
        return cluster, rates, ()
    by_class: dict[tuple[str, int], list[float]] = {}
    links: dict[int, dict[tuple[int, int], float]] = {}
    for sample in local:
        i, j = slots[sample.a].device, slots[sample.b].device
        if i is not None and j is not None and i != j:
            by_class.setdefault(_label(cluster.nodes[slots[sample.a].node].link(i, j)), []).append(sample.rate)
            links.setdefault(slots[sample.a].node, {})[i, j] = sample.rate
    typical = {label: median(values) for label, values in by_class.items()}
    notes: list[str] = []
    nodes = [_corrected(node, links.get(k, {}), typical, notes) for k, node in enumerate(cluster.nodes)]
    return replace(cluster, nodes=tuple(nodes), notes=(*cluster.notes, *notes)), rates, tuple(notes)


def _label(link: Link) -> tuple[str, int]:
    return link.kind.value, link.count


def _corrected(
    node: Node, found: dict[tuple[int, int], float], typical: dict[tuple[str, int], float], notes: list[str]
) -> Node:
    """The node with the median rate of each label, and a rate of their own for pairs that are far from it."""

    def of(i: int, j: int, link: Link | None) -> Link | None:
        if link is None or _label(link) not in typical:
            return link
        usual = typical[_label(link)]
        own = found.get((i, j), found.get((j, i), usual))
        far = not usual / DEVIATION <= own <= usual * DEVIATION
        if far and i < j:
            name = f"{link.kind.value}{link.count or ''}"
            notes.append(f"{node.host}: devices {i} and {j} reach {own:.3g} GB/s, other {name} pairs {usual:.3g}")
        return replace(link, rate=own if far else usual)

    links = tuple(tuple(of(i, j, link) for j, link in enumerate(row)) for i, row in enumerate(node.links))
    return replace(node, links=links)


class MpiTransport:
    """Over an mpi4py communicator; messages in host memory."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.rank
        self._buffers: dict[int, bytearray] = {}

    def ping(self, peer: int, first: bool, nbytes: int) -> None:
        buffer = self._buffers.setdefault(nbytes, bytearray(nbytes))
        for sending in (first, not first):
            if sending:
                self._comm.Send(buffer, peer)
            else:
                self._comm.Recv(buffer, peer)

    def largest(self, value: float) -> float:
        return max(self._comm.allgather(value))

    def gather(self, value: Any) -> list[Any]:
        return list(self._comm.allgather(value))


class TorchTransport:
    """Over a torch process group (None: the world); messages on `device`."""

    def __init__(self, device: str = "cpu", group: Any = None) -> None:
        import torch.distributed as dist

        self._dist, self._group, self._device = dist, group, device
        self.rank: int = dist.get_rank(group)

    def ping(self, peer: int, first: bool, nbytes: int) -> None:
        import torch

        message = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        for sending in (first, not first):
            if sending:
                self._dist.send(message, group=self._group, group_dst=peer)
            else:
                self._dist.recv(message, group=self._group, group_src=peer)
        if message.is_cuda:
            torch.cuda.synchronize(message.device)

    def largest(self, value: float) -> float:
        return max(self.gather(value))

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self._dist.get_world_size(self._group)
        self._dist.all_gather_object(found, value, group=self._group)
        return found
