"""What a capture says, in plain values: counts, fabric, domains, cliques, affinity, and the best groups by size.

It is: the form that `parallax topo --json` prints. It is not: a parser (`text`) or a search (`grouping`).
"""

from __future__ import annotations

from typing import Any

from parallax.plugins.topology.description import Node
from parallax.plugins.topology.grouping import best_groups
from parallax.plugins.topology.text import Fabric, read_capture

SIZES = (2, 4, 8)
"""Group sizes that `best_tp` answers for, where the node has as many devices."""


def answers(node: Node) -> dict[str, Any]:
    """Answers for one node; lists hold device positions.

    `socket_groups` is there only where sockets can be told although the affinity does not say; `notes` and `complete`
    say what the source lacks or contradicts.
    """
    found: dict[str, Any] = {
        "gpus": len(node.devices),
        "nics": len(node.nics),
        "fabric": node.fabric,
        "link_domains": node.link_domains(),
        "link_cliques": node.link_cliques(),
        "all_to_all": node.all_to_all(),
        "isolated": node.isolated(),
        "numa_groups": node.numa_groups(),
        "best_tp": {size: best_groups(node, size).to_answer() for size in SIZES if size <= len(node.devices)},
        "complete": node.complete,
        "notes": list(node.notes),
    }
    sockets = node.socket_groups()
    if sockets is not None:
        found["socket_groups"] = sockets
    return found


def answers_of_text(text: str) -> dict[str, Any]:
    """Answers for a captured text; one that tells of the fabric alone is answered by `Fabric.answer`.

    Raises:
        CaptureError: the capture must be refused.
    """
    found = read_capture(text)
    return found.answer() if isinstance(found, Fabric) else answers(found)
