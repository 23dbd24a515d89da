"""The tensor-parallel plugin: a model's linears and embeddings cut over the axis "tp", in place.

It is: the contract of `plugins/base.py` carried out for one model. Plans come from `plans.py`, cuts from
`shards.py`, layers from `layers.py`, sequence shards from `sequence.py`. It is not: any of these.

Replicated parameters that see everything are left alone: their inputs are the same on every rank, so their gradients
are too, which `agreement.py` checks once. Those that see a part of the tokens or heads have partial gradients, which
`finalize_grads` sums.

What is sent and when: `report.py`, and docs/tensor.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from parallax.plugins.base import ParallelPlugin, ParamShard
from parallax.plugins.expert.plans import find_experts
from parallax.plugins.tensor.agreement import require_agreement
from parallax.plugins.tensor.checks import conditions, refuse_unfit, require_divisible
from parallax.plugins.tensor.convert import convert
from parallax.plugins.tensor.cuts import holds_parameters, replace_parameters, shard_parameters
from parallax.plugins.tensor.gradients import GradientSums
from parallax.plugins.tensor.heads import sharers, with_copies
from parallax.plugins.tensor.logits import whole
from parallax.plugins.tensor.plans import collect_rules, resolve, vocabularies, vocabulary_heads
from parallax.plugins.tensor.report import describe
from parallax.plugins.tensor.sequence_plan import Trunk, find_trunk
from parallax.plugins.tensor.styles import CUTTING, Kind
from parallax.plugins.tensor.target import Target
from parallax.plugins.tensor.traffic import add_traffic
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.theory import Case, Expected
from parallax.strategies.tree import map_tensors

_PARTIAL = (Kind.SUM_GRAD, Kind.PER_HEAD, Kind.ENTERING)
_WITHOUT_PARAMETERS = (Kind.LOCAL_SIZE, Kind.LOCAL_HEADS, Kind.ENTERING)


class TensorParallel(ParallelPlugin):
    """Cuts matrices over "tp" by the words of a plan (see `plans.py` for where plans are looked for).

    Args:
        plan: FQN pattern (relative to the model, `*` for one component) -> style word. Goes before plans the
            model carries.
        chunks: messages in which a row layer's output is sent, so that one is on its way while the next is computed.
        ep_plan: the expert plugin's plan: whose blocks may be called with sequence shards.
    """

    name = "tensor"
    axis = "tp"

    def __init__(
        self, plan: Mapping[str, str] | None = None, chunks: int = 1, ep_plan: Mapping[str, str] | None = None
    ) -> None:
        if type(chunks) is not int or chunks < 1:
            raise ValueError(f"tp_chunks must be a whole number, at least 1; got {chunks!r}")
        self._plan, self._ep_plan, self._chunks = dict(plan or {}), ep_plan, chunks
        self._shards: dict[str, ParamShard] = {}
        self._sums = GradientSums()
        self._agreed = False
        self._vocabularies: set[int] = set()
        self._trunk: Trunk | str | None = None
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
        self._trunk = self._find_trunk(layout, model, targets)

    def _find_trunk(self, layout: Layout, model: nn.Module, targets: Mapping[str, Target]) -> Trunk | str:
        """Where the residual stream of a whole model becomes shards, or why it does not.

        Raises:
            ValueError: the layout insists on sequence parallelism, and this model cannot.
        """
        if layout.sequence_parallel is False:
            return "switched off by the layout"
        trunk = find_trunk(model, targets, find_experts(model, self._ep_plan), folded=layout.experts_cut_over == 1)
        if layout.sequence_parallel and isinstance(trunk, str):
            raise ValueError(
                f"sequence_parallel=True, but the residual stream of {type(model).__name__} cannot be cut: {trunk}. "
                "Leave sequence_parallel out, or set it to False"
            )
        return trunk

    def apply(self, model: nn.Module, *, mesh: Mesh, layout: Layout) -> None:
        """Replace what the plan names by this rank's part; FQNs, ties, hooks and `requires_grad` stay."""
        comm = mesh["tp"]
        found = resolve(model, collect_rules(model, self._plan), complete=False)
        trunk = self._trunk = self._trunk or self._find_trunk(layout, model, found)
        targets = {fqn: t for fqn, t in found.items() if t.style.kind in _WITHOUT_PARAMETERS or holds_parameters(t)}
        require_divisible(conditions(model, targets.values()), comm.size)
        targets = with_copies(model, targets, comm.size)
        cuts = shard_parameters(model, targets, comm.size, comm.index)
        self._record(model, targets, cuts, mesh)
        replace_parameters(model, cuts)
        heads = vocabulary_heads(model, targets.values(), self._vocabularies)
        self._report = describe(model, targets, self._shards, comm, trunk, heads)
        convert(model, targets, mesh, trunk if isinstance(trunk, Trunk) else None, heads, self._chunks)

    def _record(
        self, model: nn.Module, targets: Mapping[str, Target], cuts: Mapping[int, ParamShard], mesh: Mesh
    ) -> None:
        comm = mesh["tp"]
        experts = {id(p) for m in model.modules() if getattr(m, "is_experts_share", False) for p in m.parameters()}
        partial = [t for t in targets.values() if t.style.kind in _PARTIAL]
        summed = {id(p) for t in partial for p in _parameters(t)}
        if isinstance(trunk := self._trunk, Trunk):
            summed |= {id(p) for fqn, p in model.named_parameters() if id(p) not in cuts and trunk.is_sharded(fqn)}
        self._sums.add(comm, [fqn for fqn, p in model.named_parameters() if id(p) in summed])
        shared = [t for t in targets.values() if t.copies > 1 and t.style.kind in CUTTING and not t.style.heads]
        for copies in sorted({t.copies for t in shared}):
            held = {id(p) for t in shared if t.copies == copies for p in t.module.parameters()}
            self._sums.add(sharers(mesh, copies), [fqn for fqn, p in model.named_parameters() if id(p) in held])
        for fqn, param in model.named_parameters(remove_duplicate=False):
            if id(param) in experts:  # the expert plugin has cut them, and knows how they sit in the whole
                continue
            whole = ParamShard(tuple(param.shape), owner=comm.is_first)
            self._shards[fqn] = cuts.get(id(param), whole)

    def finalize_grads(self, model: nn.Module, *, mesh: Mesh) -> None:
        """Sum partial gradients: of `replicated_with_grad_allreduce`, shared key-value heads, and what sees shards.

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

    def traffic(self, case: Case, out: Expected) -> None:
        """See `traffic.py`."""
        if case.layout.tensor_parallel_size == 1:
            return
        targets = resolve(case.model, collect_rules(case.model, self._plan), complete=True)
        targets = with_copies(case.model, targets, case.layout.tensor_parallel_size)
        add_traffic(case, out, targets, self.trunk(case.model, case.layout), self._chunks)

    def trunk(self, model: nn.Module, layout: Layout) -> Trunk | None:
        """Where the residual stream of a whole model is cut into shards; None when it is not."""
        if layout.tensor_parallel_size == 1:
            return None
        found = self._find_trunk(layout, model, resolve(model, collect_rules(model, self._plan), complete=True))
        return found if isinstance(found, Trunk) else None

    def describe(self) -> dict[str, str]:
        return dict(self._report)


def _parameters(target: Target) -> list[nn.Parameter]:
    return [target.module.get_parameter(target.part)] if target.part else list(target.module.parameters())
