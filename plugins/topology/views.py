"""The tables and the JSON of `parallax topo`.

It is: rendering of what the description and the placement say. It is not: a source of any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from parallax.plugins.topology.answers import answers
from parallax.plugins.topology.description import Cluster, Node
from parallax.plugins.topology.fit import Misfit
from parallax.plugins.topology.placement import Placement
from parallax.plugins.topology.seats import Seat
from parallax.strategies.layout import Layout
from parallax.strategies.report import ranges

MOST_ROWS = 64


def node_table(cluster: Cluster) -> Table:
    """Nodes, those that look alike on one row."""
    table = Table(title="nodes", title_justify="left")
    for column in ("host", "nodes", "GPUs", "links", "link domains", "NUMA groups", "NICs", "source"):
        table.add_column(column, justify="right" if column in ("nodes", "GPUs", "NICs") else "left")
    alike: dict[tuple[str, ...], list[str]] = {}
    for node in cluster.nodes:
        alike.setdefault(_row(node), []).append(node.host)
    for row, hosts in alike.items():
        name = hosts[0] if len(hosts) == 1 else f"{hosts[0]} ... {hosts[-1]}"
        table.add_row(name, str(len(hosts)), *row)
    return table


def _row(node: Node) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for i in range(len(node.devices)):
        for j in range(i + 1, len(node.devices)):
            link = node.link(i, j)
            name = f"{link.kind.value}{link.count or ''}"
            counts[name] = counts.get(name, 0) + 1
    links = ", ".join(f"{name} x {pairs}" for name, pairs in sorted(counts.items())) or "-"
    domains = "all to all" if node.all_to_all() else _sets(node.link_domains()) or "none"
    return (
        str(len(node.devices)),
        links,
        domains,
        _sets(node.numa_groups() or []) or "-",
        str(len(node.nics)),
        node.source,
    )


def _sets(groups: Sequence[Sequence[int]]) -> str:
    return " ".join(f"{{{ranges(group)}}}" for group in groups)


def fabric_rows(cluster: Cluster) -> list[str]:
    """One line for each link domain that crosses nodes."""
    keys: dict[str, dict[str, int]] = {}
    for node in cluster.nodes:
        for device in node.devices:
            if device.domain_key:
                hosts = keys.setdefault(device.domain_key, {})
                hosts[node.host] = hosts.get(node.host, 0) + 1
    return [
        f"NVLink domain {key}: {sum(hosts.values())} devices on {len(hosts)} nodes, from {min(hosts)} to {max(hosts)}"
        for key, hosts in keys.items()
        if len(hosts) > 1
    ]


def time_table(placement: Placement, assumed: bool) -> Table:
    """Predicted time of each axis in both orders."""
    unit = "ms a step, of assumed volumes" if assumed else "ms a step"
    table = Table(title=f"predicted communication ({unit})", title_justify="left")
    for column in ("axis", "launcher's order", "this order", "times faster"):
        table.add_column(column, justify="left" if column == "axis" else "right")
    rows = [(axis, placement.before[axis], placement.after[axis]) for axis in placement.before]
    rows.append(("sum", sum(placement.before.values()), sum(placement.after.values())))
    for axis, before, after in rows:
        table.add_row(axis, f"{before * 1e3:.3f}", f"{after * 1e3:.3f}", f"{before / after:.2f}" if after else "-")
    return table


def seat_table(before: Sequence[Seat], after: Sequence[Seat]) -> Table:
    """Device by device, who sits there before and after. Long tables are cut, and say so."""
    table = Table(title="ranks", title_justify="left")
    for column in ("host", "device", "launched as", "coordinates", "global rank", "coordinates then"):
        table.add_column(column, justify="left" if column in ("host", "coordinates", "coordinates then") else "right")
    order = sorted(range(len(before)), key=lambda i: (before[i].slot.node, before[i].slot.device or 0, i))
    for i in order[:MOST_ROWS]:
        old, new = before[i], after[i]
        device = "-" if old.device is None else str(old.device)
        table.add_row(old.host, device, str(old.rank), str(old), str(new.rank), str(new))
    if len(order) > MOST_ROWS:
        table.caption = f"the first {MOST_ROWS} of {len(order)} ranks; --json prints all"
    return table


def placement_dict(
    layout: Layout, placement: Placement, before: Sequence[Seat], after: Sequence[Seat], misfits: Sequence[Misfit]
) -> dict[str, Any]:
    """Plain values for JSON. Times in seconds per step."""
    return {
        "layout": str(layout),
        "new_rank_of": list(placement.new_rank_of),
        "changed": placement.changed,
        "predicted_seconds": {"before": dict(placement.before), "after": dict(placement.after)},
        "misfits": [misfit.describe(layout) for misfit in misfits],
        "notes": list(placement.notes),
        "ranks": [
            {
                "host": new.host,
                "device": new.device,
                "launched_as": new.launched,
                "rank": new.rank,
                "before": old.at,
                "after": new.at,
            }
            for old, new in zip(before, after, strict=True)
        ],
    }


def cluster_dict(cluster: Cluster) -> dict[str, Any]:
    """The recorded form of the cluster and, for each node, the answers that a capture of it would have."""
    return {
        "cluster": cluster.to_dict(),
        "nodes": [{"host": node.host, **answers(node)} for node in cluster.nodes],
        "domains": [[list(place) for place in domain] for domain in cluster.domains() if len(domain) > 1],
    }
