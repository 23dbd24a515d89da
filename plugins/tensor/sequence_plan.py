"""Where a model's residual stream can be cut into sequence shards, found from its plan and its module tree.

It is: `find_trunk`, which says what each module of the layers is, or why the model cannot be cut so. It is not: the
change of the model (`sequence.py`).

The *trunk* is the list of layers. Between its entry and its exit the residual stream is a shard; what is in a layer is
one of

- a *block*: a child module (attention, MLP) with column and row layers: its input is gathered, its output scattered;
- *direct* column and row layers of a layer that is an MLP written out: gathered and scattered by themselves;
- *dispatching*: a mixture-of-experts block whose experts fold over tp: it routes and sends this rank's tokens, and a
  shared expert in it is a block;
- *token-wise*: norms, dropouts and activations, which work on a shard as on the whole;
- *opaque*: any other module: it gets the whole sequence, and every rank repeats what tensor parallelism does not cut.

A module that mixes tokens in a way nobody declared is opaque, never token-wise, so it costs more and stays right.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from parallax.plugins.expert.block import find_router
from parallax.plugins.expert.plans import ExpertsTarget
from parallax.plugins.tensor.styles import Kind
from parallax.plugins.tensor.target import Target

_TOKEN_WISE_NORM = re.compile(r"(rms|layer)_?norm", re.IGNORECASE)
_PARTIAL = {
    Kind.COLUMN, Kind.ROW, Kind.ENTERING, Kind.SUM_GRAD, Kind.WIDE_NORM, Kind.PER_HEAD, Kind.WHOLE, Kind.LOCAL_SIZE,
    Kind.LOCAL_HEADS,
}  # fmt: skip
"""Kinds under which gradients between the gathered input and the scattered output may be partial."""
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


@dataclass
class Trunk:
    """What runs on sequence shards, and where shards become whole.

    Attributes:
        layers: FQN of the list of layers; `depth` is its length.
        blocks, opaque: FQNs of the modules whose input is gathered.
        experts: FQNs of the experts modules that are called with shards, and send them to where experts are.
        direct: FQNs of the column and row layers that gather and scatter by themselves.
        exit: FQN of the last norm, which still runs on shards; None when the last layer's output is gathered.
    """

    layers: str
    depth: int
    blocks: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    direct: list[str] = field(default_factory=list)
    exit: str | None = None

    @property
    def owner(self) -> str:
        return self.layers.rpartition(".")[0]

    def is_region(self, fqn: str) -> bool:
        """Whether column or row layer `fqn` works on gathered tokens of a shard."""
        return fqn in self.direct or any(fqn.startswith(f"{block}.") for block in self.blocks)

    @property
    def end(self) -> str:
        """FQN of the module whose output is gathered."""
        return self.exit or f"{self.layers}.{self.depth - 1}"

    def contains(self, fqn: str) -> bool:
        return fqn.startswith(f"{self.layers}.")

    def is_sharded(self, fqn: str) -> bool:
        """Whether parameter `fqn`, if uncut, sees only a part of the tokens or heads on a rank, and counts on all."""
        if any(fqn.startswith(f"{name}.") for name in (*self.opaque, *self.experts)):
            return False
        return self.contains(fqn) or (self.exit is not None and fqn.startswith(f"{self.exit}."))


def find_trunk(
    model: nn.Module, targets: Mapping[str, Target], experts: Iterable[ExpertsTarget] = (), *, folded: bool = False
) -> Trunk | str:
    """The trunk of a whole model, or the reason why it has none; `folded`: whether `experts` fold over all the axis."""
    modules = dict(model.named_modules())
    cut = {fqn: t for fqn, t in targets.items() if t.style.kind in (Kind.COLUMN, Kind.ROW) and not t.part}
    lists = {name for fqn in cut if (name := _list_around(modules, fqn)) is not None}
    if len(lists) != 1:
        found = f"several lists of layers ({', '.join(sorted(lists))})" if lists else "no list of layers"
        return f"its plan cuts {found}, and one is needed, whose layers follow each other"
    trunk = Trunk(name := lists.pop(), len(modules[name]))
    config = getattr(modules[trunk.owner] if trunk.owner else model, "config", None)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "its layers attend to a second sequence"
    mixtures = {e.fqn.rpartition(".")[0]: e if folded else None for e in experts}
    for i, layer in modules[trunk.layers].named_children():
        reason = _sort_children(trunk, f"{trunk.layers}.{i}", layer, targets, mixtures)
        if reason is not None:
            return reason
    if not (trunk.direct or any(block.rpartition(".")[0] not in mixtures for block in trunk.blocks)):
        return "its plan cuts no attention or MLP from column to row"
    trunk.exit = _last_norm(model, trunk, modules)
    return _shared_outside(model, trunk) or trunk


def _list_around(modules: Mapping[str, nn.Module], fqn: str) -> str | None:
    parts = fqn.split(".")
    prefixes = (".".join(parts[:n]) for n in range(1, len(parts)))
    return next((p for p in prefixes if isinstance(modules.get(p), (nn.ModuleList, nn.Sequential))), None)


def _sort_children(
    trunk: Trunk,
    fqn: str,
    layer: nn.Module,
    targets: Mapping[str, Target],
    mixtures: Mapping[str, ExpertsTarget | None],
) -> str | None:
    """`mixtures`: FQN of a block with experts -> these, if they fold over the axis."""
    direct: list[Target] = []
    for name, child in _called_children(fqn, layer):
        below = [t for f, t in targets.items() if f.startswith(f"{name}.") and t.style.kind in (Kind.COLUMN, Kind.ROW)]
        target = targets.get(name)
        if target is not None and target.style.kind in (Kind.COLUMN, Kind.ROW):
            direct.append(target)
        elif below and _is_region(name, child, targets):
            trunk.blocks.append(name)
        elif isinstance(child, nn.Linear):
            return f"{name} is a linear of the layer itself, and what the layer does with it cannot be seen"
        elif (experts := mixtures.get(name)) and (shared := _dense_parts(name, child, experts, targets)) is not None:
            trunk.experts.append(experts.fqn)
            trunk.blocks += shared
        elif below or name in mixtures or not is_token_wise(child):
            trunk.opaque.append(name)
    if direct:
        whole = any(t.style.whole_outside or len(t.style.blocks) > 1 for t in direct)
        if whole or [t.style.kind for t in direct] != [Kind.COLUMN, Kind.ROW]:
            names = ", ".join(t.fqn.rpartition(".")[2] for t in direct)
            return (
                f"{fqn} ({type(layer).__name__}) holds {names} itself, so the attention in it would read a shard's "
                "length; put attention and MLP into modules of their own"
            )
        trunk.direct += [t.fqn for t in direct]
    return None


def _called_children(fqn: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children, and in place of containers, which are not called, what they contain."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_children(f"{fqn}.{name}", child)
        else:
            yield f"{fqn}.{name}", child


def is_token_wise(module: nn.Module) -> bool:
    """Whether `module` is known to work on each token by itself. A module says so with `token_wise = True`."""
    if getattr(module, "token_wise", False):
        return True
    if next(module.children(), None) is not None or isinstance(module, nn.MultiheadAttention):
        return False
    kind = type(module)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or _TOKEN_WISE_NORM.search(kind.__name__):
        return True
    return isinstance(module, (nn.Dropout, nn.Identity)) or kind.__module__ in _ACTIVATIONS


def _is_region(fqn: str, block: nn.Module, targets: Mapping[str, Target]) -> bool:
    """Whether everything in `block` between its column and row layers may have partial gradients."""
    inside = {f: t for f, t in targets.items() if f.startswith(f"{fqn}.")}
    kinds = {t.style.kind for t in inside.values()}
    if not {Kind.COLUMN, Kind.ROW} <= kinds <= _PARTIAL or any(t.style.whole_outside for t in inside.values()):
        return False
    planned = {id(t.module) for t in inside.values() if not t.part}
    others = (m for m in block.modules() if m is not block and id(m) not in planned and _owns_parameters(m))
    return all(is_token_wise(m) for m in others)


def _dense_parts(
    fqn: str, block: nn.Module, experts: ExpertsTarget, targets: Mapping[str, Target]
) -> list[str] | None:
    """FQNs of the blocks in a mixture-of-experts block that routes each token by itself; None when it may not.

    Its code must be transformers', or say `token_wise = True`; it is called with hidden states alone, and beside
    experts and router nothing is in it but blocks (shared experts) and what is token-wise.
    """
    trusted = type(block).__module__.startswith("transformers.") or getattr(block, "token_wise", False)
    named = [p for p in inspect.signature(block.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    router = find_router(block, experts.fqn.rpartition(".")[2], experts.num_experts)
    if not trusted or len(named) != 1 or router is None or experts.identity:
        return None
    blocks = []
    for name, child in block.named_children():
        if _is_region(f"{fqn}.{name}", child, targets):
            blocks.append(f"{fqn}.{name}")
        elif child not in (experts.module, router) and not is_token_wise(child) and type(child) is not nn.Linear:
            return None
    planned = {f for f, t in targets.items() if f.startswith(f"{fqn}.") and t.style.kind is not Kind.WHOLE}
    return blocks if all(any(f.startswith(f"{b}.") for b in blocks) for f in planned) else None


def _owns_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


def _last_norm(model: nn.Module, trunk: Trunk, modules: Mapping[str, nn.Module]) -> str | None:
    """The norm beside the layers that comes right after them by the model's pipeline plan.

    In a Hugging Face model that has none, by the order in which its parts are registered.
    """
    owner = modules[trunk.owner] if trunk.owner else model
    config = getattr(owner, "config", None)
    plan: Any = getattr(config, "base_model_pp_plan", None) or getattr(owner, "pp_plan", None)
    names = list(plan) if isinstance(plan, Mapping) else []
    if not names and config is not None:
        names = [name for name, _ in owner.named_children()]
    at = trunk.layers.rpartition(".")[2]
    after = names[names.index(at) + 1 :] if at in names else []
    first: Any = getattr(owner, after[0], None) if after else None
    if not isinstance(first, nn.Module) or not is_token_wise(first) or not _owns_parameters(first):
        return None
    return f"{trunk.owner}.{after[0]}".lstrip(".")


def _shared_outside(model: nn.Module, trunk: Trunk) -> str | None:
    """A parameter that sees a part of the tokens in one place and all of them in another."""
    seen: dict[int, tuple[str, bool]] = {}
    for fqn, param in model.named_parameters(remove_duplicate=False):
        first, sharded = seen.setdefault(id(param), (fqn, trunk.is_sharded(fqn)))
        if sharded != trunk.is_sharded(fqn):
            return f"{first} and {fqn} are one parameter, used inside and outside the layers"
    return None
