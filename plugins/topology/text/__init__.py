"""A node, or an NVLink fabric, from text that a tool printed: captured long ago or a moment before.

It is: `read_capture`, which finds out what the text is and hands it to the reader of its kind. It is not: a probe; no
tool is run. What is refused, and why, is in the readers: `links` (NVIDIA, Intel), `amd`, `fabric`, `matrix`,
`hwloc` (XML).
"""

from __future__ import annotations

from dataclasses import replace

from parallax.plugins.topology.description import Node
from parallax.plugins.topology.text.amd import is_amd, read_amd
from parallax.plugins.topology.text.fabric import Fabric, read_fabric, with_fabric
from parallax.plugins.topology.text.hwloc import is_hwloc, read_hwloc
from parallax.plugins.topology.text.links import is_capability_table, is_path_table, node_of_table
from parallax.plugins.topology.text.matrix import CaptureError, Table, read_tables
from parallax.plugins.topology.text.tokens import read_words

__all__ = ["CaptureError", "Fabric", "read_capture", "read_node"]


def read_capture(text: str, host: str = "") -> Node | Fabric:
    """What `text` describes.

    Raises:
        CaptureError: nothing usable is in it; the message says why.
    """
    if is_hwloc(text):
        return replace(read_hwloc(text, host), source="text")
    words = read_words(text)
    cleaned = "\n".join(words.lines)
    tables = read_tables(words)
    fabric = read_fabric(cleaned)
    if is_amd(tables, cleaned):
        return replace(read_amd(tables, cleaned, host), source="text")
    if not tables and fabric is not None:
        return fabric
    node = replace(_node_of_tables(tables, cleaned, host), source="text")
    return with_fabric(node, fabric) if fabric else node


def read_node(text: str, host: str = "") -> Node:
    """As `read_capture`, for callers who need the links inside a node.

    Raises:
        CaptureError: also for a text that tells of the fabric alone.
    """
    found = read_capture(text, host)
    if isinstance(found, Fabric):
        raise CaptureError("this text tells which NVLink domain the GPUs are in, not how they are joined: no matrix")
    return found


def _node_of_tables(tables: list[Table], text: str, host: str) -> Node:
    paths = [table for table in tables if is_path_table(table)]
    if not paths:
        if any(is_capability_table(table) for table in tables):
            raise CaptureError("this is `topo -p2p`, what GPUs may do with each other, not how they are joined (-m)")
        raise CaptureError(_nothing(text))
    whole = [table for table in paths if not table.problem()]
    table = (whole or paths)[0]
    node = node_of_table(table, text, host)
    others = [other for other in whole[1:] if (other.names, other.rows) != (table.names, table.rows)]
    if others:
        note = f"{len(others) + 1} different matrices are in this text; the first is read"
        node = replace(node, notes=(*node.notes, note))
    return node


def _nothing(text: str) -> str:
    if not text.strip():
        return "the text is empty"
    if "No devices were found" in text:
        return "the tool found no devices: are GPUs hidden from this process (container, cgroup)?"
    if "not found" in text or "couldn't communicate" in text:
        return "the tool did not run: " + next(line.strip() for line in text.split("\n") if line.strip())[:200]
    return "no topology matrix is in this text: no header of GPU names with a row for each"
