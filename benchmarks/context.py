"""Attention over a cut sequence beside one process, DeepSpeed-Ulysses, and the same ranks sending nothing.

    python benchmarks/context.py                              # 4k and 8k tokens on 2 and 4 ranks
    python benchmarks/context.py --tokens 16384 --ranks 2
    python benchmarks/context.py --save                       # also into benchmarks/results/<date>-context.json

One causal attention, forward and backward, fp32, one thread a process. All sides of a row run in the same processes, in
turn, in rounds; a ratio is the median over rounds of the ratio of that round, with its extremes. *ideal* is the step of
one process on the whole sequence over the number of ranks that have a core. *floor* is the same method with its
transfers left out; *floor+wire* is the floor and, sent meanwhile by a thread of its own, the same messages in order,
neither waiting for the other. *CPU* ratios are of processor seconds of all ranks, with transfers: on a busy machine,
and with more ranks than cores, they say more than the clock. *memory* is what the largest rank's resident set grows by,
after a first pass, over 1/ranks of what one process's does.
*balance* is the largest over the smallest CPU time of a rank, of the floor. Outputs and gradients of all sides must
agree, or the numbers mean nothing. (torch's own `context_parallel` does not run on CPU in torch 2.13.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

from step_time import hardware, launch, ratio, spread

HERE = Path(__file__).resolve().parent
EAGER = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Makes the C library give memory back at once, so that a resident set is what is in use: slower, for memory alone."""
SIDES = ["ring", "ring floor", "ring floor+wire", "ulysses", "ulysses floor", "ulysses floor+wire", "all_gather",
         "deepspeed-ulysses", "ring contiguous", "ring contiguous floor"]  # fmt: skip
APART = ("floor", "floor+wire")
WHAT = ["attention", "decoder"]


def run(what: str, world: int, names: list[str], sizes: dict[str, int], rounds: int, limit: float) -> dict[str, Any]:
    """What `world` processes found; see `launch`."""
    worker = [str(HERE / "context_worker.py"), what, json.dumps(names), json.dumps(sizes), str(rounds)]
    return launch(worker, world, argparse.Namespace(threads=1, limit=limit), EAGER if rounds == 0 else {})


def both(what: str, world: int, names: list[str], sizes: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Times from one launch, memory from another."""
    found = run(what, world, names, sizes, options.rounds, options.limit)
    memory = run(what, world, [name for name in names if not name.endswith(APART)], sizes, 0, options.limit)
    for rank, held in zip(found["ranks"], memory["ranks"], strict=True):
        for name, side in held.items():
            rank[name]["memory"] = side["memory"]
    return found


def rows(alone: dict[str, Any], found: dict[str, Any], world: int, tokens: int) -> list[str]:
    """Lines of the table: one for each side but floors and wires."""
    ranks, one = found["ranks"], alone["ranks"][0]["alone"]
    ideal = statistics.median(one["seconds"]) / min(world, os.cpu_count() or 1)
    clocks = {
        "seconds": {side: ranks[0][side]["seconds"] for side in ranks[0]},
        "work": {side: _added([rank[side]["work"] for rank in ranks]) for side in ranks[0]},
    }
    lines = []
    for name in ranks[0]:
        if name.endswith(APART):
            continue
        method = name.replace("deepspeed-", "")
        floor, balance = f"{method} floor", ""
        ratios = {over: ["", ""] for over in ("floor", "both", "peer")}
        for at, by in enumerate(clocks.values()):
            ratios["peer"][at] = ratio(by[name], by["deepspeed-ulysses"])
            for over, side in (("floor", floor), ("both", f"{floor}+wire")):
                if side in by:
                    ratios[over][at] = ratio(by[name], by[side])
        if floor in ranks[0]:
            cpu = [statistics.median(rank[floor]["cpu"]) for rank in ranks]
            balance = f"{max(cpu) / min(cpu):.2f}"
        seconds = ranks[0][name]["seconds"]
        memory = max(rank[name]["memory"] for rank in ranks) / (one["memory"] / world)
        payload = f"{found['payload'][name] / 1e6:.1f}" if name in found["payload"] else ""
        columns = [str(tokens), str(world), name, spread(seconds), f"{statistics.median(seconds) / ideal:.2f}"]
        columns += [column for pair in ratios.values() for column in pair]
        lines.append(f"| {' | '.join([*columns, payload, f'{memory:.2f}', balance])} |")
    return lines


def _added(series: list[list[float]]) -> list[float]:
    return [sum(parts) for parts in zip(*series, strict=True)]


def gap(alone: dict[str, Any], found: dict[str, Any]) -> float:
    """Largest relative difference of <out, grad> and of the gradients' squares between a side and one process."""
    right = alone["ranks"][0]["alone"]["check"]
    worst = 0.0
    for name, side in found["ranks"][0].items():
        if side["check"] is not None:
            sums = _added([rank[name]["check"] for rank in found["ranks"]])
            worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(sums, right, strict=True)))
    return worst


