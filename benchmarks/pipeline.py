"""Pipelines: step time and memory beside other packages, and the bubble beside the simulator's.

    python benchmarks/pipeline.py                         # everything
    python benchmarks/pipeline.py --only pp2-torch pp2-deepspeed --rounds 5
    python benchmarks/pipeline.py --only bubble           # bubbles and the gain of zero-bubble schedules
    python benchmarks/pipeline.py --save                  # also into benchmarks/results/<date>-pipeline.json

Comparisons run as in `step_time.py`: the same work, rounds alternate, the ratio is Parallax over peer. Beside the time
there are processor seconds of all ranks, which a busy machine changes less; the most that autograd of the worst rank
keeps at once (`saved.py`, in a step of its own); and the peak of its resident memory on top of its model. Bubbles are
measured with layers that sleep (`pipeline_worker.py`), so that stages need no core of their own, and predicted by the
simulator from the mean measured time of each action.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from datetime import date
from typing import Any

from step_time import HERE, SIZES, compare, hardware, launch, spread

from parallax.plugins.pipeline.catalog import find_schedule, make_lists
from parallax.plugins.pipeline.simulator import Costs, simulate

# name: (processes, peer, Parallax's side)
COMPARISONS = {
    f"pp{ranks}-{name}": (ranks, peer, f"parallax:pp{ranks} mb8 {layout}")
    for ranks in (2, 4)
    for name, peer, layout in (
        ("torch", "torch-pp-1f1b", "1f1b"),
        ("torch-interleaved", "torch-pp-interleaved", "interleaved_1f1b"),
        ("torch-zbv", "torch-pp-zb_v", "zb_v"),
        ("deepspeed", "deepspeed-pp", "1f1b zero1"),
        ("megatron", "megatron-pp", "1f1b"),
    )
}
OWN_WEIGHTS = ("megatron-pp",)
"""Peers whose model starts from weights of its own: their losses are not ours."""

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")


def row(result: dict[str, Any]) -> str:
    """One line of the table of comparisons."""
    times = [[s for part in result[f"{side}_seconds"] for s in part] for side in ("peer", "parallax")]
    cpu = statistics.median(o / p for p, o in zip(result["peer_cpu"], result["parallax_cpu"], strict=True))
    kept, resident = (
        [statistics.median(max(ranks) for ranks in result[f"{side}_{what}"]) for side in ("peer", "parallax")]
        for what in ("kept", "memory")
    )
    ratios = result["ratios"]
    return (
        f"| {result['comparison']} | {result['peer']} | {spread(times[0])} | {result['parallax']} | {spread(times[1])} "
        f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | {cpu:.2f} "
        f"| {kept[1] / kept[0]:.2f} ({kept[1]:.1f}/{kept[0]:.1f} MiB) "
        f"| {resident[1] / resident[0]:.2f} ({resident[1]:.0f}/{resident[0]:.0f} MiB) | {result['loss_gap']:.1e} |"
    )


def bubble(schedule: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measured and predicted bubble of one schedule, with equal costs of forward, input and weight gradient."""
    microbatches = 2 * ranks
    layout = f"pp{ranks} mb{microbatches} {schedule}"
    worker = [str(HERE / "pipeline_worker.py"), layout, str(options.unit), str(options.steps)]
    found = launch(worker, ranks, options)
    ideal = simulate(make_lists(find_schedule(schedule), ranks, microbatches), Costs(1.0, 2.0, 1.0))
    return {"layout": layout, "unit_seconds": options.unit, "equal_costs": ideal.bubble, **found}


def bubble_row(result: dict[str, Any], base: dict[str, Any]) -> str:
    """One line of the table of bubbles; `base` is 1F1B's."""
    measured, predicted = (statistics.median(result[key]) for key in ("measured", "predicted"))
    gain = statistics.median(base["seconds"]) / statistics.median(result["seconds"])
    expected = (1 - result["equal_costs"]) / (1 - base["equal_costs"])
    return (
        f"| {result['layout']} | {measured:.3f} | {predicted:.3f} | {measured / predicted:.2f} "
        f"| {result['equal_costs']:.3f} | {gain:.2f} | {expected:.2f} |"
    )


def main() -> int:
    """Run what was asked for and print the tables. Status 1 when losses disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*COMPARISONS, "bubble"], default=[*COMPARISONS, "bubble"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a side in a round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of a process")
    parser.add_argument("--limit", type=float, default=300, help="seconds one side may take")
    parser.add_argument("--unit", type=float, default=0.1, help="seconds a sleeping action takes")
    for size, default in (SIZES | {"layers": 8, "microbatches": 8}).items():
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--save", action="store_true", help="add to benchmarks/results/<date>-pipeline.json")
    options = parser.parse_args()

    load = os.getloadavg()[0]
    comparisons = [name for name in options.only if name != "bubble"]
    results, bubbles = [], []
    if comparisons:
        print(
            "| comparison | peer | its step, ms | Parallax | its step, ms | time | processor | activations | resident "
            "| loss gap |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in comparisons:
        results.append(compare(name, COMPARISONS[name], options))
        print(row(results[-1]), flush=True)
    if "bubble" in options.only:
        print("\n| layout | bubble | predicted | ratio | equal costs | 1F1B's time / its | expected |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for ranks in (2, 4):
            found = {schedule: bubble(schedule, ranks, options) for schedule in SCHEDULES}
            for result in found.values():
                print(bubble_row(result, found["1f1b"]), flush=True)
            bubbles += found.values()
    if options.save:
        path = HERE / "results" / f"{date.today()}-pipeline.json"
        runs = json.loads(path.read_text())["runs"] if path.exists() else []  # comparisons and bubbles take turns
        head = {"command": ["python", "benchmarks/pipeline.py", *sys.argv[1:]], "hardware": hardware() | {"load": load}}
        runs.append(head | {"results": results, "bubbles": bubbles})
        path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    wrong = [r["comparison"] for r in results if r["loss_gap"] > 1e-4 and r["peer"] not in OWN_WEIGHTS]
    if wrong:
        print(f"losses of both sides disagree in {', '.join(wrong)}: these times do not compare the same work")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
