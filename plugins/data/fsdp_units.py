"""Which modules FSDP gathers and lets go of as one: the layers of the model, and the root for everything else.

It is: the reading of what models say about their blocks. It is not: the sharding (`fsdp_shards.py`).
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from parallax.plugins.pipeline.plans import find_structure


def find_units(model: nn.Module) -> list[nn.Module]:
    """The blocks of `model`, in its order, none inside another.

    They are, whichever is found first: modules of the classes in `_no_split_modules` (Hugging Face), the layers of a
    `pp_plan`, the entries of ModuleLists. A block that shares a parameter with something outside it is left to the
    root, as are blocks without parameters (those of other pipeline stages).
    """
    classes = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    if classes:
        found = [m for m in model.modules() if type(m).__name__ in classes]
    else:
        found = [layer for stack in _stacks(model) for layer in stack.children()]
    outer: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in dict.fromkeys(found):
        if module not in inside and any(True for _ in module.parameters()):
            outer.append(module)
            inside.update(module.modules())
    return _unshared(model, outer)


def _stacks(model: nn.Module) -> list[nn.Module]:
    try:
        return [model.get_submodule(find_structure(model).layers)]
    except ValueError:  # no plan: only the pipeline needs one
        return [m for m in model.modules() if isinstance(m, nn.ModuleList)]


def _unshared(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Those units all of whose parameters are used in them alone."""
    everywhere = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    alone = []
    for unit in units:
        here = Counter(id(p) for m in unit.modules() for p in m.parameters(recurse=False))
        if all(everywhere[p] == count for p, count in here.items()):
            alone.append(unit)
    counted = Counter(m for unit in alone for m in unit.modules())
    return [unit for unit in alone if all(counted[m] == 1 for m in unit.modules())]
