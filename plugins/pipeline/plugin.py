"""Pipeline parallelism along axis "pp": cuts the user's model so that each rank keeps its own layers.

It is: check, cut, tied weights, and what each rank holds. It is not: the schedule (`schedules.py`) or its
execution (`executor.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from parallax.plugins.base import ParallelPlugin, ParamShard
from parallax.plugins.pipeline.partition import split_layers
from parallax.plugins.pipeline.plans import Structure, find_structure
from parallax.plugins.pipeline.stage import (
    Foreign,
    ForeignAfter,
    ForeignBefore,
    ForeignEmbedding,
    ForeignLayer,
    ForeignPositions,
    StageState,
    gate,
)
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh


class PipelineParallel(ParallelPlugin):
    """Cuts a model into stages without changing its code or its parameter names.

    Args:
        plan: `pp_plan` relative to the root module; None reads the one the model carries.
    """

    name = "pipeline"
    axis = "pp"

    def __init__(self, plan: Mapping[str, Any] | None = None) -> None:
        self._plan = plan
        self.state: StageState | None = None
        self._ties: set[str] = set()
        self._replicas: dict[str, ParamShard] = {}
        self._summary: dict[str, str] = {}

    def check(self, layout: Layout, model: nn.Module) -> None:
        structure = find_structure(model, self._plan)
        stages = layout.pipeline_parallel_size
        if structure.num_layers < stages:
            raise ValueError(
                f"pipeline_parallel_size={stages} needs at least {stages} layers, but {structure.layers!r} has "
                f"{structure.num_layers}; use pipeline_parallel_size <= {structure.num_layers}"
            )
        _refuse_shared_layers(model, structure)

    def apply(self, model: nn.Module, *, mesh: Mesh, layout: Layout) -> None:
        structure = find_structure(model, self._plan)
        bounds = split_layers(structure.num_layers, mesh.size("pp"))
        lo, hi = bounds[mesh.index("pp")]
        first, last = mesh.is_first_stage, mesh.is_last_stage
        self.state = StageState(lo, hi, is_first=first, is_last=last)
        ties = _ties(model, structure)
        if not first:
            _drop_before(model, structure, self.state)
        if not last:
            _drop(model, structure.after, lambda fqn: ForeignAfter(fqn, self._state))
        layers: Any = model.get_submodule(structure.layers)
        for i in range(structure.num_layers):
            if not lo <= i < hi:
                kind = ForeignLayer if i < lo else ForeignAfter
                layers[i] = kind(f"{structure.layers}.{i}", self.state, like=layers[i])
        gate(layers[hi - 1], self.state)
        if not first:
            _demote(model, structure.direct)
        self._keep_ties(model, ties, first=first, last=last)
        self._summary = {
            "holds": f"layers {lo}-{hi - 1} of {structure.num_layers}",
            "sends": "forward: its last layer's output, once per micro-batch; backward: the gradient of its input",
        }

    @property
    def _state(self) -> StageState:
        if self.state is None:
            raise RuntimeError("PipelineParallel.apply has not run")
        return self.state

    def _keep_ties(self, model: nn.Module, ties: list[tuple[str, str]], *, first: bool, last: bool) -> None:
        """Remember which local parameters have a twin on the other end of the pipeline."""
        if first == last:
            return
        here = dict(model.named_parameters(remove_duplicate=False))
        for before, after in ties:
            fqn = before if first else after
            if fqn not in here:
                continue
            self._ties.add(fqn)
            if last:
                self._replicas[fqn] = ParamShard(tuple(here[fqn].shape), axis="pp", owner=False)

    def finalize_grads(self, model: nn.Module, *, mesh: Mesh) -> None:
        """Sum the gradients of tied weights over the first and the last stage."""
        if not self._ties:
            return
        here = dict(model.named_parameters(remove_duplicate=False))
        for fqn in sorted(self._ties):
            param = here[fqn]
            if not param.requires_grad:
                continue
            if param.grad is None:
                raise RuntimeError(f"tied parameter {fqn!r} got no gradient on rank {mesh.rank}")
            mesh["tie"].all_reduce(param.grad)

    def param_shard(self, fqn: str) -> ParamShard | None:
        return self._replicas.get(fqn)

    def describe(self) -> dict[str, str]:
        return dict(self._summary)


def _refuse_shared_layers(model: nn.Module, structure: Structure) -> None:
    """Parameters shared between layers, or between a layer and the rest, cannot be cut apart."""
    owners: dict[int, set[str]] = {}
    names: dict[int, str] = {}
    prefix = structure.layers + "."
    for fqn, param in model.named_parameters(remove_duplicate=False):
        part = fqn[len(prefix) :].split(".")[0] if fqn.startswith(prefix) else "rest"
        owners.setdefault(id(param), set()).add(part)
        names.setdefault(id(param), fqn)
    shared = sorted(names[key] for key, parts in owners.items() if len(parts) > 1)
    if shared:
        raise ValueError(
            f"parameters {shared[:3]} are shared by several layers of {structure.layers!r}; pipeline stages can share "
            f"only an embedding with a head. Use pipeline_parallel_size=1"
        )


def _ties(model: nn.Module, structure: Structure) -> list[tuple[str, str]]:
    """(name before the layers, name after them) of every parameter used at both ends."""
    seen: dict[int, str] = {}
    pairs = []
    for fqn, param in model.named_parameters(remove_duplicate=False):
        owner = fqn.rpartition(".")[0]
        if owner in structure.before:
            seen[id(param)] = fqn
    for fqn, param in model.named_parameters(remove_duplicate=False):
        if fqn.rpartition(".")[0] in structure.after and id(param) in seen:
            pairs.append((seen[id(param)], fqn))
    return pairs


def _drop(model: nn.Module, fqns: tuple[str, ...], make: Any) -> None:
    for fqn in fqns:
        if isinstance(_find(model, fqn), Foreign) or _find(model, fqn) is None:
            continue  # inside a module that was dropped already
        parent, _, name = fqn.rpartition(".")
        setattr(model.get_submodule(parent), name, make(fqn))


def _find(model: nn.Module, fqn: str) -> nn.Module | None:
    try:
        return model.get_submodule(fqn)
    except AttributeError:
        return None


def _drop_before(model: nn.Module, structure: Structure, state: StageState) -> None:
    """The first embedding stands for the received activation; later ones are added to it."""
    embeddings = [f for f in structure.before if isinstance(model.get_submodule(f), nn.Embedding)]

    def make(fqn: str) -> Foreign:
        if fqn in embeddings:
            return (ForeignEmbedding if fqn == embeddings[0] else ForeignPositions)(fqn, state)
        return ForeignBefore(fqn, state)

    _drop(model, structure.before, make)


def _demote(model: nn.Module, fqns: tuple[str, ...]) -> None:
    """Parameters owned by containers train on the first stage only; elsewhere the container still reads a tensor."""
    for fqn in fqns:
        parent, _, name = fqn.rpartition(".")
        owner = model.get_submodule(parent)
        value = owner._parameters.pop(name)
        assert value is not None
        owner.register_buffer(name, value.detach(), persistent=False)
