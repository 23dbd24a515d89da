"""`python -m parallax.plugins.sweep.watch ... -- COMMAND`: one job of a sweep, from its start to its end.

It is: a process above mpirun or torchrun that ends with the sweep and takes all ranks with it. It is not: the watching
itself (`plugins/launch/watchdog.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from parallax.plugins.launch.watchdog import Limits, supervise


def main(argv: Sequence[str]) -> int:
    """Run what follows "--" to its end; the exit status of `supervise`."""
    parser = argparse.ArgumentParser(prog="parallax.plugins.sweep.watch")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--hang-limit", type=float)
    cut = argv.index("--")
    options = parser.parse_args(argv[:cut])
    return supervise(argv[cut + 1 :], options.ranks, Limits(options.time_limit, options.hang_limit))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
