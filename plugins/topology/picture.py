"""A picture of a cluster: nodes as boxes, devices coloured by tensor-parallel group, GPU links as lines.

It is: SVG text and one HTML page that needs nothing else. It is not: interactive, or a place where numbers are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, sqrt

from parallax.plugins.topology.description import Cluster, Node
from parallax.plugins.topology.placement import Placement
from parallax.plugins.topology.seats import Seat
from parallax.strategies.layout import Layout

Centre = Callable[[int], tuple[float, float]]
"""Where the device at a position is drawn."""
MOST_NODES = 16
"""Nodes that are drawn; more would be too small to read."""
STEP, RADIUS, PAD, TITLE = 96, 31, 22, 30
BUS = 34
"""Height of the strip that stands for a switch."""

DRAWING = """
:root{--ink:#1c2430;--soft:#5b6675;--line:#c6ced9;--box:#f6f8fb;--page:#fff;--link:#7f8ea3}
@media(prefers-color-scheme:dark){
:root{--ink:#e6ebf2;--soft:#9aa7b8;--line:#3a4553;--box:#1b222c;--page:#12171e;--link:#76879d}}
.node{fill:var(--box);stroke:var(--line)}.name{font:600 13px system-ui,sans-serif;fill:var(--ink)}
.fabric{font:12px system-ui,sans-serif;fill:var(--soft)}.link{stroke:var(--link);fill:none}
.switch{fill:var(--line)}.rank{font:600 14px system-ui,sans-serif;fill:#111;text-anchor:middle}
.at{font:10.5px system-ui,sans-serif;fill:#111;text-anchor:middle}
.id{font:10.5px system-ui,sans-serif;fill:var(--soft);text-anchor:middle}
.split{stroke:#d23b2f;stroke-width:3.5;stroke-dasharray:6 3}.whole{stroke:#0004;stroke-width:1}
"""
PAGE = """
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:2rem auto;max-width:1240px;
padding:0 1rem}
svg{max-width:100%;height:auto;display:block}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
.scroll{overflow-x:auto}table{border-collapse:collapse}td,th{padding:.25rem .9rem;border-bottom:1px solid var(--line);
text-align:right}td:first-child,th:first-child{text-align:left}p{color:var(--soft)}
"""


def draw(cluster: Cluster, seats: Sequence[Seat], title: str) -> str:
    """SVG, complete in itself, of the first `MOST_NODES` nodes. A dashed red rim: the group lies on several nodes."""
    nodes = cluster.nodes[:MOST_NODES]
    homes: dict[int, set[int]] = {}
    for seat in seats:
        homes.setdefault(seat.tp_group, set()).add(seat.slot.node)
    boxes = [
        _box(node, [seat for seat in seats if seat.slot.node == number], homes) for number, node in enumerate(nodes)
    ]
    columns = max(1, min(len(boxes), 1240 // max(width for _, width, _ in boxes)))
    width = columns * max(width for _, width, _ in boxes)
    parts, x, y, row = [], 0, 0, 0
    for at, (text, wide, high) in enumerate(boxes):
        if at and at % columns == 0:
            x, y, row = 0, y + row + 10, 0
        parts.append(f'<g transform="translate({x},{y})">{text}</g>')
        x, row = x + wide, max(row, high)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + row}" width="{width}" role="img" '
        f'aria-label="{escape(title)}"><style>{DRAWING}</style>{"".join(parts)}</svg>'
    )


def _box(node: Node, seats: Sequence[Seat], homes: Mapping[int, set[int]]) -> tuple[str, int, int]:
    """One node: its SVG, width and height. Devices without a rank are drawn empty."""
    by_device: dict[int, Seat] = {}
    for position, seat in enumerate(seats):
        by_device[position if seat.slot.device is None else seat.slot.device] = seat
    count = max([len(node.devices), *(device + 1 for device in by_device)], default=1)
    columns = ceil(count / 2) if count <= 16 else ceil(sqrt(count * 2))
    rows = ceil(count / columns)
    switched = node.all_to_all() and len(node.devices) > 2
    gap = BUS if switched else 0
    width, height = columns * STEP + PAD, TITLE + rows * STEP + gap + 12

    def centre(i: int) -> tuple[float, float]:
        row = i // columns
        return PAD / 2 + STEP * (i % columns + 0.5), TITLE + STEP * (row + 0.5) + (gap if row else 0)

    parts = [
        f'<rect class="node" x="4" y="2" width="{width - 8}" height="{height - 6}" rx="10"/>',
        f'<text class="name" x="16" y="21">{escape(node.host)}</text>',
        f'<text class="fabric" x="{width - 16}" y="21" text-anchor="end">{escape(_fabric(node))}</text>',
        *(_switch(node, centre, width) if switched else _links(node, centre)),
    ]
    for i in range(count):
        x, y = centre(i)
        name = node.devices[i].name if i < len(node.devices) else f"rank slot {i}"
        parts.append(
            _device(x, y, i if i >= len(node.devices) else node.devices[i].index, name, by_device.get(i), homes)
        )
    return "".join(parts), width, height


def _fabric(node: Node) -> str:
    counts = sorted({link.count for row in node.links for link in row if link is not None and link.kind.is_link})
    kinds = sorted({link.kind.value for row in node.links for link in row if link is not None and link.kind.is_link})
    if not kinds:
        return "PCIe" if node.devices else "no devices"
    spread = "" if counts[-1] == 0 else str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    return f"{'/'.join(kinds)}{spread}{', all to all' if node.all_to_all() else ''}"


def _switch(node: Node, centre: Centre, width: int) -> list[str]:
    """All pairs are joined alike as far as one can see: a bar that every device hangs from says it best."""
    y = TITLE + STEP + BUS / 2
    bar = f'<rect class="switch" x="{PAD}" y="{y - 5}" width="{width - 2 * PAD}" height="10" rx="5"/>'
    places = (centre(i) for i in range(len(node.devices)))
    return [bar, *(f'<path class="link" stroke-width="3" d="M{x} {at}L{x} {y}"/>' for x, at in places)]


def _links(node: Node, centre: Centre) -> list[str]:
    """A line for each GPU link, as thick as it has bonded links; bowed where it would run through another device."""
    lines = []
    for i in range(len(node.devices)):
        for j in range(i + 1, len(node.devices)):
            link = node.link(i, j)
            if link.kind.is_link:
                (x1, y1), (x2, y2) = centre(i), centre(j)
                apart = abs(x1 - x2) / STEP if y1 == y2 else 0
                bow = 22 * apart * (-1 if y1 < TITLE + STEP else 1) if apart > 1 else 0
                bend = f"Q{(x1 + x2) / 2} {(y1 + y2) / 2 + bow} {x2} {y2}"
                tip = f"<title>{i} - {j}: {link.kind.value}{link.count or ''}</title>"
                wide = 1.5 + min(6.0, max(1, link.count) * 0.9)
                lines.append(f'<path class="link" stroke-width="{wide}" d="M{x1} {y1}{bend}">{tip}</path>')
    return lines


def _device(x: float, y: float, number: int, name: str, seat: Seat | None, homes: Mapping[int, set[int]]) -> str:
    label = f'<text class="id" x="{x + RADIUS + 1}" y="{y - RADIUS + 8}">{number}</text>'
    if seat is None:
        tip = f"<title>{escape(name)}: no rank</title>"
        return f'<circle class="node" cx="{x}" cy="{y}" r="{RADIUS}">{tip}</circle>{label}'
    split = len(homes[seat.tp_group]) > 1
    tip = f"{seat.host} device {number} ({name}): rank {seat.rank}, {seat}; launched as rank {seat.launched}"
    words = str(seat).split()
    lines = [" ".join(words[i : i + 2]) for i in range(0, len(words), 2)]
    top = y + 5 - 5.5 * len(lines)
    texts = f'<text class="rank" x="{x}" y="{top}">{seat.rank}</text>' + "".join(
        f'<text class="at" x="{x}" y="{top + 12 + 11 * k}">{escape(line)}</text>' for k, line in enumerate(lines)
    )
    return (
        f'<g><title>{escape(tip)}</title><circle class="{"split" if split else "whole"}" cx="{x}" cy="{y}" '
        f'r="{RADIUS}" fill="{colour(seat.tp_group)}"/>{texts}{label}</g>'
    )


def colour(group: int) -> str:
    """A light colour; neighbouring groups differ by the golden angle, so that many stay apart."""
    return f"hsl({group * 137.508 % 360:.0f} {70 - group // 3 % 2 * 20}% {74 - group // 5 % 3 * 6}%)"


def page(
    cluster: Cluster,
    layout: Layout,
    placement: Placement,
    before: Sequence[Seat],
    after: Sequence[Seat],
    words: Sequence[str],
) -> str:
    """A whole HTML page: both orders as pictures and the predicted times; `words` are printed as they are."""
    unit = "assumed volumes" if any("assumed" in note for note in placement.notes) else "ms a step"
    rows = [
        f"<tr><td>{axis}</td><td>{placement.before[axis] * 1e3:.3f}</td><td>{placement.after[axis] * 1e3:.3f}</td></tr>"
        for axis in placement.before
    ]
    total = [sum(times.values()) * 1e3 for times in (placement.before, placement.after)]
    rows.append(f"<tr><th>sum</th><th>{total[0]:.3f}</th><th>{total[1]:.3f}</th></tr>")
    drawn = min(len(cluster.nodes), MOST_NODES)
    left = "" if drawn == len(cluster.nodes) else f" The first {drawn} of {len(cluster.nodes)} nodes are drawn."
    pictures = [("The launcher's order", before)] + ([("Reordered", after)] if placement.changed else [])
    drawings = "".join(
        f'<h2>{name}</h2><div class="scroll">{draw(cluster, seats, name)}</div>' for name, seats in pictures
    )
    notes = "".join(f"<p>{escape(word)}</p>" for word in words)
    title = f"{layout} on {layout.world_size} ranks, {len(cluster.nodes)} nodes"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{escape(title)}</title><style>{PAGE}</style></head><body>'
        f"<h1>{escape(title)}</h1>"
        f"<p>A circle is a device with its global rank and coordinates; one colour is one tensor-parallel group, a "
        f"dashed red rim marks a group that lies on several nodes.{left}</p>{drawings}"
        f"<h2>Predicted time of communication</h2><table><tr><th>axis ({unit})</th><th>launcher's order</th>"
        f"<th>this order</th></tr>{''.join(rows)}</table>{notes}</body></html>\n"
    )
