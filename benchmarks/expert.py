"""One mixture-of-experts layer beside DeepSpeed's and Megatron-core's, with the same weights, tokens and ranks.

    python benchmarks/expert.py                       # 8, 16 and 32 experts on 2 ranks, constant work
    python benchmarks/expert.py --experts 8 --ranks 4 --save

Forward and backward of a router (the two largest of E, softmax of these) and its SwiGLU experts, fp32, one thread a
process, nothing dropped. All sides run in the same processes, in turn, in rounds; a ratio is the median over rounds of
the ratio of that round, with its extremes. *CPU* ratios are of processor seconds of all ranks: on a busy machine they
say more than the clock. *bytes* is what all ranks give to all-to-alls, over four times top-k x tokens x hidden.
*kept* is what autograd keeps of a forward, mean over ranks, over Parallax's. Every step has tokens of its own, so that
loads differ. "torch.mm" is Parallax without oneDNN's products, "eager" with transformers' own forward of the experts;
"AutoEP" is the layer that DeepSpeed puts in the place of a Hugging Face block. Outputs and input gradients must agree.
Megatron-core asks CUDA for its device and is answered "cpu"; nothing in it is changed.
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
TOP_K, FP32 = 2, 4


def rows(ranks: list[dict[str, Any]], experts: int, theory: float) -> list[str]:
    """Lines of the table, one for each side."""
    cpu = {side: [sum(parts) for parts in zip(*(r[side]["cpu"] for r in ranks), strict=True)] for side in ranks[0]}
    own = statistics.mean(r["parallax"]["kept"] for r in ranks)
    seconds = ranks[0]["parallax"]["seconds"]
    return [
        f"| {experts} | {side} | {spread(found['seconds'])} | {ratio(seconds, found['seconds'])} "
        f"| {ratio(cpu['parallax'], cpu[side])} | {sum(r[side]['bytes'] for r in ranks) / theory:.2f} "
        f"| {statistics.mean(r[side]['kept'] for r in ranks) / own:.2f} |"
        for side, found in ranks[0].items()
    ]


def gap(ranks: list[dict[str, Any]]) -> float:
    """Largest relative difference of the squares of outputs and of input gradients between a side and Parallax."""
    return max(
        abs(a - b) / abs(b)
        for rank in ranks
        for side in rank.values()
        for a, b in zip(side["check"], rank["parallax"]["check"], strict=True)
    )


def main() -> int:
    """Run what was asked for and print a table. Status 1 when a side computes something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16, 32])
    for name, default in (("ranks", 2), ("hidden", 256), ("width", 512), ("tokens", 1024), ("rounds", 5), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", type=float, default=300, help="seconds one row may take")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-expert.json")
    options, load = parser.parse_args(namespace=argparse.Namespace(threads=1)), os.getloadavg()[0]
    columns = ["experts", "side", "ms: median (quartiles)", "parallax/side", "CPU parallax/side", "bytes", "kept"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    theory = 4.0 * TOP_K * options.tokens * options.hidden * FP32 * options.ranks
    results, worst = [], 0.0
    for experts in options.experts:
        sizes = [experts, options.hidden, options.width, options.tokens, options.rounds, options.steps]
        ranks = launch([str(HERE / "expert_worker.py"), *map(str, sizes)], options.ranks, options)
        print("\n".join(rows(ranks, experts, theory)), flush=True)
        worst = max(worst, gap(ranks))
        results.append({"experts": experts, "ranks": ranks})
    print(f"\nlargest disagreement: {worst:.1e}")
    if options.save:
        path = HERE / "results" / f"{date.today()}-expert.json"
        head = {"command": ["python", "benchmarks/expert.py", *sys.argv[1:]], "hardware": hardware() | {"load": load}}
        path.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
