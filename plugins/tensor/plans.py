"""Where plans come from, and which module each entry names.

It is: the collection of rules (given to the plugin, `tp_plan` attributes, plans that Hugging Face models carry,
the table of known models, input embeddings), their resolution to FQNs, and the completion over tied weights.
It is not: what a style means (`styles.py`) or how it is carried out (`plugin.py`).

Patterns are FQNs relative to the module that carries the plan; `*` stands for one path component. When several
rules name one module, the first of this order decides: the plugin's own plan, then `tp_plan` attributes of the user's
modules from the outermost inwards, then the table of known models, then the plans of Hugging Face models, then what
follows from the rest: the input embedding of a Hugging Face model (cut over the vocabulary even where its plan does not
say so, as Megatron-LM does), and activations with parameters of their own between a column and a row layer.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from parallax.plugins.tensor.attributes import CONFIG, read_size
from parallax.plugins.tensor.known import KNOWN_PLANS, LM_HEAD
from parallax.plugins.tensor.lora import expand
from parallax.plugins.tensor.shards import is_embedding, is_linear
from parallax.plugins.tensor.styles import Kind, is_expert_word, parse_style
from parallax.plugins.tensor.target import Target

HOW_TO = (
    "give it one: a `tp_plan` attribute on the module or ParallaxStrategy(tp_plan={...}), e.g. "
    'self.tp_plan = {"layers.*.attn.q": "colwise", "layers.*.attn.out": "rowwise"}, or use tensor_parallel_size=1'
)


@dataclass(frozen=True)
class Rule:
    """One entry of a plan.

    Attributes:
        pattern: FQN from the root, with `*` for one component.
        style: its word.
        source: who says so, for messages.
        strict: whether naming nothing is a mistake. Plans that models carry name parts of variants they are not.
    """

    pattern: str
    style: str
    source: str
    strict: bool

    def names(self, fqn: str) -> bool:
        return _matcher(self.pattern).fullmatch(fqn) is not None


@cache
def _matcher(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\.".join(r"[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))


def hf_type() -> type[nn.Module] | None:
    """transformers' `PreTrainedModel` if transformers is in use, else None (it is never imported here)."""
    found: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return found if isinstance(found, type) else None


def hf_models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(FQN, module) of the outermost Hugging Face models inside `model`."""
    base, found = hf_type(), list[str]()
    for fqn, module in model.named_modules():
        inside = any(not outer or fqn.startswith(f"{outer}.") for outer in found)
        if base is not None and isinstance(module, base) and not inside:
            found.append(fqn)
            yield fqn, module


def own_attribute(module: nn.Module, name: str) -> Any:
    """`module.name` unless it is only lent by a module inside, as PEFT's wrappers do; else None."""
    return getattr(module, name, None) if name in vars(module) or hasattr(type(module), name) else None


def is_foreign(module: nn.Module) -> bool:
    """Whether the module lives on another pipeline stage and is only a stub here."""
    return bool(getattr(module, "is_foreign", False))


def collect_rules(model: nn.Module, plan: Mapping[str, str] | None = None) -> list[Rule]:
    """All rules for `model`, in order of precedence.

    Raises:
        ValueError: there is no plan at all, or a Hugging Face model has none for its layers.
    """
    rules = [Rule(p, s, "the tp_plan given to the strategy", True) for p, s in (plan or {}).items()]
    carried_by_hf: list[Rule] = []
    base = hf_type()
    for fqn, module in model.named_modules():
        carried = own_attribute(module, "tp_plan")
        if carried is None:
            continue
        owner = f"the tp_plan of {type(module).__name__}"
        if not isinstance(carried, Mapping) or not all(isinstance(w, str) for w in carried.values()):
            raise ValueError(f"{owner} must be a dict of FQN pattern -> style word, got {carried!r}")
        strict = base is None or not isinstance(module, base)
        found = [Rule(_join(fqn, p), s, owner, strict) for p, s in carried.items()]
        (rules if strict else carried_by_hf).extend(found)
    rules += known_rules(model)
    rules += carried_by_hf
    for fqn, module in hf_models(model):
        rules += _embedding_rules(model, module)
        if not any(_cuts_layers(rule) and (rule.strict or _below(fqn, rule.pattern)) for rule in rules):
            raise ValueError(
                f"{_describe(module)} has no tensor-parallel plan for its layers and is no known type; {HOW_TO}"
            )
    if not rules:
        raise ValueError(f"{type(model).__name__} has no tensor-parallel plan and is no known type; {HOW_TO}")
    return rules


def known_rules(model: nn.Module) -> list[Rule]:
    """Those of the table of known models."""
    return [rule for fqn, module in hf_models(model) for rule in _known_rules(fqn, module)]


def _known_rules(fqn: str, module: nn.Module) -> list[Rule]:
    config: Any = getattr(module, "config", None)
    make = KNOWN_PLANS.get(str(getattr(config, "model_type", None)))
    plan = make(config) if make is not None else {}
    prefix = str(getattr(module, "base_model_prefix", ""))
    base = _join(fqn, prefix) if prefix and hasattr(module, prefix) else fqn
    source = f"the known plan of {type(module).__name__}"
    rules = [Rule(_join(base, p), s, source, False) for p, s in plan.items()]
    return rules + [Rule(_join(fqn, p), s, source, False) for p, s in LM_HEAD.items() if plan]


def _embedding_rules(model: nn.Module, module: nn.Module) -> list[Rule]:
    get: Any = getattr(module, "get_input_embeddings", None)
    try:
        embedding = get() if get is not None else None
    except (NotImplementedError, AttributeError):
        return []  # models without token ids
    if not is_embedding(type(embedding)):
        return []
    fqn = next((name for name, m in model.named_modules() if m is embedding), None)
    return [] if fqn is None else [Rule(fqn, "embedding_rowwise", "the input embedding", False)]


