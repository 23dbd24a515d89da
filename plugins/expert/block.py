"""What else is in a mixture-of-experts block: the router, and a shared expert.

It is: the search for both among the children of a block, by their form and name. It is not: what is done with them
(`router.py`, `beside.py`, `plugins/tensor/sequence_plan.py`).
"""

from __future__ import annotations

import inspect
import re

from torch import nn

_SHARED = re.compile(r"shared_(experts?|mlp)")


def is_shared(name: str) -> bool:
    """Whether a child of a block, by its name, is its shared expert."""
    return _SHARED.fullmatch(name) is not None


def find_shared(block: nn.Module, experts: str) -> nn.Module | None:
    """The shared expert that the code of `block` calls after its module named `experts`, if there is one.

    Which comes first is read off the names in the compiled forward, which stand in the order of their first use.
    """
    code = getattr(inspect.unwrap(type(block).forward), "__code__", None)
    names = list(code.co_names) if code is not None else []
    if experts not in names:
        return None
    for name, child in block.named_children():
        if is_shared(name) and name in names and names.index(name) > names.index(experts):
            return child
    return None


def find_router(block: nn.Module, experts: str, num_experts: int) -> nn.Module | None:
    """The child of `block` that scores the experts of its child `experts`: the one with a matrix of a row for each."""
    found = [
        child
        for name, child in block.named_children()
        if name != experts and not is_shared(name)
        if any(p.dim() == 2 and p.shape[0] == num_experts for p in child.parameters())
    ]
    return found[0] if len(found) == 1 else None
