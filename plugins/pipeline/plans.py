"""Finds where a model can be cut: its list of layers, and what runs before and after them.

It is: the reading of `pp_plan` (Hugging Face's and a plain module's, in the same words) into a `Structure`.
It is not: the cut itself (`plugin.py`).

A `pp_plan` maps module names to their inputs and outputs, e.g. `{"embed_tokens": (["input_ids"], ["inputs_embeds"]),
"layers": (["hidden_states"], ["hidden_states"]), "norm": ...}`. Only names and order are used here: the entry that is
a ModuleList or Sequential is the layer list, entries before it run before the layers, entries after it run after.
Modules the plan does not name run before or after by their place in the module tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallax.strategies.names import nearest_name

LAYER_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Structure:
    """How a model runs, seen by the pipeline.

    Attributes:
        layers: FQN of the layer list.
        num_layers: its length.
        before, after: FQNs of the modules that own parameters and run before or after the layers.
        direct: FQNs of parameters owned by the containers around the layer list; they train on the first stage.
    """

    layers: str
    num_layers: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    direct: tuple[str, ...]


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def find_structure(model: nn.Module, plan: Mapping[str, Any] | None = None) -> Structure:
    """The structure of `model`, from `plan` (names relative to `model`) or from the plan the model carries.

    Raises:
        ValueError: no plan and no known type; a plan that names no layer list, or several.
    """
    named = _expand(model, plan, "") if plan is not None else _carried(model)
    modules = dict(model.named_modules())
    lists = [name for name in named if isinstance(modules[name], LAYER_LISTS)]
    if len(lists) != 1:
        raise ValueError(
            f"pp_plan must name exactly one ModuleList or Sequential of layers; "
            f"{type(model).__name__} has {lists or 'none'} among {list(named)}"
        )
    layers = lists[0]
    order = list(modules)
    at = order.index(layers)
    listed = {name: named.index(name) < named.index(layers) for name in named}
    before: list[str] = []
    after: list[str] = []
    for i, (name, module) in enumerate(modules.items()):
        if name == layers or name.startswith(layers + ".") or not _owns_parameters(module):
            continue
        if layers.startswith(name + ".") or name == "":
            continue  # a container of the layer list: its own parameters are `direct`
        above = next((p for p in listed if name == p or name.startswith(p + ".")), None)
        first = listed[above] if above is not None else i < at
        (before if first else after).append(name)
    containers = [name for name in modules if name == "" or layers.startswith(name + ".")]
    direct = [join(c, p) for c in containers for p, _ in modules[c].named_parameters(recurse=False)]
    layer_list: Any = modules[layers]
    return Structure(layers, len(layer_list), tuple(before), tuple(after), tuple(direct))


def _owns_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.named_parameters(recurse=False))


def _expand(model: nn.Module, plan: Mapping[str, Any], prefix: str) -> list[str]:
    modules = dict(model.named_modules())
    names = [join(prefix, name) for name in plan]
    unknown = [name for name in names if name not in modules]
    if unknown:
        near = nearest_name(unknown[0], filter(None, modules))
        guess = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"pp_plan names {unknown}, which {type(model).__name__} does not have{guess}")
    return names


def _carried(model: nn.Module) -> list[str]:
    """Module names of the plan found on the model itself, outermost first."""
    for fqn, module in model.named_modules():
        if hasattr(module, "config") and hasattr(module, "base_model_prefix"):
            return _hugging_face(model, fqn, module)  # its own `pp_plan` property lists the head first
        plan = getattr(module, "pp_plan", None)
        if isinstance(plan, Mapping) and plan:
            return _expand(model, plan, fqn)
    raise ValueError(
        f"{type(model).__name__} has no pp_plan and is not a Hugging Face model, so the pipeline cannot tell which "
        f"modules are its layers. Give it one, for example: pp_plan = {{'embed': (['ids'], ['x']), "
        f"'layers': (['x'], ['x']), 'head': (['x'], ['logits'])}}, or use pipeline_parallel_size=1"
    )


def _hugging_face(model: nn.Module, fqn: str, hf: Any) -> list[str]:
    base = hf.base_model
    base_fqn = next(join(fqn, name) for name, module in hf.named_modules() if module is base)
    plan = getattr(hf.config, "base_model_pp_plan", None)
    if plan:
        present = {k: v for k, v in plan.items() if any(n == k for n, _ in base.named_modules())}
        return _expand(model, present, base_fqn)
    # Families without a plan (GPT-2, ...): the one list as long as the config says the model is deep.
    depth = getattr(hf.config, "num_hidden_layers", None)
    lists = [n for n, m in base.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(lists) != 1:
        raise ValueError(
            f"{type(hf).__name__} carries no pp_plan, and {len(lists)} of its ModuleLists have "
            f"num_hidden_layers={depth} entries ({lists}); pass pp_plan to name the layers"
        )
    return [join(base_fqn, lists[0])]
