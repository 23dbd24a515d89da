"""Finds the experts of a model, and how their parameters are cut.

It is: the reading of `ep_plan` (Hugging Face's and a plain module's, in the same words) and of the expert words of
`tp_plan`. It is not: the cut itself (`plugin.py`) or what runs (`layers.py`).

| word | names | meaning |
|---|---|---|
| `ep_dispatch_experts` | a module | holds experts: `num_experts`, called as in `layers.py` |
| `grouped_gemm` | a parameter of it | dim 0 counts experts and is cut over ep |
| `colwise`, `packed_colwise` | a parameter of it, in `tp_plan` | dim -2 is cut over tp (each of 2 fused blocks) |
| `rowwise`, `packed_rowwise` | the same | dim -1 is cut over tp |
| `moe_tp_experts` | a module, in `tp_plan` | its outputs are partial sums over tp |
| `moe_identity_expert` | a module in it, in `tp_plan` | what it returns counts on the first rank of tp only |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallax.plugins.tensor.plans import is_foreign, known_rules

MODULE_WORD, PARAMETER_WORD, TENSOR_WORD = "ep_dispatch_experts", "grouped_gemm", "moe_tp_experts"
IDENTITY_WORD = "moe_identity_expert"

HOW_TO = (
    "give it one: an `ep_plan` attribute on the module, e.g. self.ep_plan = {'layers.*.experts': "
    "'ep_dispatch_experts', 'layers.*.experts.up': 'grouped_gemm', 'layers.*.experts.down': 'grouped_gemm'}, or "
    "use expert_parallel_size=1"
)


@dataclass(frozen=True)
class ExpertsTarget:
    """One experts module and how its parameters are cut.

    Attributes:
        fqn: its name from the root.
        module: itself.
        num_experts: experts it holds, uncut.
        grouped: names of the parameters whose dim 0 counts experts.
        tensor: parameter name -> word of the tensor-parallel plan; empty when experts stay whole inside.
        identity: names of modules in it that stand for experts without weights.
    """

    fqn: str
    module: nn.Module
    num_experts: int
    grouped: tuple[str, ...]
    tensor: Mapping[str, str]
    identity: tuple[str, ...]


def find_experts(model: nn.Module, plan: Mapping[str, str] | None = None) -> list[ExpertsTarget]:
    """Every experts module this rank holds, in module order; empty for a dense model.

    Raises:
        ValueError: a plan names a module that lacks what dispatch needs.
    """
    known = {rule.pattern: rule.style for rule in known_rules(model)}
    ep, tp = _rules(model, "ep_plan", plan), _rules(model, "tp_plan", known)
    out = []
    for fqn, module in model.named_modules():
        is_experts = _word(ep, fqn) == MODULE_WORD or _word(tp, fqn) == TENSOR_WORD
        if is_experts and not is_foreign(module):
            out.append(_target(fqn, module, ep, tp))
    return out


def _target(fqn: str, module: nn.Module, ep: list[tuple[str, str]], tp: list[tuple[str, str]]) -> ExpertsTarget:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    grouped = tuple(n for n in names if _word(ep, f"{fqn}.{n}") == PARAMETER_WORD)
    count: Any = getattr(module, "num_experts", getattr(module, "num_routed_experts", None))
    sizes = {n: module.get_parameter(n).shape[0] for n in grouped}
    if not isinstance(count, int) or any(size != count for size in sizes.values()):
        raise ValueError(
            f"{fqn} ({type(module).__name__}) is named as an experts module and needs an integer `num_experts` equal "
            f"to dim 0 of its grouped parameters; num_experts is {count!r}, the parameters have {sizes}"
        )
    words = {n: w for n in names if (w := _word(tp, f"{fqn}.{n}")) is not None and w != "replicate"}
    identity = tuple(n for n, _ in module.named_children() if _word(tp, f"{fqn}.{n}") == IDENTITY_WORD)
    return ExpertsTarget(fqn, module, count, grouped, words if _word(tp, fqn) == TENSOR_WORD else {}, identity)


def _rules(model: nn.Module, attribute: str, given: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """(pattern from the root, word), the given plan first, then those modules carry, outermost first."""
    rules = list((given or {}).items())
    for fqn, module in model.named_modules():
        carried = getattr(module, attribute, None)
        if isinstance(carried, Mapping):
            rules += [(f"{fqn}.{p}" if fqn else p, w) for p, w in carried.items()]
    return rules


def _word(rules: list[tuple[str, str]], fqn: str) -> str | None:
    return next((word for pattern, word in rules if _matches(pattern, fqn)), None)


def _matches(pattern: str, fqn: str) -> bool:
    return len(pattern.split(".")) == len(fqn.split(".")) and all(
        p in ("*", f) for p, f in zip(pattern.split("."), fqn.split("."), strict=True)
    )


def old_style(model: nn.Module) -> Iterator[str]:
    """Names of lists of experts that are modules by themselves, which cannot be dispatched to."""
    for fqn, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and re.search(r"(^|\.)(local_)?experts$", fqn):
            yield fqn
