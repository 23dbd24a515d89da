"""What FSDP sends in one step, as closed formulas over the parameters of a rank.

It is: for each unit (a block, and the root for the rest) the gathering of its padded weights and the reduction of its
gradients (Rajbhandari et al. 2020, section 7; Zhao et al. 2023, "PyTorch FSDP"). It is not: a count
(`fsdp_traffic.py`).

| stage | forward | backward | step |
|---|---|---|---|
| 2 | all-gather of each unit, once a step | | reduce-scatter of each unit |
| 3 (tp, pp) | all-gather of each unit for each micro-batch, of the root once a step | the units' again | the same |
| 3 | the same | the same, and reduce-scatter of each unit and the root for each micro-batch | |

A recomputed pipeline stage gathers its units once more; a recomputed layer runs while its weights are there for its
backward. A parameter is padded to equal parts along the dim it is cut along.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from parallax.plugins.data.fsdp_shards import dim_of, is_cut
from parallax.plugins.data.fsdp_units import find_units
from parallax.plugins.data.traffic import add_buffers, add_norm
from parallax.strategies.theory import Case, Expected


def add_sharded(case: Case, out: Expected) -> None:
    """Add what ZeRO stages 2 and 3 send under FSDP."""
    names = {id(p): n for n, p in case.model.named_parameters(remove_duplicate=False) if n in case.shards}
    left, times = set(names), case.microbatches
    fqns = {module: fqn for fqn, module in case.model.named_modules()}
    for unit in find_units(case.model):
        held = [names[id(p)] for p in unit.parameters() if id(p) in left]
        left -= {id(p) for p in unit.parameters()}
        each = case.layout.zero_stage == 3
        backward = times + (case.again(fqns[unit]) if case.layout.recompute == "stage" else 0)
        _add_unit(case, out, held, forward=times if each else 1, backward=backward if each else 0)
    _add_unit(case, out, [names[key] for key in left], forward=1, backward=0)
    scalars = {n: p for n, p in case.trained().items() if not is_cut(p)}
    for axis in ("data", "edp"):
        add_buffers(case, out, {n: p for n, p in scalars.items() if case.averaged_over[n] == axis}, axis)
    add_norm(case, out, sharded=True)


def _add_unit(case: Case, out: Expected, names: Sequence[str], *, forward: int, backward: int) -> None:
    layout = case.layout
    for axis in ("data", "edp"):
        here = [n for n in names if case.averaged_over[n] == axis and is_cut(case.model.get_parameter(n))]
        size, trained = case.mesh.size(axis), case.trained()
        if not here:
            continue
        gathered = sum(_padded(case, n, size) for n in here)
        out.add(axis, "all_gather", "forward", gathered, forward)
        out.add(axis, "all_gather", "backward", gathered, backward)
        if reduced := sum(_padded(case, n, size) for n in here if n in trained):
            early = layout.zero_stage == 3 and layout.tensor_parallel_size == layout.pipeline_parallel_size == 1
            phase, times = ("backward", case.microbatches) if early else ("step", 1)
            out.add(axis, "reduce_scatter", phase, reduced, times)


def _padded(case: Case, fqn: str, size: int) -> int:
    """Bytes of this rank's part of a parameter, padded to equal shares."""
    param: nn.Parameter = case.model.get_parameter(fqn)
    shard = case.shards[fqn]
    shape = tuple(param.shape) if shard is None else shard.local_shape
    rows = shape[(dim := dim_of(shape, size))]
    return prod(shape[:dim]) * -(-rows // size) * size * prod(shape[dim + 1 :]) * param.element_size()
