"""What expert parallelism sends in one step, as closed formulas over the shapes of one process.

It is: for T tokens here that choose k of E experts, of h elements of w bytes, per layer and micro-batch (Lepikhin et
al. 2020): forward one all-to-all of E counts, one of T k h w there and one back, backward two. Where experts are cut
over etp as well an all-reduce of T h w forward, of T h w and of T k weights backward. Where s ranks of tp share tokens
T is a share, T' s shares of equal length: forward an all-gather of T' h w, backward of T' h w and of T' k weights; on
sequence shards, which are shares already, nothing. What comes back to a rank's experts depends on what the tokens
chose, so that the exchange is known as the sum over the group. It is not: a count.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from parallax.plugins.context.shards import SequenceShards
from parallax.plugins.expert.plans import ExpertsTarget
from parallax.strategies.comm import Traffic
from parallax.strategies.theory import Case, Expected, Seen

COUNT_BYTES = 8
MASK_BYTES = 8


def add_traffic(case: Case, out: Expected, targets: Iterable[ExpertsTarget], chunks: int) -> None:
    """Add what the experts modules `targets` of the whole model send that this rank runs, in `chunks` parts."""
    shares = case.mesh["tp_shares"]
    for target in (t for t in targets if case.here(t.fqn)):
        for call in case.calls(target.module):
            hidden, choices, weights = call.inputs
            tokens = prod(choices.shape[:-1])
            each = -(-tokens // shares.size)
            here = min((shares.index + 1) * each, tokens) - min(shares.index * each, tokens)
            _add_call(case, out, target, (hidden, choices, weights), each, here, chunks)
    if case.mesh.size("ep") > 1:
        for phase in ("forward", "backward"):
            out.pool("ep", "all_to_all", phase)


def _add_call(
    case: Case, out: Expected, target: ExpertsTarget, inputs: tuple[Seen, Seen, Seen], each: int, here: int, chunks: int
) -> None:
    """One call, all micro-batches; `here` tokens are this rank's, `each` with padding."""
    times, (hidden, choices, weights) = case.microbatches, inputs
    again, ending = case.again(target.fqn), case.again(target.fqn, ending=True)
    widths = [(seen, seen.shape[-1] * seen.element) for seen in (hidden, weights)]
    whole = each * case.mesh.size("tp_shares")
    apart = case.mesh.size("tp_shares") > 1 and target.fqn not in case.experts  # the group may also be "tp" by name
    if apart:
        axis = case.mesh["tp_shares"].axis
        out.add(axis, "all_gather", "forward", whole * widths[0][1], times)
        out.add(axis, "all_gather", "backward", whole * widths[0][1], ending)
        for seen, width in widths:
            if seen.grad:
                out.add(axis, "all_gather", "backward", whole * width, times)
    if target.tensor:
        axis, rows = case.mesh["etp"].axis, each if apart else here
        out.add(axis, "all_reduce", "forward", rows * widths[0][1], times)
        out.add(axis, "all_reduce", "backward", rows * widths[0][1], ending)
        for seen, width in widths:
            if seen.grad:
                out.add(axis, "all_reduce", "backward", rows * width, times)
    sent = Traffic(chunks, here * choices.shape[-1] * widths[0][1])
    for phase, count in (("forward", times), ("backward", again)):
        out.add("ep", "all_to_all", phase, target.num_experts * chunks * COUNT_BYTES, count)
        out.add_all({("ep", "all_to_all", phase): sent}, 2 * count)
    if hidden.grad or weights.grad:
        out.add_all({("ep", "all_to_all", "backward"): sent}, 2 * times)


def add_balance(case: Case, out: Expected, axis: str) -> None:
    """Add what auxiliary losses over the tokens of all ranks of `axis` send: forward every layer's router logits
    gathered, and the mask or, of a padded cut sequence, one that says which tokens are real; backward the logits'
    gradients scattered."""
    if not case.ends_here:
        return
    size, times, tokens = case.mesh.size(axis), case.microbatches, case.trace.tokens
    cut = case.mesh.size("cp")
    padded = cut > 1 and SequenceShards.of(tokens, cut, case.layout.context_sharding).length > tokens
    for layers, mask in case.trace.balanced:
        for logits in layers:
            out.add(axis, "all_gather", "forward", logits.bytes * size, times)
            out.add(axis, "reduce_scatter", "backward", logits.bytes * size, times * logits.grad)
        if padded or mask is not None:
            nbytes = prod(layers[0].shape[:-1]) * MASK_BYTES if mask is None else mask.bytes
            out.add(axis, "all_gather", "forward", nbytes * size, times)
