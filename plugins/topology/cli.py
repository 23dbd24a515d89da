"""`parallax topo`: what the machines look like, and where the ranks of a layout would go.

It is: one subcommand, alone or under mpirun, on this machine, on a saved capture or on machines by name. It is not: a
launcher; it starts nothing and changes no order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from parallax.plugins.launch.detect import mpi_launch
from parallax.plugins.launch.mpi import load_mpi
from parallax.plugins.topology.answers import answers
from parallax.plugins.topology.description import Cluster, Slot
from parallax.plugins.topology.fit import check_fit
from parallax.plugins.topology.job import job_cluster
from parallax.plugins.topology.measure import MpiTransport, Sample, correct, measure, plan_rounds
from parallax.plugins.topology.picture import page
from parallax.plugins.topology.placement import place
from parallax.plugins.topology.probes import probe_node
from parallax.plugins.topology.probes.synthetic import synthetic_cluster
from parallax.plugins.topology.rates import Rates
from parallax.plugins.topology.seats import seats
from parallax.plugins.topology.text import Fabric, read_capture
from parallax.plugins.topology.traffic import ModelShape, traffic_of
from parallax.plugins.topology.views import (
    cluster_dict,
    fabric_rows,
    node_table,
    placement_dict,
    seat_table,
    time_table,
)
from parallax.strategies.layout import Layout

SYNTHETIC = "synthetic:"


def add_topo(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    topo = commands.add_parser("topo", help="show nodes, GPU links, and the best order of the ranks")
    topo.add_argument("--layout", metavar="LAYOUT", help='place the ranks of this layout, e.g. "tp4 pp2"')
    source = topo.add_mutually_exclusive_group()
    source.add_argument(
        "--from-file", metavar="FILE", help="a saved `nvidia-smi topo -m` or the like, or what --json printed"
    )
    source.add_argument("--probe", metavar="NAME", help="how to look at the machine, or 'synthetic:4x dgx-h100'")
    topo.add_argument("--dealt", action="store_true", help="ranks start on the nodes in turn, not node after node")
    topo.add_argument("--model", metavar="SIZES", help='e.g. "layers=32,hidden=4096,sequence=8192,parameters=8e9"')
    topo.add_argument("--network", type=float, metavar="GB/S", help="rate of one network port (default 12.5)")
    topo.add_argument("--measure", action="store_true", help="under mpirun: measure the network, up to 10 seconds")
    topo.add_argument("--json", action="store_true", help="print one JSON object")
    topo.add_argument("--html", metavar="FILE", help="write a page with a picture of both orders")
    topo.set_defaults(command=show_topo)


@dataclass(frozen=True)
class _Seen:
    """What is known of the machines; `rank` is this process's among those that look."""

    cluster: Cluster
    samples: Sequence[Sample] = ()
    rank: int = 0
    captured: bool = False


def show_topo(options: argparse.Namespace) -> int:
    """Run the subcommand. Under mpirun it is collective, and rank 0 prints.

    Raises:
        ValueError: a capture that must be refused, no probe that works, a layout that does not fit.
    """
    if options.html and not options.layout:
        raise ValueError("--html draws the order of the ranks: give a --layout")
    if options.from_file:
        seen = _read(options.from_file)
        if isinstance(seen, Fabric):
            return _show_fabric(seen, options)
    else:
        seen = _look(options)
    if seen.rank != 0:
        return 0
    cluster, rates = seen.cluster, Rates() if options.network is None else Rates(network=options.network)
    if seen.samples:
        cluster, rates, _ = correct(cluster, cluster.slots, seen.samples, rates, devices=False)
    console = _console(options)
    report = answers(cluster.nodes[0]) if seen.captured else cluster_dict(cluster)
    console.print(node_table(cluster))
    for line in (*fabric_rows(cluster), *cluster.notes, *(note for node in cluster.nodes for note in node.notes)):
        console.print(line, highlight=False, soft_wrap=True)
    if seen.samples:
        console.print(f"measured: {rates.network:.4g} GB/s between nodes", highlight=False)
    if options.layout:
        report["placement"] = _show_placement(cluster, rates, options, console)
    if options.json:
        print(json.dumps(report))
    return 0


