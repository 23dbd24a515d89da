"""What every rank of a layout should send in each step: the formulas of all that take part, added up.

It is: a callback of the one-process run, which has the whole model and its shapes. It is not: a formula
(`plugins/*/traffic.py`, `step_traffic.py`) or a comparison (`bytes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from parallax.plugins.base import ParallelPlugin, ParamShard
from parallax.plugins.context import ContextParallel
from parallax.plugins.data.base import DataEngine
from parallax.plugins.expert import ExpertParallel
from parallax.plugins.pipeline import PipelineParallel
from parallax.plugins.tensor.plugin import TensorParallel
from parallax.strategies import recompute
from parallax.strategies.batch import batch_size, largest_divisor, split
from parallax.strategies.comm import Traffic
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.step_traffic import add_step
from parallax.strategies.theory import Case, Expected, Key, Stages, Trace
from parallax.strategies.tree import signature
from parallax.strategies.verify.trace import local_tokens, trace


@dataclass(frozen=True)
class Asked:
    """What to expect of.

    Attributes:
        layout: resolved, as text.
        batches: step -> data rank -> the batch it read.
        shards, averaged_over: rank -> parameter -> how it sits in the whole, and over whom its gradient is averaged.
    """

    layout: Layout
    batches: Sequence[Sequence[Any]]
    shards: Sequence[Mapping[str, ParamShard | None]]
    averaged_over: Sequence[Mapping[str, str]]


def microbatch(
    module: LightningModule, batch: Any, layout: Layout, plugins: Sequence[ParallelPlugin]
) -> tuple[Any, int, int]:
    """The first micro-batch of a data rank's `batch` with the tokens of one rank, the tokens of a whole sequence (0
    where sequences are whole), and how many micro-batches there are."""
    wanted = layout.num_microbatches or 1
    count = 1 if wanted == 1 else largest_divisor(batch_size(batch), wanted)
    context = next((p for p in plugins if isinstance(p, ContextParallel)), None)
    plan = None if context is None else context.batch_plan(module)
    part = split(batch, count)[0]
    return *local_tokens(part, plan, layout.context_parallel_size, layout.context_sharding), count


@dataclass(frozen=True)
class Theory:
    """Of one rank and step: rows, those known as the group's sum only, and who has no formula."""

    counts: dict[Key, Traffic]
    pooled: frozenset[Key]
    missing: tuple[str, ...]


class Expectation(Callback):
    """Works `theories` out, step -> rank -> `Theory`, when training in one process is over."""

    def __init__(self, asked: Asked, plugins: Sequence[ParallelPlugin], engine: DataEngine) -> None:
        self.theories: list[list[Theory]] = []
        self._asked, self._plugins, self._engine = asked, plugins, engine
        self._traces: dict[Any, Trace] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layout, module = self._asked.layout, pl_module
        pipeline = next((p for p in self._plugins if isinstance(p, PipelineParallel)), None)
        tensor = next((p for p in self._plugins if isinstance(p, TensorParallel)), None)
        stages = Stages() if pipeline is None else pipeline.stages(module, layout)
        expert = next((p for p in self._plugins if isinstance(p, ExpertParallel)), None)
        early = frozenset[nn.Module]() if expert is None else expert.early(module, layout)
        trunk = None if tensor is None else tensor.trunk(module, layout)
        names: dict[int, list[str]] = {}
        for fqn, param in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(fqn)
        optimizer = trainer.optimizers[0]
        recomputed = recompute.recomputed_layers(layout, module)
        groups = tuple(frozenset(n for p in g["params"] for n in names[id(p)]) for g in optimizer.param_groups)
        known: set[Any] = set()
        with trainer.precision_plugin.forward_context():
            for step, batches in enumerate(self._asked.batches):
                traces = [self._trace(module, batch, stages, early) for batch in batches]
                theories = []
                for rank in range(layout.world_size):
                    mesh = Mesh.build(layout, rank, groups=False)
                    key, seen, count = traces[mesh.index("dp")]
                    case = Case(
                        layout,
                        mesh,
                        module,
                        seen,
                        count,
                        self._asked.shards[rank],
                        self._asked.averaged_over[rank],
                        stages,
                        trunk is not None,
                        frozenset(trunk.experts if trunk is not None else ()),
                        first=key not in known,
                        step=step,
                        groups=groups,
                        recomputed=recomputed,
                    )
                    theories.append(self._theory(case))
                known |= {key for key, _, _ in traces}
                self.theories.append(theories)

    def _trace(
        self, module: LightningModule, batch: Any, stages: Stages, early: frozenset[nn.Module]
    ) -> tuple[Any, Trace, int]:
        """What identifies the shapes of a data rank's micro-batches, what was seen of one, and their number."""
        part, tokens, count = microbatch(module, batch, self._asked.layout, self._plugins)
        key = signature(part), tokens, count
        if key not in self._traces:
            context = self._asked.layout.context_parallel_size
            self._traces[key] = trace(module, part, stages.ends, tokens=tokens, context=context, early=early)
        return key, self._traces[key], count

    def _theory(self, case: Case) -> Theory:
        out = Expected(case.mesh)
        add_step(case, out)
        for state in (*(p.traffic for p in self._plugins), self._engine.traffic):
            try:
                state(case, out)
            except NotImplementedError as error:
                out.missing.append(str(error))
        return Theory(out.counts, frozenset(out.pooled), tuple(out.missing))
