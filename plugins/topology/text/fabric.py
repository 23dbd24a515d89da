"""NVLink domains that may cross hosts: the Fabric section of `nvidia-smi -q`, or a query of `fabric.*` as CSV.

It is: each GPU's state, cluster and clique, and what follows: GPUs of one (cluster UUID, clique) reach each other over
NVLink, on whatever host they are. It is not: a matrix; the links inside the node are told elsewhere.

As NCCL does, a domain is believed only when the state is complete and the cluster UUID is not all zeros (zeros: the
NVSwitch of one machine). A query that does not ask for the UUID tells a domain's clique but not which rack it is in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from parallax.plugins.topology.description import Node

_NOT_TOLD = re.compile(r"\[?(?:N/A|Not Supported|Unknown)[^\]]*\]?$", re.IGNORECASE)
_SECTION = re.compile(r"^\s*Fabric\s*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class FabricMember:
    """One GPU's part in the fabric, None for what the text does not tell.

    Attributes:
        index: GPU number.
        state: as printed, e.g. "Completed".
        cluster: UUID of the NVLink cluster, lower case.
        clique: number inside the cluster.
    """

    index: int
    state: str | None
    cluster: str | None
    clique: int | None

    @property
    def complete(self) -> bool:
        """Registration is over; a query that does not ask for the state is taken at its word."""
        return self.state is None or self.state.lower().startswith("complete")

    @property
    def domain_key(self) -> str | None:
        """Names the domain across hosts; None when this GPU is in no domain that may leave its host."""
        known = self.complete and self.clique is not None and self.cluster is not None
        return f"{self.cluster}/{self.clique}" if known and set(self.cluster or "") - set("0-") else None

    @property
    def verdict(self) -> str:
        """ "none", "pending", "node" (switch of one machine), "cluster", or "clique" (rack not told)."""
        if self.clique is None and self.cluster is None:
            return "none" if self.state is None or not self.state.lower().startswith("in progress") else "pending"
        if not self.complete:
            return "pending"
        if self.domain_key:
            return "cluster"
        if self.cluster is None:
            return "clique" if self.clique else "node"
        return "node"


_SENTENCES = {
    "none": "no NVSwitch fabric",
    "pending": "the fabric is still being set up: ask again when its state is Completed",
    "node": "NVSwitch of one machine: not part of a multi-node NVLink domain",
    "cluster": "part of a multi-node NVLink domain",
    "clique": "part of a multi-node NVLink domain; which one is not told without fabric.clusterUuid",
}


@dataclass(frozen=True)
class Fabric:
    """All GPUs of one text."""

    members: tuple[FabricMember, ...]

    def answer(self) -> dict[str, Any]:
        """Plain values: how many GPUs, "nvlink" or "pcie", the domains, whether they may cross hosts, a sentence."""
        verdicts = [member.verdict for member in self.members]
        domains: dict[str, list[int]] = {}
        for member in self.members:
            if member.verdict in ("cluster", "clique"):
                domains.setdefault(member.domain_key or f"?/{member.clique}", []).append(member.index)
        return {
            "gpus": len(self.members),
            "fabric": "pcie" if set(verdicts) <= {"none"} else "nvlink",
            "multi_node": bool(domains),
            "fabric_domains": domains,
            "note": "; ".join(dict.fromkeys(_SENTENCES[verdict] for verdict in verdicts)),
        }


def read_fabric(text: str) -> Fabric | None:
    """Fabric of the text; None when it says nothing of one."""
    members = _from_sections(text) or _from_csv(text)
    return Fabric(tuple(members)) if members else None


def with_fabric(node: Node, fabric: Fabric) -> Node:
    """`node` with the domain key of each device, when the text lists as many GPUs."""
    if len(fabric.members) != len(node.devices):
        return node
    pairs = zip(node.devices, fabric.members, strict=True)
    return replace(node, devices=tuple(replace(device, domain_key=member.domain_key) for device, member in pairs))


def _from_sections(text: str) -> list[FabricMember]:
    """`nvidia-smi -q`: a section for each GPU, in order; a field belongs to it while it is indented deeper."""
    members: list[FabricMember] = []
    for match in _SECTION.finditer(text):
        fields: dict[str, str] = {}
        depth = len(match.group().strip("\n")) - len(match.group().strip("\n").lstrip())
        for line in text[match.end() :].lstrip("\n").split("\n"):
            if line.strip() and len(line) - len(line.lstrip()) <= depth:
                break
            key, _, value = line.partition(":")
            fields.setdefault(re.sub(r"\W", "", key).lower(), value.strip())
        if "state" in fields or "cliqueid" in fields:
            members.append(_member(len(members), fields))
    return members


def _from_csv(text: str) -> list[FabricMember]:
    """`--query-gpu=index,fabric.*`: a heading with fabric columns, then a line for each GPU."""
    lines = [line.split(",") for line in text.split("\n")]
    starts = [i for i, line in enumerate(lines) if len(line) > 1 and any("fabric." in word for word in line)]
    heads = [i for i in starts if not any("--query" in word for word in lines[i])]
    if not heads:
        return []
    names = [re.sub(r"\W|_|^\s*fabric\.", "", word.strip().lower()) for word in lines[heads[0]]]
    members: list[FabricMember] = []
    for line in lines[heads[0] + 1 :]:
        if len(line) != len(names):
            break
        members.append(_member(len(members), {k: v.strip() for k, v in zip(names, line, strict=True)}))
    return members


def _member(position: int, fields: dict[str, str]) -> FabricMember:
    def told(name: str) -> str | None:
        value = fields.get(name, "")
        return value if value and not _NOT_TOLD.match(value) else None

    clique, index, cluster = told("cliqueid"), told("index"), told("clusteruuid")
    return FabricMember(
        index=int(index) if index and index.isdigit() else position,
        state=told("state"),
        cluster=cluster.lower() if cluster else None,
        clique=int(clique, 0) if clique else None,
    )
