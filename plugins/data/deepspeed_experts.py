"""Parameters of experts under ZeRO: sharded and reduced over "edp" instead of the data axis.

It is: how DeepSpeed is told which parameters these are (marks, groups of its own in the optimizer, its table of
process groups). It is not: DeepSpeed's MoE layers, of which nothing is used.

DeepSpeed sums such a gradient over "edp" and divides it by the size of the data axis, which is what a rank's experts
need: they have seen the samples of their whole "ep" group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from parallax.plugins.data.deepspeed_shims import module
from parallax.strategies.mesh import Mesh

GROUP = "parallax_experts"
MARKS = ("allreduce", "group_name", "ds_zero_placement_family", "ds_zero_partition_group_name")
"""Attributes of an expert parameter that DeepSpeed reads."""


class ExpertGroups:
    """The expert parameters of one engine.

    Stages 1 and 2 keep one flat partition per parameter group, so experts need groups of their own. Learning-rate
    schedulers count groups: the additional ones are there only while DeepSpeed looks, with the hyperparameters of the
    group they were taken from. Stage 3 partitions every parameter by itself and needs the marks alone.

    Args:
        experts: the parameters; none for a dense model.
        optimizer: the user's; its groups keep what is no expert.
        mesh: where "edp" and "ep" are.
        stage: ZeRO stage.
    """

    def __init__(self, experts: Iterable[nn.Parameter], optimizer: Optimizer, mesh: Mesh, stage: int) -> None:
        self.params = set(experts)
        self._optimizer = optimizer
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if mesh.layout.experts_apart:
            groups = {name: mesh.real_group(name) for name in ("ep", "edp")}
            if self.params:
                self._register(groups)
            if stage < 3:
                self._split()

    @property
    def split(self) -> bool:
        """Whether the optimizer's groups were split."""
        return bool(self._pairs)

    def _register(self, groups: dict[str, Any]) -> None:
        table = module("utils.groups")
        table._EXPERT_PARALLEL_GROUP[GROUP] = groups["ep"]
        table._EXPERT_DATA_PARALLEL_GROUP[GROUP] = groups["edp"]
        for param in self.params:
            mark: Any = param
            mark.allreduce, mark.group_name = False, GROUP
            mark.ds_zero_placement_family, mark.ds_zero_partition_group_name = "autoep_expert", GROUP
            mark.ds_zero_partition_process_group = groups["edp"]

    def _split(self) -> None:
        for group in self._optimizer.param_groups:
            here = [p for p in group["params"] if p in self.params]
            if here:
                group["params"] = [p for p in group["params"] if p not in self.params]
                self._pairs.append((group, {**group, "params": here, "moe": True, "name": GROUP}))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the optimizer lists the groups of experts, after its own, with today's hyperparameters."""
        for source, group in self._pairs:
            group.update({k: v for k, v in source.items() if k != "params"}, moe=True, name=GROUP)
        before = self._optimizer.param_groups
        self._optimizer.param_groups = [*before, *(group for _, group in self._pairs)]
        try:
            yield
        finally:
            # Loading a state makes new dicts; schedulers and `_pairs` know the old ones.
            for group, now in zip(before, self._optimizer.param_groups, strict=False):
                group.update(now)
            self._optimizer.param_groups = before
