"""What placement costs, and what it brings.

    python benchmarks/topology.py                    # seconds to order up to 16,384 ranks
    python benchmarks/topology.py --nodes --rounds 5 # also the same job in both orders, on two "nodes" (needs root)
    python benchmarks/topology.py --save             # also benchmarks/results/<date>-topology.json

The second part starts 2 nodes x 4 ranks on one machine (network namespaces with a slow cable between them), ranks dealt
to the nodes in turn, and times tensor-parallel all-reduces in the launcher's order and in ours. Bytes over the cables
are counted by the kernel: they do not depend on how busy the machine is, times do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from parallax.plugins.topology.description import Cluster as Machines
from parallax.plugins.topology.description import Slot
from parallax.plugins.topology.placement import place
from parallax.plugins.topology.probes.synthetic import synthetic_cluster
from parallax.strategies.layout import Layout

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.netns_cluster import Cluster, supported  # noqa: E402 - the nodes of the tests

PLACED = [
    ("2048x dgx-h100", "tp8 pp8"),
    ("2048x dgx-h100", "tp4 pp8 cp2 ep8"),
    ("2048x dgx1-v100", "tp4 pp8"),
    ("2048x pcie-bridged-8", "tp2 pp8"),
    ("4096x gb200-nvl72", "tp8 pp8 ep8"),
    ("2032x dgx-h100, 32x hgx-a100-4", "tp8 pp4"),
]


def placement_times(scales: list[int]) -> list[dict[str, Any]]:
    """Seconds of `place` for clusters cut to 1/scale of their nodes, ranks dealt in turn."""
    rows = []
    for spec, layout in PLACED:
        for scale in scales:
            parts = [part.split("x ") for part in spec.split(", ")]
            cut = ", ".join(f"{-(-int(n) // scale)}x {name}" for n, name in parts)
            cluster = synthetic_cluster(cut)
            slots = dealt(cluster)
            started = time.perf_counter()
            found = place(cluster, slots, Layout.parse(layout))
            seconds = time.perf_counter() - started
            rows.append({"cluster": cut, "layout": layout, "ranks": len(slots), "seconds": seconds})
            rows[-1] |= {"orders": found.judged, "predicted_speedup": found.speedup}
            print(f"{cut:45} {layout:16} {len(slots):6} ranks  {seconds:6.3f} s, {found.judged} orders", flush=True)
    return rows


def dealt(cluster: Machines) -> list[Slot]:
    """Ranks handed to the nodes in turn."""
    places = [Slot(k, i) for k, node in enumerate(cluster.nodes) for i in range(len(node.devices))]
    return sorted(places, key=lambda slot: (slot.device or 0, slot.node))


def both_orders(options: argparse.Namespace) -> dict[str, Any]:
    """The worker in both orders, in turn, on a fresh pair of nodes each time; a ratio for each round."""
    reason = supported()
    if reason:
        raise SystemExit(f"no nodes can be made here: {reason}")
    rounds: dict[str, list[dict[str, Any]]] = {"launcher": [], "placed": []}
    for number in range(options.rounds):
        for order in list(rounds)[:: 1 if number % 2 == 0 else -1]:
            rounds[order].append(one_run(order, options))
            print(f"{order:9} {rounds[order][-1]}", flush=True)
    pairs = list(zip(rounds["launcher"], rounds["placed"], strict=True))
    found = {
        "step_ratio": spread([statistics.median(a["step"]) / statistics.median(b["step"]) for a, b in pairs]),
        "byte_ratio": spread([a["cable_bytes"] / b["cable_bytes"] for a, b in pairs]),
        "step_seconds": {order: spread([s for run in runs for s in run["step"]]) for order, runs in rounds.items()},
        "cable_bytes": {order: spread([run["cable_bytes"] for run in runs]) for order, runs in rounds.items()},
    }
    print(json.dumps(found, indent=1))
    return {"rate": options.rate, "layout": options.layout, "nodes": 2, "ranks": 8, **found, "rounds": rounds}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def one_run(order: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step on the slowest rank, and bytes over all cables during them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster("bench-topo", nodes=2, slots=4, rate=options.rate) as nodes,
    ):
        command = [sys.executable, str(HERE / "topology_worker.py"), order, options.layout, str(options.steps), folder]
        before = sum(each["tx"] for each in nodes.counters().values())
        done = nodes.mpirun(command, np=8, by_node=True, timeout=options.limit)
        after = sum(each["tx"] for each in nodes.counters().values())
        if done.returncode:
            raise RuntimeError(f"{order}: status {done.returncode}\n{done.stdout}{done.stderr}"[-3000:])
        found = json.loads((Path(folder) / "result.json").read_text())
        return found | {"cable_bytes": after - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", type=int, nargs="*", default=[16, 4, 1], help="parts of the clusters to place")
    parser.add_argument("--nodes", action="store_true", help="compare both orders on two nodes made on this machine")
    parser.add_argument("--rate", default="100mbit", help="of the cable between the nodes")
    parser.add_argument("--layout", default="tp4 dp2")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one run")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    result = {"command": sys.argv, "hardware": hardware(), "placement": placement_times(options.scales)}
    if options.nodes:
        result["both_orders"] = both_orders(options)
    if options.save:
        path = HERE / "results" / f"{date.today().isoformat()}-topology.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path.name}")


def hardware() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],  # of a busy machine, times say little; bytes do not mind
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
