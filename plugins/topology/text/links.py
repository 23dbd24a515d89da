"""A node from a matrix of path names: `nvidia-smi topo -m` (and -mp), `xpu-smi topology -m`.

It is: the meaning of the cells X, NV#, PIX ... SOC, MDF, XL# and of the affinity columns. It is not: a reader of the
table's form (`matrix.py`).

A capture is refused, with the reason, when it does not tell the path between every two GPUs:
- the table is not whole (`Table.problem`), or it was printed by `topo -p2p` (capabilities: OK, NS, CNS, ...);
- a cell between GPUs is not a known path (ERR!, N/A, a hand-made placeholder);
- the diagonal is not "self", or a device is "self" to another one: the columns are shifted;
- the row of a GPU has too few cells and the two directions of some pair differ: a cell inside was lost.
Where the two cells of one pair differ, the weaker is taken and a note says so. Missing rows of network ports do not
matter to GPUs: the node is marked incomplete.
"""

from __future__ import annotations

import re
from dataclasses import replace

from parallax.plugins.topology.description import Device, Link, LinkKind, Nic, Node, fabric_of
from parallax.plugins.topology.text.matrix import CaptureError, Table
from parallax.plugins.topology.text.tokens import Token

SELF = frozenset({"X", "S", "SELF"})
_PLAIN = {kind.value: kind for kind in LinkKind if not kind.is_link and kind is not LinkKind.UNKNOWN}
_COUNTED = {"NV": LinkKind.NVLINK, "XL": LinkKind.XELINK}


def read_link(cell: str) -> Link | None:
    """Meaning of one cell that is not "self"; None when it names no path."""
    if cell in ("SOC", "SYS"):
        return Link(LinkKind.SYS)
    if cell in _PLAIN:
        return Link(_PLAIN[cell])
    if cell in ("MDF", "XGMI", "XL*"):
        return Link(_COUNTED[cell[:2]] if cell == "XL*" else LinkKind(cell), 1)
    match = re.fullmatch(r"(NV|XL)(\d+)", cell)
    return Link(_COUNTED[match[1]], int(match[2])) if match and int(match[2]) > 0 else None


def is_path_table(table: Table) -> bool:
    """Whether its cells are of this family: a known path, or "self" among anything but capabilities."""
    cells = {cell for row in table.rows.values() for cell in row}
    return any(read_link(cell) for cell in cells) or (bool(cells & SELF) and not is_capability_table(table))


def is_capability_table(table: Table) -> bool:
    """Whether it is `topo -p2p`: it says what is allowed between GPUs, not how they are joined."""
    cells = [cell for row in table.rows.values() for cell in row if cell not in SELF]
    return bool(cells) and all(Token(cell, 0, 0, 0).is_status for cell in cells)


def node_of_table(table: Table, text: str, host: str = "") -> Node:
    """The node that `table` describes; `text` is the whole capture (legend, command line).

    Raises:
        CaptureError: see the module.
    """
    problem = table.problem()
    if problem:
        raise CaptureError(problem)
    raw = [[_cell(table, i, j) for j in range(table.gpus)] for i in range(table.gpus)]
    links, notes = reconcile(raw, table.names)
    if notes and table.is_short():
        raise CaptureError(f"{notes[0]}, and some row has too few cells: a cell was lost and the rest is shifted")
    gaps = table.gaps()
    fabric = fabric_of(links)
    hidden = fabric == "pcie" and table.gpus > 1 and _hides_nvlink(text)
    if hidden:
        notes.append("a view of PCIe alone (topo -mp): NVLink is not shown, which does not mean that there is none")
    return Node(
        host=host,
        devices=tuple(_device(table, i) for i in range(table.gpus)),
        links=links,
        nics=tuple(_nic(table, k, text) for k in range(table.gpus, len(table.names))),
        fabric="nvlink" if hidden else fabric,
        complete=not gaps and not hidden,
        notes=(*notes, *gaps),
    )


def reconcile(raw: list[list[Link | None]], names: list[str]) -> tuple[tuple[tuple[Link | None, ...], ...], list[str]]:
    """Make `raw` symmetric by the weaker of two cells; a note names the pairs that differed."""
    n = len(raw)
    rows, differing = [list(row) for row in raw], []
    for i in range(n):
        for j in range(i + 1, n):
            a, b = raw[i][j], raw[j][i]
            if a is None or b is None or a == b:
                continue
            rows[i][j] = rows[j][i] = a.weaker(b)
            differing.append(f"{names[i]}-{names[j]} ({_text(a)} and {_text(b)})")
    if not differing:
        return tuple(map(tuple, rows)), []
    shown = ", ".join(differing[:4]) + (f" and {len(differing) - 4} more" if len(differing) > 4 else "")
    return tuple(map(tuple, rows)), [f"the two directions differ for {shown}: the weaker is taken"]


def _cell(table: Table, i: int, j: int) -> Link | None:
    name, other = table.names[i], table.names[j]
    cell = table.rows[name][j]
    if (cell in SELF) != (i == j):
        where = f"row {name}, column {other}"
        raise CaptureError(f"{where} is {cell!r}: " + ("not 'self'" if i == j else "'self'") + "; columns are shifted")
    if i == j:
        return None
    link = read_link(cell)
    if link is None:
        raise CaptureError(f"row {name}, column {other} is {cell!r}, which names no path between GPUs")
    return link


def _device(table: Table, i: int) -> Device:
    name = table.names[i]
    values = table.values.get(name, {})
    match = re.fullmatch(r"GPU(\d+)", name)
    return Device(
        index=int(match[1]) if match else i,
        name=name,
        bus_id=name if ":" in name else None,
        numa=values.get("numa"),
        cpus=values.get("cpu"),
    )


def _nic(table: Table, k: int, text: str) -> Nic:
    label = table.names[k]
    legend = re.search(rf"\b{re.escape(label)}\s*:\s*(\S+)", text)
    cells = [table.rows[name][k] if k < len(table.rows[name]) else "" for name in table.names[: table.gpus]]
    links = tuple(read_link(cell) or Link(LinkKind.UNKNOWN) for cell in cells)
    return Nic(label, legend[1] if legend else None if label.startswith("NIC") else label, links)


def _hides_nvlink(text: str) -> bool:
    """`topo -mp`, by its command line or by the tool's own legend without the line that every -m legend has.

    Legends with SOC are from before NVLink.
    """
    if re.search(r"topo\s+(?:-mp\b|--matrix_pci)", text):
        return True
    legend = re.search(r"^\W*X\s*=\s*Self", text, re.MULTILINE) and re.search(r"^\W*SYS\s*=", text, re.MULTILINE)
    return bool(legend) and not re.search(r"^\W*NV#\s*=", text, re.MULTILINE)


def _text(link: Link) -> str:
    return f"{link.kind.value}{link.count}" if link.kind in _COUNTED.values() else link.kind.value


def with_numa(node: Node, numa: dict[int, str]) -> Node:
    """`node` with the NUMA affinity of devices by index."""
    return replace(node, devices=tuple(replace(d, numa=numa.get(d.index, d.numa)) for d in node.devices))
