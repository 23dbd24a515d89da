"""What DeepSpeed's ZeRO sends in one step, as closed formulas over the parameters of a rank.

It is: Rajbhandari et al. 2020, section 7, with DeepSpeed's padding. It is not: a count (`deepspeed_traffic.py`).

With P elements of w bytes on a rank, D data ranks, and sums over what a parameter or group is padded to:

| stage | forward | backward | step |
|---|---|---|---|
| 1, 2 | | | all-reduce of P w; all-gather of each group's P' w, padded to 2 D elements |
| 3 | all-gather of P'' w | all-gather of P'' w | reduce-scatter (fp64: all-reduce) of P'' w; small ones gathered |

P'' pads every parameter to D. What is gathered for a forward or backward is every parameter of each module that is
called, and once more for a recomputed layer or stage. That is with `zero3_prefetch=False`: else DeepSpeed follows a
recorded order from the second step on, gathers ahead and keeps what is needed again soon, which no formula states.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from parallax.plugins.data.deepspeed_config import MAX_BUCKET, ModelSize, zero_config
from parallax.plugins.data.traffic import add_norm
from parallax.strategies.theory import Case, Expected

ALIGNMENT = 2
"""DeepSpeed pads a group to a multiple of this times the ranks, for NCCL."""
GROUPS = ("data", "edp")


def add_sharded(case: Case, out: Expected, *, prefetch: bool = False) -> None:
    """Add what ZeRO stages 1 to 3 send.

    Raises:
        NotImplementedError: gradients that fill more than one buffer of reduction; weights that are gathered ahead.
    """
    total = sum(case.elements(fqn) for fqn in case.trained())
    if total > MAX_BUCKET:
        raise NotImplementedError(
            f"more than {MAX_BUCKET:,} trained elements on a rank: ZeRO's buffers have no formula"
        )
    if case.layout.zero_stage < 3:
        _add_states(case, out)
    elif prefetch:
        raise NotImplementedError("weights that ZeRO-3 gathers ahead have no formula; use zero3_prefetch=False")
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


def _add_weights(case: Case, out: Expected) -> None:
    width, trained = _width(case), case.trained()
    sizes = [case.elements(fqn) for fqn in trained]
    dtype = next(iter(trained.values())).dtype
    zero = zero_config(3, dtype, ModelSize(sum(sizes), max(sizes)), cuda=False)["zero_optimization"]
    for axis in GROUPS:
        names = _of(case, axis)
        if not names:
            continue
        size = case.mesh.size(axis)
        whole = {f: _padded(case.elements(f), size) * width for f in names}
        kept = {f for f in names if case.elements(f) <= zero["stage3_param_persistence_threshold"]}
        if zero["reduce_scatter"]:
            out.add(axis, "reduce_scatter", "step", sum(whole.values()))
        else:
            out.add(axis, "all_reduce", "step", sum(case.elements(f) for f in names) * width)
        for fqn in kept:
            out.add(axis, "all_gather", "step", whole[fqn])
        _add_gathers(case, out, axis, whole, kept if case.step else ())


def _add_gathers(case: Case, out: Expected, axis: str, whole: dict[str, int], there: Collection[str]) -> None:
    """Gathers for forwards and backwards, one call a module; `whole`: bytes of each parameter, `there`: those that the
    first micro-batch finds gathered, by the step before."""
    for prefix, module in case.model.named_modules():
        own = [f for n, _ in module.named_parameters(recurse=False) if (f := f"{prefix}.{n}".lstrip(".")) in whole]
        seen = case.calls(module)
        if not (own and seen and _runs_here(case, prefix)):
            continue
        every = sum(whole[f] for f in own)
        backward = sum(any(x.grad for x in call.outputs) for call in seen)
        out.add(axis, "all_gather", "forward", every, len(seen) * (case.microbatches - 1))
        if first := sum(whole[f] for f in own if f not in there):
            out.add(axis, "all_gather", "forward", first, len(seen))
        out.add(axis, "all_gather", "backward", every, case.microbatches * backward)
        out.add(axis, "all_gather", "backward", every, len(seen) * _again(case, prefix, module))


def _again(case: Case, prefix: str, module: nn.Module) -> int:
    """Recomputed forwards that gather: not where the layer's last tensor is saved, whose backward has begun."""
    layer = case.recomputed_layer(prefix)
    if layer is not None and case.trace.last_save.get(case.model.get_submodule(layer)) in set(module.modules()):
        return 0
    return case.again(prefix)


def _runs_here(case: Case, prefix: str) -> bool:
    return not prefix or case.here(prefix)