def _console(options: argparse.Namespace) -> Console:
    if options.json:
        return Console(quiet=True)
    return Console(markup=False) if sys.stdout.isatty() else Console(markup=False, width=200)


def _show_fabric(fabric: Fabric, options: argparse.Namespace) -> int:
    """A text that tells of the fabric alone has no matrix to place ranks by."""
    if options.layout:
        raise ValueError("this text tells which NVLink domain the GPUs are in, not how they are joined: no --layout")
    answer = fabric.answer()
    print(json.dumps(answer) if options.json else "\n".join(f"{key}: {value}" for key, value in answer.items()))
    return 0


def _show_placement(cluster: Cluster, rates: Rates, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    asked = Layout.from_any(options.layout)
    slots = cluster.slots or _slots(cluster, options, asked)
    layout = asked.resolve(len(slots))
    model = None if options.model is None else ModelShape.parse(options.model)
    placement = place(cluster, slots, layout, traffic_of(layout, model), rates)
    if model is None:
        placement = replace(placement, notes=("volumes are assumed (no --model): times compare orders, no more",))
    misfits = check_fit(cluster, slots, asked, on_misfit="allow", placement=placement, model=model, rates=rates)
    before = seats(cluster, slots, layout, range(len(slots)))
    after = seats(cluster, slots, layout, placement.new_rank_of)
    console.print(seat_table(before, after))
    console.print(time_table(placement, assumed=model is None))
    words = [f"warning: {misfit.describe(layout)}" for misfit in misfits]
    if not placement.changed:
        words.append("the launcher's order is kept: no other is predicted to be faster")
    for word in (*words, *placement.notes):
        console.print(word, highlight=False, soft_wrap=True)
    if options.html:
        Path(options.html).write_text(page(cluster, layout, placement, before, after, (*words, *placement.notes)))
        console.print(f"written: {options.html}", highlight=False, soft_wrap=True)
    return placement_dict(layout, placement, before, after, misfits)


def _slots(cluster: Cluster, options: argparse.Namespace, layout: Layout) -> list[Slot]:
    """One rank for each device; on nodes without devices as many as the layout needs, evenly."""
    counts = [len(node.devices) for node in cluster.nodes]
    if not any(counts):
        n = len(counts)
        counts = [layout.ranks_needed // n + (k < layout.ranks_needed % n) for k in range(n)]
        return [Slot(k, None) for k, count in enumerate(counts) for _ in range(count)]
    places = [Slot(k, i) for k, count in enumerate(counts) for i in range(count)]
    return sorted(places, key=lambda slot: (slot.device or 0, slot.node)) if options.dealt else places


def _look(options: argparse.Namespace) -> _Seen:
    """The machines of the job, or those named."""
    probe = options.probe
    launch = mpi_launch()
    if launch is None or not launch.is_parallel:
        if options.measure:
            raise ValueError("--measure needs several ranks: mpirun -n N python -m parallax topo --measure")
        if probe and probe.startswith(SYNTHETIC):
            return _Seen(synthetic_cluster(probe.removeprefix(SYNTHETIC)))
        return _Seen(Cluster((probe_node(probe),)))
    comm = load_mpi(launch).COMM_WORLD
    if probe and probe.startswith(SYNTHETIC):
        return _Seen(synthetic_cluster(probe.removeprefix(SYNTHETIC)), rank=comm.rank)
    cluster = job_cluster(comm, comm.rank if launch.local_rank is None else launch.local_rank, probe)
    samples: list[Sample] = []
    if options.measure:
        samples = measure(MpiTransport(comm), plan_rounds([slot.node for slot in cluster.slots]))
    return _Seen(cluster, samples, comm.rank)


def _read(path: str) -> _Seen | Fabric:
    """A capture, or what an earlier --json printed.

    Raises:
        ValueError: no such file, or its content must be refused.
    """
    text = _text(path)
    recorded = _recorded(text)
    if recorded is not None:
        return _Seen(recorded)
    found = read_capture(text, Path(path).stem)
    return found if isinstance(found, Fabric) else _Seen(Cluster((found,)), captured=True)


def _recorded(text: str) -> Cluster | None:
    """The cluster of an earlier --json; None for any other text.

    Raises:
        ValueError: it was recorded in another format.
    """
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return Cluster.from_dict(data["cluster"]) if isinstance(data, dict) and "cluster" in data else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