def vocabularies(targets: Iterable[Target]) -> set[int]:
    """Sizes of the vocabularies that the targets' embeddings look up."""
    embeddings = [t.module for t in targets if t.style.kind is Kind.EMBEDDING]
    return {int(getattr(module, "num_embeddings", 0)) for module in embeddings}


def vocabulary_heads(model: nn.Module, targets: Iterable[Target], known: set[int]) -> set[int]:
    """Ids of the modules whose gathered output is logits.

    Those are the output embedding of a Hugging Face model, and layers as wide as a vocabulary (`known`, or that of an
    embedding among the targets).
    """
    targets = list(targets)
    widths = known | vocabularies(targets)
    outputs = {id(m) for _, hf in hf_models(model) if (m := _output_embedding(hf)) is not None}
    gathered = [t.module for t in targets if t.style.kind is Kind.COLUMN and t.style.whole_outside]
    return {id(m) for m in gathered if id(m) in outputs or getattr(m, "out_features", None) in widths}


def _output_embedding(module: nn.Module) -> Any:
    get: Any = getattr(module, "get_output_embeddings", None)
    try:
        return get() if get is not None else None
    except (NotImplementedError, AttributeError):
        return None


def _cuts_layers(rule: Rule) -> bool:
    """Whether the rule is about more than the embedding and the head."""
    return "*" in rule.pattern or rule.strict


def _describe(module: nn.Module) -> str:
    return f"{type(module).__name__} (model_type {getattr(getattr(module, 'config', None), 'model_type', None)!r})"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _below(prefix: str, pattern: str) -> bool:
    return not prefix or pattern.startswith(f"{prefix}.")


def resolve(model: nn.Module, rules: list[Rule], *, complete: bool) -> dict[str, Target]:
    """FQN -> target for every module of `model` that a rule names, tied weights included.

    Args:
        complete: whether `model` is whole. Once a pipeline has cut it, rules may name nothing here.

    Raises:
        ValueError: a word that is not implemented, or a strict rule that names nothing.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    experts = {fqn for rule in rules if is_expert_word(rule.style) for fqn in modules if rule.names(fqn)}
    targets: dict[str, Target] = {}
    named = set[str]()
    for rule in rules:
        if is_expert_word(rule.style):  # the expert plugin's work
            continue
        hits = list(_hits(rule, modules))
        if not hits and rule.strict and complete:
            raise ValueError(f"{rule.source} names {rule.pattern!r}, which matches nothing in {type(model).__name__}")
        style = parse_style(rule.style, rule.pattern) if hits else None
        for fqn, part in hits:
            name = _join(fqn, part) if part else fqn
            if style is None or name in named or is_foreign(modules[fqn]) or (part and fqn in experts):
                continue
            named.add(name)
            targets.update((t.fqn, t) for t in expand(Target(name, modules[fqn], style, part)))
    _follow_ties(modules, targets)
    _follow_activations(modules, targets)
    return targets


def _hits(rule: Rule, modules: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """(FQN of a module, name of the part of it that the rule is about) for everything the rule names."""
    if rule.style == "local_size":
        path = ".".join(rule.pattern.split(".")[-2 if f".{CONFIG}" in f".{rule.pattern}" else -1 :])
        for fqn, module in modules.items():
            if rule.names(_join(fqn, path)) and (is_foreign(module) or read_size(module, path) is not None):
                yield fqn, path
    elif rule.style == "local_heads":
        argument = rule.pattern.rpartition(".")[2]
        for fqn, module in modules.items():
            if rule.names(_join(fqn, argument)) and (is_foreign(module) or _takes(module, argument)):
                yield fqn, argument
    else:
        for fqn, module in modules.items():
            if fqn and rule.names(fqn):
                yield fqn, ""
            yield from ((fqn, name) for name in module._parameters if rule.names(_join(fqn, name)))


def _takes(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(type(module).forward).parameters


def _follow_activations(modules: dict[str, nn.Module], targets: dict[str, Target]) -> None:
    """Activations with parameters (PReLU, xIELU) between a column and a row layer of one parent see a part only."""
    regions: dict[str, set[Kind]] = {}
    for target in targets.values():
        if target.style.kind in (Kind.COLUMN, Kind.ROW) and not target.style.whole_outside and not target.part:
            regions.setdefault(target.block, set()).add(target.style.kind)
    for fqn, module in modules.items():
        inside = regions.get(fqn.rpartition(".")[0], set()) == {Kind.COLUMN, Kind.ROW}
        known = type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation")
        if inside and known and fqn not in targets and module._parameters:
            targets[fqn] = Target(fqn, module, parse_style("replicated_with_grad_allreduce", fqn))


def _follow_ties(modules: dict[str, nn.Module], targets: dict[str, Target]) -> None:
    """Give every other owner of a vocabulary-cut weight the matching style: embedding <-> head."""
    cut = [t for t in targets.values() if t.style.pads and t.style.kind is not Kind.EMBEDDING_WIDTH and not t.part]
    tied = {id(weight): t for t in cut if (weight := _weight(t.module)) is not None}
    for fqn, module in modules.items():
        first = tied.get(id(_weight(module)))
        if first is None or fqn in targets or module is first.module:
            continue
        if is_embedding(type(module)):
            targets[fqn] = Target(fqn, module, parse_style("embedding_rowwise", fqn))
        elif is_linear(type(module)):
            targets[fqn] = Target(fqn, module, parse_style("colwise_gather_output", fqn))


def _weight(module: nn.Module) -> nn.Parameter | None:
    return module._parameters.get("weight")
