"""One rank of `topology.py`: tensor- and data-parallel all-reduces in one of two orders, under mpirun.

    python topology_worker.py {launcher,placed} LAYOUT STEPS FOLDER

A step is 8 all-reduces of 1 MiB over tp and one over data: the shape of a small transformer's step.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from mpi4py import MPI

from parallax.plugins.launch import ParallaxMPIEnvironment, init_distributed
from parallax.plugins.launch.detect import mpi_launch
from parallax.plugins.topology.job import job_order
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh

FLOATS = 2**18


def main(order: str, text: str, steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    launch = mpi_launch()
    assert launch is not None and launch.local_rank is not None
    layout = Layout.parse(text).resolve(MPI.COMM_WORLD.size)
    new_rank_of = job_order(MPI.COMM_WORLD, launch.local_rank, layout) if order == "placed" else None
    environment = ParallaxMPIEnvironment(new_rank_of)
    connection = init_distributed(environment, "gloo", timedelta(seconds=120))
    mesh = Mesh.build(layout, environment.global_rank())
    activation, gradient = torch.ones(FLOATS), torch.ones(FLOATS)
    seconds = []
    for _ in range(steps + 1):
        mesh["control"].barrier()
        started = time.perf_counter()
        for _ in range(8):
            mesh["tp"].all_reduce(activation)
        mesh["data"].all_reduce(gradient)
        seconds.append(time.perf_counter() - started)
        activation.fill_(1.0), gradient.fill_(1.0)
    slowest = [max(times) for times in zip(*mesh["control"].gather_objects(seconds), strict=True)]
    if environment.global_rank() == 0:
        (folder / "result.json").write_text(json.dumps({"step": slowest[1:], "order": new_rank_of}))
    mesh.close()
    connection.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
