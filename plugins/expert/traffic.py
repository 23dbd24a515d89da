"""What expert parallelism sends in one step, as closed formulas over the shapes of one process.

It is: for T tokens here that choose k of E experts, of h elements of w bytes, per layer and micro-batch (Lepikhin et
al. 2020): forward one all-to-all of E counts, one of T k h w there and one back, backward two; and where experts are
cut over tp as well an all-reduce of T h w forward, of T h w and of T k weights backward. What comes back to a rank's
experts depends on what the tokens chose, so that the exchange is known as the sum over the group. It is not: a count.
"""

from __future__ import annotations

from collections.abc import Iterable

from parallax.plugins.expert.plans import ExpertsTarget
from parallax.strategies.theory import Case, Expected

COUNT_BYTES = 8


def add_traffic(case: Case, out: Expected, targets: Iterable[ExpertsTarget]) -> None:
    """Add what the experts modules `targets` of the whole model send that this rank runs."""
    times, split = case.microbatches, case.mesh.size("ep") > 1
    for target in (t for t in targets if case.here(t.fqn)):
        for call in case.calls(target.module):
            hidden, choices, weights = call.inputs
            if target.tensor:
                out.add("tp", "all_reduce", "forward", hidden.bytes, times)
                for seen in (hidden, weights):
                    if seen.grad:
                        out.add("tp", "all_reduce", "backward", seen.bytes, times)
            rows = choices.bytes // choices.element * hidden.shape[-1] * hidden.element
            out.add("ep", "all_to_all", "forward", target.num_experts * COUNT_BYTES, times)
            out.add("ep", "all_to_all", "forward", rows, 2 * times)
            if hidden.grad or weights.grad:
                out.add("ep", "all_to_all", "backward", rows, 2 * times)
    if split:
        for phase in ("forward", "backward"):
            out.pool("ep", "all_to_all", phase)
