"""Pipeline parallelism along axis "pp": cuts the user's model so that each rank keeps its own layers.

It is: check, cut, tied weights, and what each rank holds. It is not: the schedule (`schedules.py`) or its
execution (`executor.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from parallax.plugins.base import ParallelPlugin, ParamShard
from parallax.plugins.pipeline.actions import Lists, placement, splits_backward
from parallax.plugins.pipeline.catalog import Schedule, find_schedule, make_lists
from parallax.plugins.pipeline.foreign import Foreign
from parallax.plugins.pipeline.partition import Asked, make_partition
from parallax.plugins.pipeline.plans import Structure, find_structure
from parallax.plugins.pipeline.stage import (
    ForeignAfter,
    ForeignBefore,
    ForeignCarried,
    ForeignEmbedding,
    ForeignLayer,
    StageState,
    carry,
    place,
)
from parallax.plugins.pipeline.stand_in import refuse
from parallax.plugins.pipeline.traffic import add_traffic, stages_of
from parallax.strategies.comm import AxisComm
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.theory import Case, Expected, Stages


class PipelineParallel(ParallelPlugin):
    """Cuts a model into stages without changing its code or its parameter names.

    Args:
        plan: `pp_plan` relative to the root module; None reads the one the model carries.
        schedule: the pipeline schedule; None finds the layout's by its name.
        partition: which layers go to which stage, see `partition.py`.

    Attributes:
        state: what this rank's gates and stubs share, once `apply` has run.
        placement: rank of each virtual stage, once `check` or `apply` has run.
    """

    name = "pipeline"
    axis = "pp"

    def __init__(
        self, plan: Mapping[str, Any] | None = None, schedule: Schedule | None = None, partition: Asked = "cost"
    ) -> None:
        self._plan, self._schedule, self._asked = plan, schedule, partition
        self.state: StageState | None = None
        self.placement: tuple[int, ...] = ()
        self._places: list[tuple[str, int, Foreign, Foreign]] = []
        self._carried: tuple[str, ...] = ()
        self._looked_at: list[str] = []
        self._ties: set[str] = set()
        self._direct: tuple[str, ...] = ()
        self._replicas: dict[str, ParamShard] = {}
        self._summary: dict[str, str] = {}

    def check(self, layout: Layout, model: nn.Module) -> None:
        structure = find_structure(model, self._plan)
        self._place(layout)
        ranks, stages = layout.pipeline_parallel_size, len(self.placement)
        if structure.num_layers < stages:
            each = stages // ranks
            what = f" x {each} stages per rank" if each > 1 else ""
            raise ValueError(
                f"pipeline_parallel_size={ranks}{what} needs at least {stages} layers, but {structure.layers!r} has "
                f"{structure.num_layers}; use pipeline_parallel_size <= {structure.num_layers // each}"
                + (" or fewer stages per rank" if each > 1 else "")
            )
        make_partition(model, structure, stages, self._asked)
        _refuse_shared_layers(model, structure)

    def _lists(self, layout: Layout) -> Lists:
        schedule = self._schedule or find_schedule(layout.schedule)
        ranks, count = layout.pipeline_parallel_size, layout.num_microbatches or layout.pipeline_parallel_size
        return make_lists(schedule, ranks, count, layout.stages_per_rank, name=layout.schedule)

    def _place(self, layout: Layout) -> None:
        lists = self._lists(layout)
        if splits_backward(lists) and layout.zero_stage == 3 and layout.resolved_data_engine == "deepspeed":
            raise ValueError(
                f"schedule {layout.schedule!r} computes gradients of weights after those of inputs, but DeepSpeed's "
                f"zero_stage 3 lets go of a layer's weights as soon as its backward is over, and torch takes no "
                f"gradient for a weight without a shape; use zero_stage 2 or less, data_engine='fsdp', or a schedule "
                f"of whole backwards such as 1f1b"
            )
        self.placement = placement(lists)

    def apply(self, model: nn.Module, *, mesh: Mesh, layout: Layout) -> None:
        structure = find_structure(model, self._plan)
        self._place(layout)
        partition = make_partition(model, structure, len(self.placement), self._asked)
        chunks = {s: partition.bounds[s] for s, rank in enumerate(self.placement) if rank == mesh.index("pp")}
        first, last = 0 in chunks, len(self.placement) - 1 in chunks
        self.state = StageState(chunks, structure.num_layers, structure.layers, structure.carried)
        ties = _ties(model, structure)
        befores = _stubs_before(model, structure, self.state)
        afters = _stubs(model, structure.after, ForeignAfter, self.state)
        for here, stubs, index in ((first, befores, -1), (last, afters, structure.num_layers)):
            if not here:
                _drop(model, stubs)
            elif len(chunks) > 1:
                passed = _stubs(model, stubs, ForeignAfter, self.state)
                self._places += [(fqn, index, stub, passed[fqn]) for fqn, stub in stubs.items()]
        self._carried = structure.carried if first else ()
        later = [part for stage, part in chunks.items() if stage]
        self._looked_at = [f"{structure.layers}.{i}" for lo, hi in later for i in range(lo, hi)]
        self._cut_layers(model, structure, chunks)
        self._direct = structure.direct
        if mesh.index("pp"):
            shapes = {fqn: tuple(model.get_parameter(fqn).shape) for fqn in structure.direct}
            self._replicas = {fqn: ParamShard(shape, axis="pp", owner=False) for fqn, shape in shapes.items()}
        self._keep_ties(model, ties, first=first, last=last)
        held = ", ".join(f"{lo}-{hi - 1}" if hi - lo > 1 else f"{lo}" for lo, hi in chunks.values())
        shares = " + ".join(f"{partition.shares[stage]:.0%}" for stage in chunks)
        self._summary = {
            "holds": f"layers {held} of {structure.num_layers} ({shares} {partition.how})",
            "sends": "forward: the last layer's output of each stage, once per micro-batch; backward: its gradient",
        }

    def _cut_layers(self, model: nn.Module, structure: Structure, chunks: Mapping[int, tuple[int, int]]) -> None:
        """Stubs for foreign layers; real ones are placed where a stage ends or where there are several stages."""
        layers: Any = model.get_submodule(structure.layers)
        ends = {hi - 1 for _, hi in chunks.values()} - {structure.num_layers - 1}
        here = {i for lo, hi in chunks.values() for i in range(lo, hi)}
        for i in range(structure.num_layers):
            fqn = f"{structure.layers}.{i}"
            before = ForeignLayer(fqn, self._state, like=layers[i])
            after = ForeignAfter(fqn, self._state, like=layers[i])
            if i not in here:
                layers[i] = before if i < max(here) else after
            elif i in ends or len(chunks) > 1:
                self._places.append((fqn, i, before, after))

    def finish(self, model: nn.Module) -> None:
        """Place this rank's modules; only now, since tensor parallelism changes the class of some of them."""
        for fqn, index, before, after in self._places:
            place(model.get_submodule(fqn), index, self._state, before, after)
        for fqn in self._carried:
            carry(model.get_submodule(fqn), fqn, self._state)
        for fqn in self._looked_at:
            _look(model.get_submodule(fqn), fqn, fqn.rpartition(".")[0], self._state)

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

    def is_tied(self, fqn: str) -> bool:
        """Whether `fqn` has a copy on the other end of the pipeline."""
        return fqn in self._ties

    def finalize_grads(self, model: nn.Module, *, mesh: Mesh) -> None:
        """Sum the gradients of tied weights over the first and the last stage, those of containers over all."""
        if not self._ties and not self._direct:
            return
        here = dict(model.named_parameters(remove_duplicate=False))
        for param in (here[fqn] for fqn in self._direct):
            if param.requires_grad:
                _sum_over_stages(param, mesh["pp"])
        for fqn in sorted(self._ties):
            param = here[fqn]
            if not param.requires_grad:
                continue
            if param.grad is None and param.numel() == 0:
                raise RuntimeError(f"tied parameter {fqn!r} got no gradient on rank {mesh.rank}")  # ZeRO-3 let go of it
            if param.grad is None:
                param.grad = torch.zeros_like(param)  # used at the other end only
            mesh["tie"].all_reduce(param.grad)

    def param_shard(self, fqn: str) -> ParamShard | None:
        return self._replicas.get(fqn)

    def stages(self, model: nn.Module, layout: Layout) -> Stages:
        """Where each module of the whole `model` runs."""
        self._place(layout)
        structure = find_structure(model, self._plan)
        partition = make_partition(model, structure, len(self.placement), self._asked)
        return stages_of(model, structure, partition, self._lists(layout), self.placement)

    def traffic(self, case: Case, out: Expected) -> None:
        """See `traffic.py`."""
        add_traffic(case, out, find_structure(case.model, self._plan))

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


