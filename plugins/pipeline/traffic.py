"""What the pipeline axis sends in one step, as closed formulas over the placement of stages.

It is: for each boundary between stages of different ranks and each micro-batch, what leaves the last layer before it,
forward, and as much of it as carries gradients, backward (Narayanan et al. 2021), whatever the schedule; and the sums
over the ends for tied weights, over all stages for parameters of containers. It is not: a count or a schedule.
"""

from __future__ import annotations

from math import prod

from torch import nn

from parallax.plugins.pipeline.actions import Lists
from parallax.plugins.pipeline.partition import Partition
from parallax.plugins.pipeline.plans import Structure
from parallax.plugins.pipeline.transfer import DESCRIPTION_BYTES
from parallax.strategies.theory import Case, Expected, Seen, Stages


def stages_of(
    model: nn.Module, structure: Structure, partition: Partition, lists: Lists, placement: tuple[int, ...]
) -> Stages:
    """Where each module of the whole `model` runs."""
    first_of = {i: stage for stage, (lo, hi) in enumerate(partition.bounds) for i in range(lo, hi)}
    prefix, after, last = f"{structure.layers}.", structure.after, len(placement) - 1

    def stage(fqn: str) -> int:
        if fqn.startswith(prefix):
            return first_of[int(fqn.removeprefix(prefix).partition(".")[0])]
        return last if any(fqn == name or fqn.startswith(f"{name}.") for name in after) else 0

    halved: dict[int, set[int]] = {}
    for action in (a for actions in lists for a in actions if a.kind == "I"):
        halved.setdefault(action.stage, set()).add(action.microbatch)
    ends = tuple(model.get_submodule(f"{prefix}{hi - 1}") for _, hi in partition.bounds[:-1])
    return Stages(placement, ends, stage, lambda number: len(halved.get(number, ())))


def add_traffic(case: Case, out: Expected, structure: Structure) -> None:
    """Add what this rank sends and receives over "pp" and "pp_back"."""
    places, here, scores = case.stages.placement, case.mesh.index("pp"), case.scores()
    carried = [
        seen for fqn in structure.carried for c in case.calls(case.model.get_submodule(fqn)) for seen in c.outputs
    ]
    for stage, end in enumerate(case.stages.ends):
        source, target = places[stage], places[stage + 1]
        if source == target or here not in (source, target):
            continue
        (handed,) = case.trace.handed[end]
        cut = [case.sharded and (i == 0 or seen.number in scores) for i, seen in enumerate(handed)]
        sizes = [_shard(case, seen) if part else seen.bytes for part, seen in zip(cut, handed, strict=True)]
        forward = sizes + [seen.bytes for seen in carried]
        backward = [n for n, seen in zip(forward, [*handed, *carried], strict=True) if seen.grad]
        if case.first:
            _add(case, out, source, target, "forward", DESCRIPTION_BYTES, 1)
        for nbytes in forward:
            _add(case, out, source, target, "forward", nbytes, case.microbatches)
        for nbytes in backward:
            _add(case, out, target, source, "backward", nbytes, case.microbatches)
    _add_ties(case, out, structure)
    for fqn, param in case.trained().items():
        if fqn in structure.direct:
            out.add("pp", "all_reduce", "step", (case.elements(fqn) + 1) * param.element_size())


def _add(case: Case, out: Expected, source: int, target: int, phase: str, nbytes: int, calls: int) -> None:
    """A message; the two directions between ranks travel on groups of their own."""
    kind = "send" if case.mesh.index("pp") == source else "recv"
    out.add("pp" if source < target else "pp_back", kind, phase, nbytes, calls)


def _shard(case: Case, seen: Seen) -> int:
    """Bytes of this rank's tokens of [..., tokens, h], padding included."""
    return -(-prod(seen.shape[:-1]) // case.mesh.size("tp")) * seen.shape[-1] * seen.element


def _add_ties(case: Case, out: Expected, structure: Structure) -> None:
    """Gradients of weights that are used before and after the layers."""
    if case.stages.placement[0] == case.stages.placement[-1] or case.mesh.index("pp") not in (
        case.stages.placement[0],
        case.stages.placement[-1],
    ):
        return
    owners = {fqn: fqn.rpartition(".")[0] for fqn, _ in case.model.named_parameters(remove_duplicate=False)}
    before = {id(case.model.get_parameter(f)) for f, owner in owners.items() if owner in structure.before}
    after = {id(case.model.get_parameter(f)) for f, owner in owners.items() if owner in structure.after}
    for fqn, param in case.trained().items():
        if id(param) in before & after:
            out.add("tie", "all_reduce", "step", case.elements(fqn) * param.element_size())
