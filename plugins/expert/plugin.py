"""The expert-parallel plugin: a model's experts cut over the axis "ep" (whole ones) and "etp" (inside each).

It is: the contract of `plugins/base.py` carried out for experts modules. Plans come from `plans.py`, what runs from
`layers.py`. It is not: the router, which stays the model's and is replicated, or the reduction of gradients, which
the data engine does over "edp" for what is cut over "ep".

What is sent per layer and micro-batch, for T tokens on this rank that choose k experts each, of h elements:
forward two all-to-alls of T k h elements (dispatch, combine) and one of E counts; backward two more. Where experts
fold over tp, its ranks send their shares of T tokens. Where the block is given whole sequences, outputs are gathered
over "tp_shares", in backward the gradients of tokens and weights; on sequence shards nothing is (`sequence_plan.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from parallax.plugins.base import ParallelPlugin, ParamShard
from parallax.plugins.expert.balance import attach
from parallax.plugins.expert.beside import find_beside
from parallax.plugins.expert.block import find_router, find_shared
from parallax.plugins.expert.layers import become_experts, count_once
from parallax.plugins.expert.plans import HOW_TO, ExpertsTarget, find_experts, old_style
from parallax.plugins.expert.router import in_fp32
from parallax.plugins.expert.traffic import add_balance, add_traffic
from parallax.strategies.comm import AxisComm
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.theory import Case, Expected

BALANCED_OVER = {"microbatch": "cp", "global": "data"}
"""Option `expert_balance` -> the mesh group whose tokens the auxiliary loss is computed over."""


class ExpertParallel(ParallelPlugin):
    """Cuts experts over "ep", and inside over "etp" where the model's tp_plan says how.

    Args:
        plan: `ep_plan` relative to the root module. Goes before plans the model carries.
        balance: over which tokens a model's auxiliary loss balances its experts: "microbatch", those of one
            micro-batch on one data rank, or "global", those of one micro-batch on all of them.
        capacity_factor: choices an expert takes of one rank's micro-batch, over the mean; those beyond, the lowest
            weights first, go to no expert. None takes all: nothing is dropped.
        chunks: parts of a micro-batch's tokens that are dispatched one after the other, each while the one before is
            computed. 1 dispatches them all at once.
        router_fp32: compute routers in fp32 also where the rest runs in half precision, whatever the model's code does.
    """

    name = "expert"
    axis = "ep"
    also = ("tp", "cp", "dp", "pp")  # tp cuts inside experts; the options count at every layout

    def __init__(
        self,
        plan: Mapping[str, str] | None = None,
        balance: str = "microbatch",
        capacity_factor: float | None = None,
        chunks: int = 1,
        router_fp32: bool = False,
    ) -> None:
        if balance not in BALANCED_OVER:
            raise ValueError(f"expert_balance must be one of {', '.join(BALANCED_OVER)}; got {balance!r}")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"expert_capacity_factor must be above 0, or None to drop nothing; got {capacity_factor}")
        if type(chunks) is not int or chunks < 1:
            raise ValueError(f"expert_chunks must be a whole number, at least 1; got {chunks!r}")
        self._capacity_factor, self._chunks, self._router_fp32 = capacity_factor, chunks, router_fp32
        self._asked = "expert_capacity_factor" if capacity_factor is not None else "expert_router_fp32" * router_fp32
        self._plan, self._balanced_over = dict(plan or {}), BALANCED_OVER[balance]
        self._balanced: AxisComm | None = None
        self._detach: Callable[[], None] | None = None
        self._shards: dict[str, ParamShard] = {}
        self._apart: set[str] = set()
        self._holds: tuple[list[ExpertsTarget], AxisComm, AxisComm, AxisComm] | None = None

    def check(self, layout: Layout, model: nn.Module) -> None:
        """Refuse a model without experts, and expert counts or widths that the axes do not divide.

        Raises:
            ValueError: with the number and what would do.
        """
        ep, etp = layout.expert_parallel_size, layout.experts_cut_over
        targets = self._targets(model, layout)
        if self._asked and not targets:
            raise ValueError(f"{self._asked} is set, but the model has no plan for its experts; {HOW_TO}")
        if self._chunks > 1 and ep == 1:
            raise ValueError(
                f"expert_chunks={self._chunks}, but expert_parallel_size is 1, so that no token travels; leave it out"
            )
        for target in targets if ep > 1 or etp < layout.tensor_parallel_size else ():
            if hasattr(target.module, "base_layer"):
                raise ValueError(
                    f"{target.fqn} has adapters on the parameters of its experts (peft's target_parameters), which are "
                    f"not cut with them; adapt other modules (target_modules), or keep experts on every rank: "
                    f"expert_parallel_size=1, without expert_tensor_parallel_size"
                )
        if ep > 1 and not any(t.grouped for t in targets):
            old = next(old_style(model), None)
            why = f"; {old!r} is a list of modules: keep the experts' weights in one tensor each" if old else ""
            raise ValueError(f"expert_parallel_size={ep}, but the model has no plan for its experts{why}; {HOW_TO}")
        for target in targets:
            if self._router_fp32:
                _router(model, target)
            if self._capacity_factor is not None and target.identity:
                raise ValueError(
                    f"expert_capacity_factor is set, but {target.fqn} has experts without weights "
                    f"({', '.join(target.identity)}), which have no capacity; leave it out"
                )
            if target.num_experts % ep or (ep > 1 and not target.grouped):
                valid = [str(n) for n in range(1, target.num_experts + 1) if target.num_experts % n == 0]
                raise ValueError(
                    f"{target.fqn} has {target.num_experts} experts, which expert_parallel_size={ep} does not divide; "
                    f"use one of {', '.join(valid)}"
                )
            if etp < layout.tensor_parallel_size:
                _require_grouped(target, etp)
            _cuts(target, (ep, 0), (etp, 0))

    def apply(self, model: nn.Module, *, mesh: Mesh, layout: Layout) -> None:
        ep, etp, shares = mesh["ep"], mesh["etp"], mesh["tp_shares"]
        targets = self._targets(model, layout)
        for target in targets:
            if self._router_fp32:
                in_fp32(_router(model, target))
            for name, shard in _cuts(target, (ep.size, ep.index), (etp.size, etp.index)).items():
                if shard.dim is not None:
                    param = target.module.get_parameter(name)
                    local = nn.Parameter(shard.take(param.detach()), requires_grad=param.requires_grad)
                    local.__dict__.update(param.__dict__)
                    setattr(target.module, name, local)
                self._shards[f"{target.fqn}.{name}"] = shard
                if shard.axis == "ep" or shares.size > 1:
                    self._apart.add(f"{target.fqn}.{name}")
            cut_inside = bool(target.tensor) and etp.size > 1
            if cut_inside or ep.size * shares.size > 1 or self._capacity_factor is not None:
                cut = etp if cut_inside else None
                sharing = shares if shares.size > 1 else None
                become_experts(
                    target.module,
                    ep,
                    cut,
                    target.num_experts,
                    self._capacity_factor,
                    shares=sharing,
                    chunks=self._chunks,
                    beside=find_beside(*_place(model, target)) if ep.size > 1 else None,
                )
            for name in target.identity if cut_inside else ():
                count_once(target.module.get_submodule(name), etp)
        self._holds = targets, ep, etp, shares
        self._balanced = mesh[self._balanced_over]

    def early(self, model: nn.Module, layout: Layout) -> frozenset[nn.Module]:
        """Modules of a whole model that `layout` calls earlier than its code does: inside the experts they go with."""
        targets = self._targets(model, layout) if layout.expert_parallel_size > 1 else []
        return frozenset(m for t in targets if (m := find_shared(*_place(model, t))) is not None)

    def _targets(self, model: nn.Module, layout: Layout) -> list[ExpertsTarget]:
        """Experts modules that something is done to."""
        touched = max(layout.expert_parallel_size, layout.tensor_parallel_size) > 1
        return find_experts(model, self._plan) if touched or self._asked else []

    def finish(self, model: nn.Module) -> None:
        assert self._balanced is not None
        self._detach = attach(model, self._balanced)

    def restore(self, model: nn.Module) -> None:
        if self._detach is not None:
            self._detach()
        self._detach = None

    def param_shard(self, fqn: str) -> ParamShard | None:
        return self._shards.get(fqn)

    def averaged_over(self, fqn: str) -> str | None:
        return "edp" if fqn in self._apart else None

    def traffic(self, case: Case, out: Expected) -> None:
        """See `traffic.py`. Of what a capacity drops nothing is sent, and no value is as in one process."""
        add_balance(case, out, self._balanced_over)
        add_traffic(case, out, self._targets(case.model, case.layout), self._chunks)

    def describe(self) -> dict[str, str]:
        return _describe(*self._holds) if self._holds is not None else {}


def _router(model: nn.Module, target: ExpertsTarget) -> nn.Module:
    found = find_router(*_place(model, target), target.num_experts)
    if found is None:
        raise ValueError(
            f"expert_router_fp32 is set, but beside {target.fqn} there is not one module with a matrix of "
            f"{target.num_experts} rows, a router; leave it out"
        )
    return found


def _place(model: nn.Module, target: ExpertsTarget) -> tuple[nn.Module, str]:
    """The block an experts module is in, and its name there."""
    owner, _, name = target.fqn.rpartition(".")
    return model.get_submodule(owner), name


def _require_grouped(target: ExpertsTarget, etp: int) -> None:
    """Where experts fold over tp, replicas of all their parameters are on other ranks than those of the rest."""
    others = [name for name, _ in target.module.named_parameters(recurse=False) if name not in target.grouped]
    if others:
        raise ValueError(
            f"expert_tensor_parallel_size={etp} is less than tensor_parallel_size and spreads experts over tp, but the "
            f"plan of {target.fqn} does not say that {', '.join(others)} belong to single experts ('grouped_gemm'); "
            f"name them, or leave expert_tensor_parallel_size out"
        )


def _cuts(target: ExpertsTarget, ep: tuple[int, int], etp: tuple[int, int]) -> dict[str, ParamShard]:
    """Parameter name -> how the part of rank (ep index, etp index) sits in it, for (size, index) of both axes."""
    out = {}
    for name, param in target.module.named_parameters(recurse=False):
        shape = tuple(param.shape)
        outer = None
        if name in target.grouped and ep[0] > 1:
            each = shape[0] // ep[0]
            outer = ParamShard(shape, 0, ((ep[1] * each, (ep[1] + 1) * each),), axis="ep")
        inner = None
        if (word := target.tensor.get(name)) is not None and etp[0] > 1:
            inner = _inner(f"{target.fqn}.{name}", outer.local_shape if outer else shape, word, *etp)
        if outer is not None and inner is not None:
            out[name] = ParamShard(outer.shape, 0, outer.ranges, axis="ep", inner=inner)
        else:
            out[name] = outer or inner or ParamShard(shape)
        if inner is None and etp[0] > 1:  # whole on every etp rank: counted once
            out[name] = replace(out[name], owner=etp[1] == 0)
    return out


def _inner(fqn: str, shape: tuple[int, ...], word: str, size: int, index: int) -> ParamShard:
    """The cut of one expert parameter over etp; `shape` is that of this rank's experts."""
    dims = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}
    if word not in dims:
        raise ValueError(f"style {word!r} of expert parameter {fqn!r} is not implemented; use one of {', '.join(dims)}")
    dim = len(shape) + dims[word]
    blocks = 2 if word.startswith("packed_") else 1
    block = shape[dim] // blocks
    if shape[dim] % blocks or block % size:
        raise ValueError(
            f"{fqn}: tensor_parallel_size={size} does not divide the experts' width {block}; use a divisor of {block}, "
            f"or expert_tensor_parallel_size=1"
        )
    each = block // size
    ranges = tuple((b * block + index * each, b * block + (index + 1) * each) for b in range(blocks))
    return ParamShard(shape, dim, ranges)


def _describe(targets: list[ExpertsTarget], ep: AxisComm, etp: AxisComm, shares: AxisComm) -> dict[str, str]:
    if not targets or ep.size == etp.size == shares.size == 1:
        return {}
    counts = sorted({t.num_experts for t in targets})
    inside = f", each cut over {etp.axis}{etp.size}" if etp.size > 1 and any(t.tensor for t in targets) else ""
    whole = shares.size > 1 and not all(getattr(t.module, "real", None) for t in targets)  # else of sequence shards
    gathers = f"; forward and backward an all-gather over {shares.size} ranks of tp" if whole else ""
    sends = "per layer and micro-batch forward 2 all-to-alls, backward 2" if ep.size > 1 else "nothing over ep"
    return {
        "holds": f"ep part {ep.index + 1} of {ep.size}: {'/'.join(str(c // ep.size) for c in counts)} of "
        f"{'/'.join(map(str, counts))} experts in each of {len(targets)} layers{inside}",
        "sends": f"{sends}{gathers}",
    }
