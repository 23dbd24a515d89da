"""The tensor-parallel plugin: a model's linears and embeddings cut over the axis "tp", in place.

It is: the contract of `plugins/base.py` carried out for one model. Plans come from `plans.py`, cuts from
`shards.py`, layers from `layers.py`. It is not: sequence parallelism, and it leaves norms and other replicated
parameters alone: their inputs are the same on every rank, so their gradients are too, which `agreement.py`
checks once.

Random numbers: activations outside the cut regions must be the same on all ranks of the axis, so ranks of one
"tp" group need the same random state where dropout is used.

What is sent per micro-batch, for a model of L layers, activations of b x s x h elements and a vocabulary padded
to V: forward 2L + 1 all-reduces of b s h (attention, MLP, embedding) and one all-gather of b s V (logits);
backward 2L + 1 all-reduces of b s h (attention, MLP, head).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from parallax.plugins.base import ParallelPlugin, ParamShard
from parallax.plugins.tensor.agreement import require_agreement
from parallax.plugins.tensor.attributes import cut_argument, read_size, write_size
from parallax.plugins.tensor.checks import conditions, refuse_unfit, require_divisible
from parallax.plugins.tensor.functions import SharedInput
from parallax.plugins.tensor.gradients import GradientSums
from parallax.plugins.tensor.heads import head_count, regroup, rotary_width, with_copies
from parallax.plugins.tensor.layers import (
    become_column,
    become_mla_keys,
    become_row,
    become_vocab_parallel,
    become_width_parallel,
    sum_output,
)
from parallax.plugins.tensor.logits import whole
from parallax.plugins.tensor.plans import Target, collect_rules, resolve, vocabularies, vocabulary_heads
from parallax.plugins.tensor.shards import module_shards, parameter_shard, vocabulary
from parallax.plugins.tensor.styles import CUTTING, Kind
from parallax.strategies.comm import AxisComm
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.tree import map_tensors

_NUMBERS = (Kind.LOCAL_SIZE, Kind.LOCAL_HEADS)
"""Kinds that need no parameters."""


class TensorParallel(ParallelPlugin):
    """Cuts matrices over "tp" by the words of a plan (see `plans.py` for where plans are looked for).

    Args:
        plan: FQN pattern (relative to the model, `*` for one component) -> style word. Goes before plans the
            model carries.
    """

    name = "tensor"
    axis = "tp"

    def __init__(self, plan: Mapping[str, str] | None = None) -> None:
        self._plan = dict(plan or {})
        self._shards: dict[str, ParamShard] = {}
        self._sums = GradientSums()
        self._agreed = False
        self._vocabularies: set[int] = set()
        self._report: dict[str, str] = {}

    def check(self, layout: Layout, model: nn.Module) -> None:
        """Refuse a model without a plan, an entry that names nothing or cannot be cut, and uneven cuts.

        Raises:
            ValueError: which number, layer or word, and what would do.
        """
        size = layout.tensor_parallel_size
        if size == 1:
            return
        targets = resolve(model, collect_rules(model, self._plan), complete=True)
        for target in targets.values():
            refuse_unfit(model, target)
        require_divisible(conditions(model, targets.values()), size)
        shard_parameters(model, with_copies(model, targets, size), size, 0)
        self._vocabularies = vocabularies(targets.values())

    def apply(self, model: nn.Module, *, mesh: Mesh, layout: Layout) -> None:
        """Replace what the plan names by this rank's part; FQNs, ties, hooks and `requires_grad` stay."""
        comm = mesh["tp"]
        found = resolve(model, collect_rules(model, self._plan), complete=False)
        targets = {fqn: t for fqn, t in found.items() if t.style.kind in _NUMBERS or _holds_parameters(t)}
        require_divisible(conditions(model, targets.values()), comm.size)
        targets = with_copies(model, targets, comm.size)
        cuts = shard_parameters(model, targets, comm.size, comm.index)
        self._record(model, targets, cuts, mesh)
        _replace_parameters(model, cuts)
        _become(model, targets, comm, vocabulary_heads(model, targets.values(), self._vocabularies))
        self._report = _describe(model, targets, self._shards, comm)

    def _record(
        self, model: nn.Module, targets: Mapping[str, Target], cuts: Mapping[int, ParamShard], mesh: Mesh
    ) -> None:
        comm = mesh["tp"]
        experts = {id(p) for m in model.modules() if getattr(m, "is_experts_share", False) for p in m.parameters()}
        summed = {id(p) for t in targets.values() if t.style.kind is Kind.SUM_GRAD for p in t.module.parameters()}
        self._sums.add(comm, [fqn for fqn, p in model.named_parameters() if id(p) in summed])
        shared = [t for t in targets.values() if t.copies > 1 and t.style.kind is Kind.COLUMN]
        for copies in sorted({t.copies for t in shared}):
            held = {id(p) for t in shared if t.copies == copies for p in t.module.parameters()}
            sharers = comm if copies == comm.size else mesh[f"tp_run{copies}"]
            self._sums.add(sharers, [fqn for fqn, p in model.named_parameters() if id(p) in held])
        for fqn, param in model.named_parameters(remove_duplicate=False):
            if id(param) in experts:  # the expert plugin has cut them, and knows how they sit in the whole
                continue
            whole = ParamShard(tuple(param.shape), owner=comm.is_first)
            self._shards[fqn] = cuts.get(id(param), whole)

    def finalize_grads(self, model: nn.Module, *, mesh: Mesh) -> None:
        """Sum the gradients of `replicated_with_grad_allreduce` parameters and of shared key-value heads.

        The first time, also check that uncut parameters have the same gradient on every rank.

        Raises:
            ValueError: they have not (see `agreement.py`).
        """
        if self._agreed and not self._sums:
            return
        found = {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}
        if not self._agreed:
            whole = {fqn: grad for fqn, grad in found.items() if self._is_whole(fqn) and fqn not in self._sums}
            self._agreed = require_agreement(whole, mesh["tp"])
        self._sums.run(found)

    def _is_whole(self, fqn: str) -> bool:
        shard = self._shards.get(fqn)
        return shard is not None and shard.dim is None

    def param_shard(self, fqn: str) -> ParamShard | None:
        return self._shards.get(fqn)

    def whole_output(self, output: Any) -> Any:
        return map_tensors(whole, output)

    def describe(self) -> dict[str, str]:
        return dict(self._report)


