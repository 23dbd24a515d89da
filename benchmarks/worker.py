"""One process of one side of a comparison: runs its steps; rank 0 prints a line of JSON.

Started by `step_time.py` with python (one process) or torchrun.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import fields

import torch.distributed as dist
from peers import PEERS
from peers_pipeline import PIPELINES
from work import Cost, Work, kept_by, mean_over_ranks, measure, over_ranks

MARK = "RESULT "


def main(side: str, warmup: int, steps: int, sizes: dict[str, int]) -> None:
    """Run `side` ("torch", "parallax:tp2", ...) and print its seconds and losses from rank 0."""
    warnings.filterwarnings("ignore")
    work = Work(**{field.name: sizes[field.name] for field in fields(Work) if field.name in sizes})
    world = int(os.environ.get("WORLD_SIZE", "1"))
    peers = PEERS | PIPELINES
    cost = Cost()
    if side in peers:
        step = peers[side](work)
        cost.start()
        seconds, losses = measure(step, warmup, steps)
        stopped = cost.stop()
        spent = over_ranks(stopped, kept_by(step))
        losses = mean_over_ranks(losses)
        speaks = world == 1 or dist.get_rank() == 0
    else:
        from ours import run_trainer

        seconds, losses, spent, speaks = run_trainer(side, work, world, warmup, steps)
    if speaks:
        print(MARK + json.dumps({"seconds": seconds, "losses": losses, **spent}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
