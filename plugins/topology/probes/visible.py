"""Which of a machine's GPUs a process may use: CUDA_VISIBLE_DEVICES and its kin, and Intel's mask, applied to a node.

It is: the drivers' own rule (numbers or UUID prefixes, order kept, everything from the first bad entry on is dropped).
It is not: a judge of MIG: an instance has no links, so naming one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from parallax.plugins.topology.description import Node
from parallax.plugins.topology.probes.base import ProbeError


def only_visible(node: Node, environ: Mapping[str, str], names: Sequence[str]) -> Node:
    """`node` reduced to the GPUs named by the first set variable of `names`, in its order.

    Raises:
        ProbeError: the variable names a MIG instance, or leaves nothing of the GPUs that are there.
    """
    name = next((name for name in names if name in environ), None)
    if name is None or not node.devices:
        return node
    value = environ[name]
    kept = _chosen(node, name, value)
    if not kept:
        raise ProbeError(
            f"{name}={value!r} hides all {len(node.devices)} GPUs of {node.host}: unset it, or name GPUs "
            f"0 to {len(node.devices) - 1}"
        )
    return select(node, kept, f"{name}={value}: {len(kept)} of {len(node.devices)} GPUs are used")


def select(node: Node, kept: Sequence[int], note: str) -> Node:
    """`node` with the devices at positions `kept`, in that order; the note is added if that changes anything."""
    if list(kept) == list(range(len(node.devices))):
        return node
    return replace(
        node,
        devices=tuple(node.devices[i] for i in kept),
        links=tuple(tuple(node.links[i][j] for j in kept) for i in kept),
        nics=tuple(replace(nic, links=tuple(nic.links[i] for i in kept if nic.links)) for nic in node.nics),
        notes=(*node.notes, note),
    )


def only_in_mask(node: Node, environ: Mapping[str, str]) -> Node:
    """`node` reduced to the tiles in ZE_AFFINITY_MASK.

    By default (ZE_FLAT_DEVICE_HIERARCHY unset, FLAT or COMBINED) every tile is a device and the mask lists their
    numbers; in COMPOSITE it lists cards, or tiles as card.tile. It is a set: the order stays the machine's. A form
    that belongs to the other hierarchy is not applied: the node is marked incomplete.

    Raises:
        ProbeError: nothing of what is there is in the mask.
    """
    mask = environ.get("ZE_AFFINITY_MASK", "")
    entries = [entry.strip() for entry in mask.split(",") if entry.strip()]
    if not entries or not node.devices:
        return node
    composite = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT").upper() == "COMPOSITE"
    pattern = r"\d+(\.\d+)?" if composite else r"\d+"
    if not all(re.fullmatch(pattern, entry) for entry in entries):
        note = f"ZE_AFFINITY_MASK={mask} is set, but not applied to this description: it is not of the form of "
        form = "COMPOSITE (0 or 0.1)" if composite else "FLAT (0,1,...: every tile has a number of its own)"
        return replace(node, complete=False, notes=(*node.notes, note + form))
    kept = [i for i, device in enumerate(node.devices) if _in_mask(i, device.name, entries, composite)]
    if not kept:
        raise ProbeError(f"ZE_AFFINITY_MASK={mask!r} hides all {len(node.devices)} tiles of {node.host}: unset it")
    return select(node, kept, f"ZE_AFFINITY_MASK={mask}: {len(kept)} of {len(node.devices)} tiles are used")


def _in_mask(position: int, name: str, entries: Sequence[str], composite: bool) -> bool:
    if not composite:
        return str(position) in entries
    card, _, tile = name.removeprefix("GPU").partition("/")
    return card in entries or f"{card}.{tile or 0}" in entries


def _chosen(node: Node, name: str, value: str) -> list[int]:
    kept: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.upper().startswith("MIG-"):
            raise ProbeError(f"{name} names a MIG instance ({entry}): it has no link to any other; use whole GPUs")
        found = _position(node, entry)
        if found is None or found in kept:
            break
        kept.append(found)
    return kept


def _position(node: Node, entry: str) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < len(node.devices) else None
    found = [i for i, device in enumerate(node.devices) if entry and (device.uuid or "").startswith(entry)]
    return found[0] if len(found) == 1 else None