def shard_parameters(model: nn.Module, targets: Mapping[str, Target], size: int, index: int) -> dict[int, ParamShard]:
    """id(parameter) -> rank `index`'s shard, for every parameter the targets cut.

    Raises:
        ValueError: two owners of a tied parameter do not cut it the same way.
    """
    cuts: dict[int, tuple[Target, ParamShard]] = {}
    parts: dict[tuple[int, str], ParamShard] = {}
    for target in targets.values():
        if target.style.kind in CUTTING:
            for name, part in _shards_of(target, size, index).items():
                parts[id(target.module), name] = part
                cuts.setdefault(id(target.module.get_parameter(name)), (target, part))
    for fqn, module in model.named_modules():
        for name, param in module._parameters.items():
            if id(param) in cuts and parts.get((id(module), name)) != cuts[id(param)][1]:
                target, _ = cuts[id(param)]
                mine = targets[fqn].style.word if fqn in targets else "no style"
                raise ValueError(
                    f"{fqn}.{name} is tied to a parameter of {target.fqn}, which style {target.style.word!r} cuts, but "
                    f"{fqn} ({type(module).__name__}) has {mine}, so the two need different parts of it; give both the "
                    "same style ('embedding_rowwise' and 'colwise_gather_output' match), or untie them"
                )
    return {key: part for key, (_, part) in cuts.items()}


def _shards_of(target: Target, size: int, index: int) -> dict[str, ParamShard]:
    if not target.part:
        return module_shards(target.fqn, target.module, target.style, size, index, target.copies)
    part = parameter_shard(target.fqn, target.module.get_parameter(target.part), target.style, size, index)
    return {} if part is None else {target.part: part}


