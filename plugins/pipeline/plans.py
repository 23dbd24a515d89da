"""Finds where a model can be cut: its list of layers, and what runs before and after them.

It is: the reading of `pp_plan` (Hugging Face's and a plain module's, in the same words) into a `Structure`.
It is not: the cut itself (`plugin.py`).

A `pp_plan` maps module names to their inputs and outputs, e.g. `{"embed_tokens": (["input_ids"], ["inputs_embeds"]),
"layers": (["hidden_states"], ["hidden_states"]), "norm": ...}`. The entry that is a ModuleList or Sequential is the
layer list, entries before it run before the layers, entries after it run after. Modules the plan does not name run
before or after by their place in the module tree. When an output of an entry before the layers is an input of the
layers other than their first, it is sent along the pipeline: an encoder's `encoder_hidden_states`, say.
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
        direct: FQNs of parameters owned by the containers around the layer list; every stage has them.
        carried: FQNs of modules before the layers whose outputs layers of any stage take.
    """

    layers: str
    num_layers: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    direct: tuple[str, ...]
    carried: tuple[str, ...] = ()


Plan = Mapping[str, Any]
"""FQN -> (names of inputs, names of outputs), or None where only the place in the order is known."""


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def find_structure(model: nn.Module, plan: Mapping[str, Any] | None = None) -> Structure:
    """The structure of `model`, from `plan` (names relative to `model`) or from the plan the model carries.

    Raises:
        ValueError: no plan and no known type; a plan that names no layer list, or several.
    """
    entries = _expand(model, plan, "") if plan is not None else _own_plan(model)
    named = list(entries)
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
    also = set(_names(entries[layers], 0)[1:])
    carried = [name for name in named[: named.index(layers)] if also & set(_names(entries[name], 1))]
    return Structure(layers, len(layer_list), tuple(before), tuple(after), tuple(direct), tuple(carried))


def _names(entry: Any, which: int) -> list[str]:
    """Inputs (0) or outputs (1) of a plan's entry, as far as it says."""
    return list(entry[which]) if isinstance(entry, (tuple, list)) and len(entry) == 2 else []


def _owns_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.named_parameters(recurse=False))


def _expand(model: nn.Module, plan: Plan, prefix: str) -> Plan:
    modules = dict(model.named_modules(remove_duplicate=False))
    entries = {join(prefix, name): entry for name, entry in plan.items()}
    unknown = [name for name in entries if name not in modules]
    if unknown:
        near = nearest_name(unknown[0], filter(None, modules))
        guess = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"pp_plan names {unknown}, which {type(model).__name__} does not have{guess}")
    return entries


def _own_plan(model: nn.Module) -> Plan:
    """The plan found on the model itself, outermost first."""
    for fqn, module in model.named_modules():
        if hasattr(module, "config") and _has(module, "base_model_prefix"):
            return _hugging_face(model, fqn, module)  # its own `pp_plan` property lists the head first
        plan = module.pp_plan if _has(module, "pp_plan") else None
        if isinstance(plan, Mapping) and plan:
            return _expand(model, plan, fqn)
    raise ValueError(
        f"{type(model).__name__} has no pp_plan and is not a Hugging Face model, so the pipeline cannot tell which "
        f"modules are its layers. Give it one, for example: pp_plan = {{'embed': (['ids'], ['x']), "
        f"'layers': (['x'], ['x']), 'head': (['x'], ['logits'])}}, or use pipeline_parallel_size=1"
    )


def _has(module: nn.Module, name: str) -> bool:
    """Whether `module` itself has it: a wrapper of adapters (peft) answers for the model inside it, too."""
    return name in vars(module) or hasattr(type(module), name)


def _hugging_face(model: nn.Module, fqn: str, hf: Any) -> Plan:
    base = hf.base_model
    base_fqn = next(join(fqn, name) for name, module in hf.named_modules() if module is base)
    plan = getattr(hf.config, "base_model_pp_plan", None)
    if plan:
        present = {k: v for k, v in plan.items() if any(n == k for n, _ in base.named_modules())}
        return _expand(model, present, base_fqn)
    if getattr(hf.config, "is_encoder_decoder", False):
        return _encoder_decoder(hf, base, base_fqn)
    # Families without a plan (GPT-2, ...): the one list as long as the config says the model is deep.
    depth = getattr(hf.config, "num_hidden_layers", None)
    lists = [n for n, m in base.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(lists) != 1:
        raise ValueError(
            f"{type(hf).__name__} carries no pp_plan, and {len(lists)} of its ModuleLists have "
            f"num_hidden_layers={depth} entries ({lists}); pass pp_plan to name the layers"
        )
    return {join(base_fqn, lists[0]): None}


def _encoder_decoder(hf: Any, base: Any, base_fqn: str) -> Plan:
    """The decoder's layers are cut; the encoder runs before them, and what it returns goes to all of them."""
    names = {id(module): name for name, module in base.named_modules()}
    encoder, decoder = names.get(id(hf.get_encoder())), names.get(id(hf.get_decoder()))
    stacks = [] if decoder is None else [n for n, m in base.get_submodule(decoder).named_children() if _is_stack(m)]
    if encoder is None or decoder is None or len(stacks) != 1:
        raise ValueError(
            f"{type(hf).__name__} is an encoder-decoder without a pp_plan whose decoder has {len(stacks)} lists of "
            f"layers ({stacks}); pass pp_plan, for example {{'encoder': (['input_ids'], ['encoder_hidden_states']), "
            f"'decoder.layers': (['hidden_states', 'encoder_hidden_states'], ['hidden_states'])}}"
        )
    # BART and its kin register the norm of the embeddings after the layers.
    early = [join(decoder, n) for n, _ in base.get_submodule(decoder).named_children() if "embed" in n]
    return {
        join(base_fqn, encoder): (["input_ids"], ["encoder_hidden_states"]),
        **{join(base_fqn, name): None for name in early},
        join(base_fqn, f"{decoder}.{stacks[0]}"): (["hidden_states", "encoder_hidden_states"], ["hidden_states"]),
    }


def _is_stack(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) > 0
