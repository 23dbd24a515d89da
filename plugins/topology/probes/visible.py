"""Which of a machine's GPUs a process may use: CUDA_VISIBLE_DEVICES and its kin, applied to a node.

It is: the drivers' own rule (numbers or UUID prefixes, order kept, everything from the first bad entry on is dropped).
It is not: a judge of MIG: an instance has no links, so naming one is refused.
"""

from __future__ import annotations

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
