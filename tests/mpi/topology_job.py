"""What the ranks of the placement tests run under mpirun: `python -m tests.mpi.topology_job FOLDER`.

Each rank writes the order that it was told for some layouts, or the error, and what `parallax topo` printed there, to
FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from mpi4py import MPI

from parallax.cli import main as command
from parallax.plugins.topology.job import job_order
from parallax.strategies.layout import Layout

ASKED = (("tp2", "refuse"), ("tp4", "refuse"), ("tp4", "allow"), ("tp3", "allow"))


def main(folder: Path) -> None:
    comm = MPI.COMM_WORLD
    found: dict[str, object] = {}
    for text, mode in ASKED:
        try:
            found[f"{text} {mode}"] = job_order(comm, comm.rank, Layout.parse(text), probe="text", on_misfit=mode)
        except ValueError as error:
            found[f"{text} {mode}"] = str(error)
    printed = StringIO()
    with redirect_stdout(printed):
        status = command(["topo", "--probe", "text", "--measure", "--layout", "tp2", "--json"])
    found |= {"status": status, "topo": printed.getvalue()}
    (folder / f"{comm.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
