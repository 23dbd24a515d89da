"""What a step itself sends, whatever the axes: the count of valid tokens, results of the user's step, logged numbers.

It is: closed formulas for `engine.py`, `share.py`, `logs.py` and Lightning's `sync_dist`. It is not: the traffic of a
plugin or data engine, which each states by itself, or a count.
"""

from __future__ import annotations

from parallax.strategies.theory import Case, Expected

NUMBER = 8
"""Bytes of an fp64 number."""


def add_step(case: Case, out: Expected) -> None:
    """Add what every rank sends in one step of one batch.

    The valid tokens of the batch over "data"; from the last stage to all others the numbers that the user's step
    returned and logged, with one that says which form they have, and its larger tensors; over "cp" a sum and a count
    for each logged mean, on the ranks of the last stage; over "data" what `self.log(sync_dist=True)` shows in a step.
    """
    trace, layout = case.trace, case.layout
    out.add("data", "all_reduce", "forward", NUMBER)
    recorded = layout.pipeline_parallel_size > 1 or layout.context_parallel_size > 1 or case.microbatches > 1
    numbers = trace.numbers + len(trace.logs)
    out.add("pp", "broadcast", "forward", NUMBER * (1 + numbers), 1)
    for nbytes in trace.tensors:
        out.add("pp", "broadcast", "forward", nbytes * case.microbatches)
    if case.first:
        out.add("pp", "broadcast", "forward", NUMBER)
    for log in trace.logs:
        if case.ends_here:
            out.add("cp", "all_reduce", "forward", 2 * NUMBER)
        if log.synced:
            out.add("data", "all_reduce", "forward", NUMBER if recorded else log.element)