def _drop(model: nn.Module, stubs: Mapping[str, Foreign]) -> None:
    for fqn, stub in stubs.items():
        if isinstance(_find(model, fqn), Foreign) or _find(model, fqn) is None:
            continue  # inside a module that was dropped already
        parent, _, name = fqn.rpartition(".")
        setattr(model.get_submodule(parent), name, stub)


def _find(model: nn.Module, fqn: str) -> nn.Module | None:
    try:
        return model.get_submodule(fqn)
    except AttributeError:
        return None


def _stubs(model: nn.Module, fqns: Iterable[str], kind: type[Foreign], state: StageState) -> dict[str, Foreign]:
    return {fqn: kind(fqn, state, model.get_submodule(fqn)) for fqn in fqns}


def _stubs_before(model: nn.Module, structure: Structure, state: StageState) -> dict[str, Foreign]:
    """Stubs for what runs before the layers; what is sent along comes first, since others may be inside of it."""

    def make(fqn: str) -> Foreign:
        like = model.get_submodule(fqn)
        return (ForeignEmbedding if isinstance(like, nn.Embedding) else ForeignBefore)(fqn, state, like)

    stubs = _stubs(model, structure.carried, ForeignCarried, state)
    return stubs | {fqn: make(fqn) for fqn in structure.before if fqn not in stubs}


def _look(layer: nn.Module, fqn: str, layers: str, state: StageState) -> None:
    """Refuse arguments of `layer` that are made up, while the state says so."""

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        if state.running and state.checking:
            refuse(module, fqn, args, kwargs, state.stand_ins, layers)

    layer.register_forward_pre_hook(look, with_kwargs=True)


@torch.no_grad()
def _sum_over_stages(param: nn.Parameter, stages: AxisComm) -> None:
    """Give every stage the gradient of all. One number more counts who has one: what no stage uses keeps none."""
    shape = getattr(param, "ds_shape", param.shape)  # also while ZeRO-3 has it released
    total = torch.zeros(shape.numel() + 1, dtype=param.dtype, device=param.device)
    if param.grad is not None:
        total[:-1] = param.grad.flatten()
        total[-1] = 1
    stages.all_reduce(total)
    if param.grad is not None:
        param.grad.copy_(total[:-1].view(shape))
    elif total[-1] > 0:
        param.grad = torch.empty_like(param)  # torch compares it with the weight, which may be released
        param.grad.data = total[:-1].view(shape)
