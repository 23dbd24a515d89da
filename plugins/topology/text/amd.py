"""A node from AMD's tools: `rocm-smi --showtopo`, `amd-smi topology`, as tables or as JSON.

It is: the choice of the table of link types among several tables of one form (weights, hops, access, bandwidth), and
the NUMA lines after them. It is not: a reader of the table's form (`matrix.py`).

Refused, with the reason: no table of link types (weights and hops alone do not name the link), a table that is not
whole, and a link that the tool could not tell (N/A, UNKNOWN).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from parallax.plugins.topology.description import Device, Link, LinkKind, Node, fabric_of
from parallax.plugins.topology.text.links import SELF, reconcile, with_numa
from parallax.plugins.topology.text.matrix import CaptureError, Table

_KINDS = {"XGMI": LinkKind.XGMI, "PCIE": LinkKind.PCIE}
_PAIR = re.compile(r'type between (?:DRM )?devices (\d+) and (\d+)"?\s*[:,]\s*"?(\w+)', re.IGNORECASE)
_NUMA = re.compile(r"(?:GPU|card)\D?(\d+)\D[^\n]{0,40}?Numa (Node|Affinity)[^\w\-]{1,6}(-?\d+)", re.IGNORECASE)


def is_amd(tables: Sequence[Table], text: str) -> bool:
    """Whether the capture is by one of AMD's tools."""
    cells = {cell for table in tables for row in table.rows.values() for cell in row}
    if cells & {"XGMI", "PCIE"} or _PAIR.search(text):
        return True
    return any(_is_of(table, "link type", "weight", "hops", "access") for table in tables) or "link_type" in text


def read_amd(tables: Sequence[Table], text: str, host: str = "") -> Node:
    """The node; `text` is cleaned.

    Raises:
        CaptureError: see the module.
    """
    node = _from_json(text, host)
    if node is None:
        node = _from_tables(tables, host)
    return with_numa(node, _numa(text))


def _from_tables(tables: Sequence[Table], host: str) -> Node:
    typed = [table for table in tables if _is_of(table, "link type") or _has_types(table)]
    if not typed:
        raise CaptureError("there is no table of link types: weights, hops or access alone do not name the link")
    table = typed[0]
    problem = table.problem()
    if problem:
        raise CaptureError(problem)
    names = table.names[: table.gpus]
    speeds = next((t for t in tables if _is_of(t, "bw", "bandwidth") and not t.problem() and t.names == names), None)
    kinds = [[table.rows[a][j] for j in range(table.gpus)] for a in names]
    rates = [[_rate(speeds.rows[a][j]) if speeds else None for j in range(table.gpus)] for a in names]
    devices = [Device(_index(name, i), name, bus_id=name if ":" in name else None) for i, name in enumerate(names)]
    return _node(devices, kinds, rates, host)


def _node(
    devices: Sequence[Device], kinds: Sequence[Sequence[str]], rates: Sequence[Sequence[float | None]], host: str
) -> Node:
    names = [device.name for device in devices]
    raw: list[list[Link | None]] = [[None] * len(names) for _ in names]
    for i, row in enumerate(kinds):
        for j, cell in enumerate(row):
            if i == j:
                if cell not in {"0", "N/A", *SELF}:
                    raise CaptureError(f"row {names[i]} has {cell!r} on the diagonal: columns are shifted")
            elif cell not in _KINDS:
                raise CaptureError(f"row {names[i]}, column {names[j]} is {cell!r}, which names no link")
            else:
                raw[i][j] = Link(_KINDS[cell], 1 if cell == "XGMI" else 0, rates[i][j])
    links, notes = reconcile(raw, names)
    return Node(host, tuple(devices), links, fabric=fabric_of(links), notes=tuple(notes))


def _from_json(text: str, host: str) -> Node | None:
    """`--json` of either tool: pairs by number (rocm-smi) or a list of links for each GPU (amd-smi)."""
    pairs = {(int(a), int(b)): kind.upper() for a, b, kind in _PAIR.findall(text)}
    if pairs:
        indices = sorted({i for pair in pairs for i in pair})
        kinds = [["0" if i == j else pairs.get((i, j), pairs.get((j, i), "")) for j in indices] for i in indices]
        devices = [Device(i, f"GPU{i}") for i in indices]
        return _node(devices, kinds, [[None] * len(indices)] * len(indices), host)
    if "link_type" not in text or "[" not in text:
        return None
    try:
        rows = json.loads(text[text.index("[") : text.rindex("]") + 1])
        return _from_list(rows, host)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CaptureError(f"the JSON of amd-smi topology cannot be read: {error}") from error


def _from_list(rows: Sequence[Mapping[str, Any]], host: str) -> Node:
    indices = [int(row["gpu"]) for row in rows]
    kinds, rates = [], []
    for row in rows:
        by_gpu = {int(link["gpu"]): link for link in row["links"]}
        kinds.append([str(by_gpu[j]["link_type"]).upper() for j in indices])
        rates.append([_rate(str(by_gpu[j].get("bandwidth", ""))) for j in indices])
    devices = [Device(int(row["gpu"]), f"GPU{row['gpu']}", bus_id=row.get("bdf")) for row in rows]
    return _node(devices, kinds, rates, host)


def _numa(text: str) -> dict[int, str]:
    """NUMA node of each GPU; its affinity where the node is not told (-1)."""
    found: dict[int, str] = {}
    for index, what, value in _NUMA.findall(text):
        if int(value) >= 0 and (what.lower() == "node" or int(index) not in found):
            found[int(index)] = value
    return found


def _rate(cell: str) -> float | None:
    """GB/s from "min-max" in MB/s."""
    numbers = re.findall(r"\d+", cell)
    return float(numbers[-1]) / 1000 if numbers and float(numbers[-1]) > 0 else None


def _is_of(table: Table, *words: str) -> bool:
    title = table.title.lower().replace("_", " ")
    return any(word in title for word in words)


def _has_types(table: Table) -> bool:
    return any(cell in _KINDS for row in table.rows.values() for cell in row)


def _index(name: str, position: int) -> int:
    match = re.fullmatch(r"GPU(\d+)", name)
    return int(match[1]) if match else position
