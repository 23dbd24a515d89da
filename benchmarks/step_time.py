"""Step times of Parallax beside its peers, in one run: sides alternate, so that both see the same machine.

    python benchmarks/step_time.py                      # all comparisons
    python benchmarks/step_time.py --only tp2 --rounds 5
    python benchmarks/step_time.py --save               # also benchmarks/results/<date>-step_time.json

For each comparison and round both sides run a few steps of the same work, one after the other. The ratio is Parallax
over peer: the median over rounds of the ratio of medians, with its extremes. Losses of both sides must agree, or the
times mean nothing. Numbers hold for one machine; ratios below 1.3 need many rounds on a quiet one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MARK = "RESULT "

SIZES = {"layers": 4, "dim": 256, "seq": 128, "batch": 8, "microbatches": 4}

# name: (processes, peer, Parallax's side)
COMPARISONS = {
    "single": (1, "torch", "parallax:dp1"),
    "dp2": (2, "torch-ddp", "parallax:dp2"),
    "dp2-lightning": (2, "lightning-ddp", "parallax:dp2"),
    "dp2-zero1": (2, "deepspeed-zero1", "parallax:dp2 zero1"),
    "dp2-zero2": (2, "deepspeed-zero2", "parallax:dp2 zero2"),
    "dp2-zero3": (2, "deepspeed-zero3", "parallax:dp2 zero3"),
    "dp2-fsdp": (2, "torch-fsdp", "parallax:dp2 fsdp"),
    "dp2-fsdp-kept": (2, "torch-fsdp-kept", "parallax:dp2 zero2 fsdp"),
    "tp2": (2, "torch-tp", "parallax:tp2"),
    "pp2": (2, "torch-pp", "parallax:pp2 mb4 1f1b"),
}


def run_side(side: str, world: int, options: argparse.Namespace) -> dict[str, Any]:
    """One side's seconds, losses, memory and processor seconds.

    Raises:
        RuntimeError: it failed or ran out of time; with the end of its output.
    """
    sizes = json.dumps({name: getattr(options, name) for name in SIZES})
    found: dict[str, Any] = launch(
        [str(HERE / "worker.py"), side, str(options.warmup), str(options.steps), sizes], world, options
    )
    return found


def launch(worker: list[str], world: int, options: argparse.Namespace, env: Mapping[str, str] | None = None) -> Any:
    """What rank 0 of a worker script printed behind `MARK`; `env` goes on top of this process's variables.

    Raises:
        RuntimeError: it failed or ran out of time; with the end of its output.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    process = subprocess.Popen(
        [sys.executable, *torchrun, *worker],
        env=os.environ | {"OMP_NUM_THREADS": str(options.threads), "DS_ACCELERATOR": "cpu"} | dict(env or {}),
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
            return json.loads(line.removeprefix(MARK))
    if world > 1:  # torchrun adds a traceback of its own, which says nothing
        output = output.rpartition("Traceback (most recent call last)")[0] or output
    raise RuntimeError(f"{worker} on {world} process(es) gave no result:\n{output[-3000:]}")


def spread(values: list[float]) -> str:
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle * 1e3:.0f} ({low * 1e3:.0f}-{high * 1e3:.0f})"


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Median and extremes of the ratio of each round."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def compare(name: str, sides: tuple[int, str, str], options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one comparison: raw seconds of both sides, the ratio of each round, the largest loss difference.

    Args:
        name: of the comparison.
        sides: processes, the peer, Parallax's side.
        options: sizes, rounds, steps.
    """
    world, peer, ours = sides
    rounds = []
    for at in range(options.rounds):
        order = (peer, ours) if at % 2 == 0 else (ours, peer)
        found = {side: run_side(side, world, options) for side in order}
        rounds.append((found[peer], found[ours]))
    gaps = [abs(a - b) / abs(a) for p, o in rounds for a, b in zip(p["losses"], o["losses"], strict=True)]
    return {
        "comparison": name,
        "processes": world,
        "peer": peer,
        "parallax": ours.removeprefix("parallax:"),
        "peer_seconds": [p["seconds"] for p, _ in rounds],
        "parallax_seconds": [o["seconds"] for _, o in rounds],
        "ratios": [statistics.median(o["seconds"]) / statistics.median(p["seconds"]) for p, o in rounds],
        "loss_gap": max(gaps),
        "peer_memory": [p["memory"] for p, _ in rounds],
        "parallax_memory": [o["memory"] for _, o in rounds],
        "peer_kept": [p["kept"] for p, _ in rounds],
        "parallax_kept": [o["kept"] for _, o in rounds],
        "peer_cpu": [p["cpu"] for p, _ in rounds],
        "parallax_cpu": [o["cpu"] for _, o in rounds],
    }


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    peer = [s for part in result["peer_seconds"] for s in part]
    ours = [s for part in result["parallax_seconds"] for s in part]
    ratios = result["ratios"]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return (
        f"| {result['comparison']} | {result['peer']} | {spread(peer)} | {result['parallax']} | {spread(ours)} "
        f"| {ratio} | {result['loss_gap']:.1e} |"
    )


def main() -> int:
    """Run what was asked for, print a table, and say which losses disagree. Status 1 when any does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a side in a round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of a process")
    parser.add_argument("--limit", type=float, default=240, help="seconds one side may take")
    for size, default in SIZES.items():
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-step_time.json")
    options = parser.parse_args()

    print("step times in ms: median (quartiles)")
    print("| comparison | peer | its step | Parallax | its step | ratio (extremes) | loss gap |")
    print("|---|---|---|---|---|---|---|", flush=True)
    results = []
    for name in options.only:
        results.append(compare(name, COMPARISONS[name], options))
        print(row(results[-1]), flush=True)
    if options.save:
        path = HERE / "results" / f"{date.today()}-step_time.json"
        head = {"command": ["python", "benchmarks/step_time.py", *sys.argv[1:]], "hardware": hardware()}
        path.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")
    wrong = [r["comparison"] for r in results if r["loss_gap"] > 1e-4]
    if wrong:
        print(f"losses of both sides disagree in {', '.join(wrong)}: these times do not compare the same work")
    return int(bool(wrong))


def hardware() -> dict[str, Any]:
    """What the numbers hold for."""
    import torch

    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), model)
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}


if __name__ == "__main__":
    sys.exit(main())