def _holds_parameters(target: Target) -> bool:
    """False for what a pipeline cut has emptied."""
    return next(target.module.parameters(), None) is not None


def _replace_parameters(model: nn.Module, cuts: Mapping[int, ParamShard]) -> None:
    """Put one new local parameter in the place of each cut one, everywhere it is used."""
    new: dict[int, nn.Parameter] = {}
    old: list[nn.Parameter] = []  # keeps ids unique until done
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or id(param) not in cuts:
                continue
            if id(param) not in new:
                local = nn.Parameter(cuts[id(param)].take(param.detach()), requires_grad=param.requires_grad)
                local.__dict__.update(param.__dict__)  # marks that others left on the parameter
                new[id(param)] = local
                old.append(param)
            module._parameters[name] = new[id(param)]


def _become(model: nn.Module, targets: Mapping[str, Target], comm: AxisComm, heads: set[int]) -> None:
    """Change classes and size attributes; column layers of one parent module share the entry of their region."""
    siblings: dict[str, list[Target]] = {}
    done: set[object] = set()
    for target in targets.values():
        key = (id(target.module), target.part)
        if key in done:  # one module under two names
            continue
        done.add(key)
        if target.part:
            _become_part(model, target, comm)
        elif target.style.kind is Kind.COLUMN:
            siblings.setdefault(target.fqn.rpartition(".")[0], []).append(target)
        else:
            _become_layer(model, target, comm)
    for group in siblings.values():
        entry = SharedInput(comm, len(group))
        for member, target in enumerate(group):
            become_column(
                target.module, target.style, entry, member, is_head=id(target.module) in heads, copies=target.copies
            )
    regroup(model, targets)


def _become_part(model: nn.Module, target: Target, comm: AxisComm) -> None:
    """A number or an argument; a parameter by itself is taken by its module's forward as it is."""
    if target.style.kind is Kind.LOCAL_SIZE:
        size = read_size(target.module, target.part)
        assert size is not None
        write_size(target.module, target.part, size * target.copies // comm.size)
    elif target.style.kind is Kind.LOCAL_HEADS:
        cut_argument(target.module, target.part, head_count(model, target.fqn), comm)


def _become_layer(model: nn.Module, target: Target, comm: AxisComm) -> None:
    module, kind = target.module, target.style.kind
    if kind is Kind.ROW:
        become_row(module, target.style, comm)
    elif kind is Kind.EMBEDDING:
        become_vocab_parallel(module, comm, vocabulary(module, comm.size, comm.index))
    elif kind is Kind.EMBEDDING_WIDTH:
        become_width_parallel(module, comm)
    elif kind is Kind.MLA_KEYS:
        become_mla_keys(module, comm, rotary_width(model, target.fqn))
    elif kind is Kind.SUM_OUTPUT:
        sum_output(module, comm)


def _describe(
    model: nn.Module, targets: Mapping[str, Target], shards: Mapping[str, ParamShard], comm: AxisComm
) -> dict[str, str]:
    """What is held and sent; `model` is already this rank's part."""
    styles = [t.style for t in targets.values()]
    params = dict(model.named_parameters())
    cut = [fqn for fqn in params if fqn not in shards or shards[fqn].dim is not None]
    held = sum(p.numel() for p in params.values())
    blocks = {fqn.rpartition(".")[0] for fqn, t in targets.items() if t.style.kind is Kind.COLUMN}
    reduces = sum(s.kind in (Kind.ROW, Kind.EMBEDDING) for s in styles)
    gathers = sum(s.kind is Kind.COLUMN and s.whole_outside for s in styles)
    splits = sum(s.kind is Kind.ROW and s.whole_outside for s in styles)
    return {
        "holds": f"tp part {comm.index + 1} of {comm.size}",
        "parameters": f"{len(cut)} cut, {len(params) - len(cut)} whole; {held:,} elements",
        "sends": f"per micro-batch forward {reduces} all-reduces, {gathers} all-gathers; "
        f"backward {len(blocks)} all-reduces, {splits} all-gathers",
    }
