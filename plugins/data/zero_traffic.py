"""What DeepSpeed's ZeRO sends in one step, as closed formulas over the parameters of a rank.

It is: Rajbhandari et al. 2020, section 7, with DeepSpeed's padding. It is not: a count (`deepspeed_traffic.py`).

With P elements of w bytes on a rank, D data ranks, and sums over what a parameter or group is padded to:

| stage | forward | backward | step |
|---|---|---|---|
| 1, 2 | | | all-reduce of P w; all-gather of each group's P' w, padded to 2 D elements |
| 3 | all-gather of P'' w | all-gather of P'' w | reduce-scatter (fp64: all-reduce) of P'' w; small ones gathered |

P'' pads every parameter to D. What is gathered for a forward or backward is every parameter of each module that is
called. Without a pipeline DeepSpeed follows a recorded order from the second step on: it gathers ahead, up to a bucket
of the backward in the forward, and keeps what is needed again soon. Then the formula is an upper and a lower bound.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from parallax.plugins.data.deepspeed_config import MAX_BUCKET, ModelSize, zero_config
from parallax.plugins.data.traffic import add_norm
from parallax.strategies.comm import Traffic
from parallax.strategies.theory import Case, Expected

ALIGNMENT = 2
"""DeepSpeed pads a group to a multiple of this times the ranks, for NCCL."""
GROUPS = ("data", "edp")


def add_sharded(case: Case, out: Expected) -> None:
    """Add what ZeRO stages 1 to 3 send.

    Raises:
        NotImplementedError: gradients that fill more than one buffer of reduction; recomputed layers at stage 3.
    """
    total = sum(case.elements(fqn) for fqn in case.trained())
    if total > MAX_BUCKET:
        raise NotImplementedError(
            f"more than {MAX_BUCKET:,} trained elements on a rank: ZeRO's buffers have no formula"
        )
    if case.layout.zero_stage < 3:
        _add_states(case, out)
    else:
        _add_weights(case, out)
    add_norm(case, out, sharded=True)


def _of(case: Case, group: str) -> list[str]:
    return [fqn for fqn in case.trained() if case.averaged_over[fqn] == group]


def _width(case: Case) -> int:
    return next((p.element_size() for p in case.trained().values()), 4)


def _padded(elements: int, to: int) -> int:
    return -(-elements // to) * to


# Stages 1 and 2


def _add_states(case: Case, out: Expected) -> None:
    width = _width(case)
    for axis in GROUPS:
        names = _of(case, axis)
        size = case.mesh.size(axis)
        shares = [sum(case.elements(f) for f in names if f in group) for group in case.groups]
        if axis == "data":  # a stage without a parameter of a group holds one element there
            shares = [elements or 1 for elements in shares]
        if reduced := sum(shares):
            out.add(axis, "all_reduce", "step", reduced * width)
        for elements in filter(None, shares):
            out.add(axis, "all_gather", "step", _padded(elements, ALIGNMENT * size) * width)


# Stage 3


@dataclass(frozen=True)
class _Gathers:
    """What one pass of all micro-batches gathers over an axis."""

    calls: int = 0
    elements: int = 0


def _add_weights(case: Case, out: Expected) -> None:
    if case.layout.recompute in ("full", "stage"):
        raise NotImplementedError("ZeRO-3 states no formula of what recomputed layers gather again")
    width, trained = _width(case), case.trained()
    sizes = [case.elements(fqn) for fqn in trained]
    dtype = next(iter(trained.values())).dtype
    zero = zero_config(3, dtype, ModelSize(sum(sizes), max(sizes)), cuda=False)["zero_optimization"]
    for axis in GROUPS:
        names = _of(case, axis)
        if not names:
            continue
        size = case.mesh.size(axis)
        whole = {f: _padded(case.elements(f), size) for f in names}
        kept = {f for f in names if case.elements(f) <= zero["stage3_param_persistence_threshold"]}
        if zero["reduce_scatter"]:
            out.add(axis, "reduce_scatter", "step", sum(whole.values()) * width)
        else:
            out.add(axis, "all_reduce", "step", sum(case.elements(f) for f in names) * width)
        for fqn in kept:
            out.add(axis, "all_gather", "step", whole[fqn] * width)
        _add_gathers(case, out, axis, whole, kept, zero, width)


def _add_gathers(
    case: Case,
    out: Expected,
    axis: str,
    whole: dict[str, int],
    kept: Collection[str],
    zero: dict[str, int],
    width: int,
) -> None:
    """Gathers for forwards and backwards; `whole`: padded elements of each parameter, `kept`: those that stay whole."""
    traced = case.layout.pipeline_parallel_size == 1 and case.step > 0
    times = case.microbatches
    for phase in ("forward", "backward"):
        every = _passed(case, whole, (), backward=phase == "backward")
        rest = _passed(case, whole, kept, backward=phase == "backward")
        first = rest if traced or (phase == "forward" and case.step > 0) else every  # small ones are there already
        later = rest if traced else every
        calls, elements = first.calls + (times - 1) * later.calls, first.elements + (times - 1) * later.elements
        out.add_all({(axis, "all_gather", phase): Traffic(calls, elements * width)}, 1)
        if traced:
            ahead = zero["stage3_prefetch_bucket_size"] + max(whole.values())
            live = zero["stage3_max_live_parameters"] + max(whole.values())
            uses = times * len(whole)
            if phase == "forward":
                out.add_all({(axis, "all_gather", phase): Traffic(uses, ahead * width)}, 1)
                out.bound(axis, "all_gather", phase, Traffic(calls + uses - 1, ahead * width))
            else:
                out.add_all({(axis, "all_gather", phase): Traffic(uses, 0)}, 1)
                out.bound(axis, "all_gather", phase, Traffic(calls + uses, (live + ahead) * width))


def _passed(case: Case, whole: dict[str, int], without: Collection[str], *, backward: bool) -> _Gathers:
    """Parameters of each called module but `without`, one call a module."""
    calls = elements = 0
    for prefix, module in case.model.named_modules():
        names = [f for n, _ in module.named_parameters(recurse=False) if (f := f"{prefix}.{n}".lstrip(".")) in whole]
        own = [whole[f] for f in names if f not in without]
        seen = case.calls(module)
        if backward:
            seen = [call for call in seen if any(x.grad for x in call.outputs)]
        if own and seen and _runs_here(case, prefix, module):
            calls += len(seen)
            elements += len(seen) * sum(own)
    return _Gathers(calls, elements)


def _runs_here(case: Case, prefix: str, module: nn.Module) -> bool:
    return not prefix or case.here(prefix)