def decoder_row(options: argparse.Namespace, name: str, tokens: int) -> tuple[str, dict[str, int]]:
    """Memory of a whole decoder, with what each rank's resident set grows by on 1, 2 and 4 ranks."""
    sizes = {"tokens": tokens, "layers": 4, "width": 128}
    found = {w: max(run("decoder", w, [name], sizes, 0, options.limit)["ranks"]) for w in (1, *options.ranks)}
    parts = [f"{world}: {held / 1e6:.0f} MB ({held * world / found[1]:.2f})" for world, held in found.items()]
    return f"decoder of 4 layers, {tokens} tokens, {name}; ranks: memory (over 1/ranks): " + ", ".join(parts), {
        str(world): held for world, held in found.items()
    }


def main() -> int:
    """Run what was asked for and print a table. Status 1 when a side computes something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--limit", type=float, default=500, help="seconds one row may take")
    for size, default in (("heads", 4), ("kv_heads", 4), ("dim", 128)):
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--save", action="store_true", help="add to benchmarks/results/<date>-context.json")
    options, load = parser.parse_args(), os.getloadavg()[0]

    columns = ["tokens", "ranks", "side", "ms: median (quartiles)", "/ideal", "/floor", "CPU/floor", "/(floor+wire)",
               "CPU/(floor+wire)", "/deepspeed", "CPU/deepspeed", "payload MB", "memory", "balance"]  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    results, worst, names = [], 0.0, list(dict.fromkeys([*options.sides, "deepspeed-ulysses"]))
    for tokens in options.tokens if "attention" in options.what else ():
        sizes = {key: getattr(options, key) for key in ("heads", "kv_heads", "dim")} | {"tokens": tokens}
        alone = both("attention", 1, ["alone"], sizes, options)
        for world in options.ranks:
            found = both("attention", world, names, sizes, options)
            print("\n".join(rows(alone, found, world, tokens)), flush=True)
            worst = max(worst, gap(alone, found))
            results.append({"sizes": sizes, "ranks": world, "alone": alone["ranks"], "found": found})
    decoders: dict[str, dict[str, Any]] = {}
    for name in ("ring", "ulysses") if "decoder" in options.what else ():
        for tokens in options.tokens:
            line, found = decoder_row(options, name, tokens)
            decoders.setdefault(name, {})[str(tokens)] = found
            print(f"\n{line}", flush=True)
    print(f"\nlargest disagreement: {worst:.1e}")
    if options.save:
        path = HERE / "results" / f"{date.today()}-context.json"
        runs = json.loads(path.read_text())["runs"] if path.exists() else []  # long tables are made in several runs
        head = {"command": ["python", "benchmarks/context.py", *sys.argv[1:]], "hardware": hardware() | {"load": load}}
        runs.append(head | {"results": results, "decoder": decoders})
        path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
