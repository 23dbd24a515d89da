"""Tensor parallelism, with and without sequence shards, beside Megatron-core and torch's DTensor.

    python benchmarks/tensor.py                            # 2 and 4 ranks
    python benchmarks/tensor.py --ranks 2 --rounds 5
    python benchmarks/tensor.py --save                     # also benchmarks/results/<date>-tensor.json, whose other
                                                           # numbers of ranks stay

Every side trains the same decoder (RMS norms, rotary positions, gated MLP, no biases, untied head) from the same
weights on the same batch with AdamW; losses must agree, or the numbers mean nothing. Parallax runs under Lightning's
Trainer, the peers in a bare loop. Megatron-core's attention without Transformer Engine is unfused, so Parallax runs
twice: with the same unfused attention for the comparison with Megatron, with torch's fused one for that with DTensor.

Sides run in turn, in rounds. A ratio is Parallax over peer: the median over rounds of the ratio of medians, with its
extremes; *CPU* is of processor seconds of all ranks, which on a busy machine say more than the clock. *kept* is what
autograd saves of one forward on the largest rank, in bytes, parameters left out, *share* that over 1/ranks of what one
process keeps with the same attention, *formula* that over what the paper's accounting gives (docs/tensor.md). *calls*
are gloo collectives of a step. Parallax's *bytes* are what its ledger counted on the tensor axis over the textbook's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from step_time import hardware, spread

HERE = Path(__file__).resolve().parent
MARK = "RESULT "
ROWS = {
    "tp, unfused attention": ("parallax unfused", "megatron"),
    "tp+sp, unfused attention": ("parallax unfused sp", "megatron sp"),
    "tp, fused attention": ("parallax fused", "dtensor"),
    "tp+sp, fused attention": ("parallax fused sp", "dtensor sp"),
}
SIZES = {"layers": 4, "dim": 256, "heads": 8, "ffn": 688, "vocab": 2048, "seq": 128, "batch": 8}


def run_side(side: str, world: int, options: argparse.Namespace) -> dict[str, Any]:
    """What one side has measured.

    Raises:
        RuntimeError: it failed or ran out of time; with the end of its output.
    """
    launch = [] if world == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    sizes = json.dumps({name: getattr(options, name) for name in SIZES})
    command = [sys.executable, *launch, str(HERE / "tensor_worker.py"), side, str(options.warmup), str(options.steps)]
    process = subprocess.Popen(
        [*command, sizes],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=options.limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0] + f"\nnot done after {options.limit} s"
    for line in output.splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    if world > 1:  # torchrun adds a traceback of its own, which says nothing
        output = output.rpartition("Traceback (most recent call last)")[0] or output
    raise RuntimeError(f"{side} on {world} process(es) gave no result:\n{output[-3000:]}")


def compare(world: int, rows: list[str], options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """side -> what it measured in each round; sides alternate, and every other round in the opposite order."""
    sides = list(dict.fromkeys(side for row in rows for side in ROWS[row]))
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for at in range(options.rounds):
        for side in sides if at % 2 == 0 else reversed(sides):
            found[side].append(run_side(side, world, options))
    return found


def ratio(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], what: str) -> str:
    """Median and extremes over rounds."""
    ratios = [statistics.median(a[what]) / statistics.median(b[what]) for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def line(
    row: str, world: int, found: dict[str, list[dict[str, Any]]], single: dict[str, dict[str, Any]]
) -> tuple[str, float]:
    """One line of the table, and how far the losses of its sides are apart."""
    ours, theirs = (found[side] for side in ROWS[row])
    gap = max(
        abs(a - b) / abs(b)
        for o, t in zip(ours, theirs, strict=True)
        for a, b in zip(o["losses"], t["losses"], strict=True)
    )
    alone = single["unfused" if "unfused" in row else "fused"]["kept"]
    cells = [
        row,
        str(world),
        spread([s for r in ours for s in r["seconds"]]),
        spread([s for r in theirs for s in r["seconds"]]),
        ratio(ours, theirs, "seconds"),
        ratio(ours, theirs, "cpu"),
        f"{ours[0]['kept'] / 2**20:.1f} / {theirs[0]['kept'] / 2**20:.1f} = {ours[0]['kept'] / theirs[0]['kept']:.2f}",
        f"{ours[0]['kept'] * world / alone:.2f}",
        f"{ours[0]['kept'] / ours[0]['formula']:.3f}",
        f"{ours[0]['calls']} / {theirs[0]['calls']}",
        f"{ours[0]['bytes']:.4f}",
        f"{gap:.0e}",
    ]
    return f"| {' | '.join(cells)} |", gap


def main() -> int:
    """Run what was asked for and print a table. Status 1 when losses disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a side in a round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--limit", type=float, default=240, help="seconds one side may take")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-tensor.json")
    options = parser.parse_args()

    load = os.getloadavg()[0]
    single = {kind: run_side(f"parallax {kind}", 1, options) for kind in ("unfused", "fused")}
    print("| | ranks | Parallax ms | peer ms | time | CPU | kept MiB | share | formula | calls | bytes | loss gap |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    results, gaps = {}, []
    for world in options.ranks:
        found = compare(world, options.only, options)
        results[str(world)] = found
        for row in options.only:
            text, gap = line(row, world, found, single)
            gaps.append(gap)
            print(text, flush=True)
    if options.save:
        path = HERE / "results" / f"{date.today()}-tensor.json"
        head = {"command": ["python", "benchmarks/tensor.py", *sys.argv[1:]], "hardware": hardware() | {"load": load}}
        before = json.loads(path.read_text())["results"] if path.exists() else {}
        path.write_text(json.dumps(head | {"single": single, "results": before | results}, indent=1) + "\n")
    if max(gaps) > 1e-4:
        print("losses of both sides disagree: these numbers do not compare the same work")
    return int(max(gaps) > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
