"""The whole cluster from each rank's view of its own node.

It is: two exchanges, and the joining of what came back: ranks of one machine, hosts of one name, processes that see
different GPUs. It is not: a probe, nor the transport: `exchange` is any all-gather of picklable objects (MPI's
`comm.allgather`, or `store_exchange`). Every rank gets the same cluster.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined] # not in its __all__

from parallax.plugins.topology.description import Cluster, Device, Link, LinkKind, Node, Slot, fabric_of

Exchange = Callable[[Any], Sequence[Any]]
"""All-gather: takes this rank's object, returns all ranks' objects by rank."""


def store_exchange(store: Store, rank: int, size: int) -> Exchange:
    """All-gather of JSON values over a torch store, for processes that torchrun started (sequences arrive as lists).

    Each call uses keys of its own; keep one exchange for each store, or wrap the store in a `PrefixStore`.
    """
    calls = count()

    def exchange(value: Any) -> list[Any]:
        call = next(calls)
        store.set(f"topology/{call}/{rank}", json.dumps(value))
        if rank == 0:  # reads every value and writes them as one: n keys are read in all, not n for each rank
            values = store.multi_get([f"topology/{call}/{k}" for k in range(size)])
            store.set(f"topology/{call}/all", json.dumps([json.loads(text) for text in values]))
        return list(json.loads(store.get(f"topology/{call}/all")))

    return exchange


def gather_cluster(
    node: Node | None, exchange: Exchange, device: int | None = None, problem: str | None = None
) -> Cluster:
    """Join the views of all ranks. Collective: every rank calls it, also one whose probe failed.

    Two exchanges: a digest from each rank, then each distinct view once.

    Args:
        node: this rank's description; None when its probe failed.
        exchange: all-gather of picklable objects.
        device: position in `node.devices` of the device that this rank uses; None on CPUs.
        problem: why `node` is None.

    Raises:
        ValueError: the same on every rank: a rank has no node, its device is not there, or two ranks share one.
    """
    told = "" if node is None else json.dumps(node.to_dict(), sort_keys=True)
    digest = hashlib.sha256(told.encode()).hexdigest() if node is not None else None
    token = secrets.token_hex(16)  # exchange does not say which answer is this rank's
    heard = list(exchange((token, digest, device, problem)))
    digests = [got[1] for got in heard]
    speaks = digests.index(digest) == [got[0] for got in heard].index(token)
    views = {got[0]: got[1] for got in exchange((digest, told) if speaks else None) if got is not None}
    failed = [rank for rank, found in enumerate(digests) if found is None]
    if failed:
        more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        reason = heard[failed[0]][3] or "no reason given"
        raise ValueError(f"rank {failed[0]}{more} could not describe its node: {reason}")
    nodes = {found: Node.from_dict(json.loads(text)) for found, text in views.items()}
    return join_views([nodes[found] for found in digests], [got[2] for got in heard])


def join_views(nodes: Sequence[Node], devices: Sequence[int | None]) -> Cluster:
    """The cluster of ranks that see `nodes[rank]` and use the device at position `devices[rank]` there.

    Raises:
        ValueError: a rank's device is not there, or two ranks use one.
    """
    _check_there(nodes, devices)
    keys: dict[tuple[str, str], list[int]] = {}
    for rank, node in enumerate(nodes):
        keys.setdefault((node.host, node.machine), []).append(rank)
    notes: list[str] = []
    joined = [_union([nodes[rank] for rank in ranks]) for ranks in keys.values()]
    slots: dict[int, Slot] = {}
    for k, ranks in enumerate(keys.values()):
        for rank in ranks:
            position = devices[rank]
            where = None if position is None else _find(joined[k], nodes[rank].devices[position])
            slots[rank] = Slot(k, where)
    _check_shared(slots, joined)
    joined = _unique_names(joined, notes)
    sizes = {len(node.devices) for node in joined}
    if len(sizes) > 1:
        counts = ", ".join(f"{node.host} {len(node.devices)}" for node in joined[:8])
        notes.append(f"hosts have different numbers of GPUs ({counts}{', ...' if len(joined) > 8 else ''})")
    if len({node.fabric for node in joined}) > 1:
        notes.append("hosts have different fabrics: " + ", ".join(f"{node.host} {node.fabric}" for node in joined[:8]))
    return Cluster(tuple(joined), tuple(slots[rank] for rank in range(len(nodes))), tuple(notes))


def _check_there(nodes: Sequence[Node], devices: Sequence[int | None]) -> None:
    for rank, (node, device) in enumerate(zip(nodes, devices, strict=True)):
        there = len(node.devices)
        if device is not None and not 0 <= device < there:
            raise ValueError(
                f"rank {rank} on {node.host} would use device {device}, but sees {there}: start at most {there} ranks "
                "there, or show it more GPUs (CUDA_VISIBLE_DEVICES)"
            )


def _check_shared(slots: dict[int, Slot], nodes: Sequence[Node]) -> None:
    users: dict[Slot, int] = {}
    for rank, slot in sorted(slots.items()):
        if slot.device is None:
            continue
        first = users.setdefault(slot, rank)
        if first != rank:
            device = nodes[slot.node].devices[slot.device]
            raise ValueError(
                f"ranks {first} and {rank} both use GPU {device.index} of {nodes[slot.node].host}: start one rank for "
                "each GPU, or give each its own CUDA_VISIBLE_DEVICES"
            )


def _union(views: Sequence[Node]) -> Node:
    """One node from the views of its ranks; a pair that no rank sees whole is joined by switches, or unknown."""
    first = views[0]
    if all(view == first for view in views[1:]):
        return first
    devices: list[Device] = []
    links: dict[tuple[int, int], Link] = {}
    for view in views:
        at = []
        for device in view.devices:
            found = next((i for i, known in enumerate(devices) if _same(known, device)), None)
            if found is None:
                found = len(devices)
                devices.append(device)
            at.append(found)
        for i, a in enumerate(at):
            for j, b in enumerate(at):
                if a != b:
                    link = view.link(i, j)
                    links[a, b] = links[a, b].weaker(link) if (a, b) in links else link
    order = sorted(range(len(devices)), key=lambda i: (devices[i].bus_id or "", devices[i].index, i))
    unseen = 0
    for a in order:
        for b in order:
            if a != b and (a, b) not in links:
                links[a, b] = _unseen(devices[a], devices[b])
                unseen += links[a, b].kind is LinkKind.UNKNOWN
    rows = tuple(tuple(None if a == b else links[a, b] for b in order) for a in order)
    notes = list(dict.fromkeys(note for view in views for note in view.notes))
    if any(len(view.devices) < len(devices) for view in views):
        notes.append(
            f"ranks see different GPUs, {len(devices)} in all"
            + (f"; paths of {unseen // 2} pairs are not known, as no rank sees both GPUs" if unseen else "")
        )
    fabrics = {view.fabric for view in views} - {"pcie", "none"}
    return replace(
        first,
        devices=tuple(devices[i] for i in order),
        links=rows,
        nics=first.nics if len(first.devices) == len(devices) else (),
        fabric=fabric_of(rows) if fabric_of(rows) != "pcie" or not fabrics else sorted(fabrics)[0],
        complete=all(view.complete for view in views) and not unseen,
        notes=tuple(notes),
    )


def _same(a: Device, b: Device) -> bool:
    if a.uuid and b.uuid:
        return a.uuid == b.uuid
    if a.bus_id and b.bus_id:
        return a.bus_id == b.bus_id
    return a.index == b.index


def _unseen(a: Device, b: Device) -> Link:
    count = min(a.switch_links, b.switch_links)
    if a.domain_key and a.domain_key == b.domain_key:
        return Link(LinkKind.NVLINK, max(1, count))
    return Link(LinkKind.NVLINK, count) if count else Link(LinkKind.UNKNOWN)


def _find(node: Node, device: Device) -> int:
    return next(i for i, known in enumerate(node.devices) if _same(known, device))


def _unique_names(nodes: Sequence[Node], notes: list[str]) -> list[Node]:
    """Hosts of one name that are different machines get a number behind it."""
    names = [node.host for node in nodes]
    taken, found = set(names), []
    for k, node in enumerate(nodes):
        if node.host in names[:k]:
            fresh = next(name for n in count(2) if (name := f"{node.host}#{n}") not in taken)
            taken.add(fresh)
            node = replace(node, host=fresh)
        found.append(node)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        notes.append(f"several machines are called {', '.join(twice)}: told apart by their boot ids, and numbered")
    return found
