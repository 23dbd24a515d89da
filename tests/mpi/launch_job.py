"""What the ranks of `test_launch_command.py` run: `launch_job.py HOW FOLDER`, without Parallax but for "whole".

Each rank writes its process id to FOLDER/RANK.pid, meets the others, and then rank 1 does what HOW says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from mpi4py import MPI

MPI.COMM_WORLD.Barrier()
rank = MPI.COMM_WORLD.rank
how, folder = sys.argv[1], Path(sys.argv[2])
(folder / f"{rank}.pid").write_text(str(os.getpid()))
print("rank", rank, "says", os.environ.get("GREETING") or os.environ.get("NCCL_GREETING"))
MPI.COMM_WORLD.Barrier()
if rank == 1:
    (folder / "when").write_text(str(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise RuntimeError(" ".join(["the", "culprit"]))
    elif how == "exit":
        sys.exit(3)
elif how == "burst":
    for i in range(2000):
        print(i, "x" * (rank * 31 + i % 97))
if how in ("kill", "stop", "raise", "exit", "sleep"):
    time.sleep(1000)
