"""How many tokens choose each expert: counters on the device, and their sum over the ranks.

It is: a hook on each experts module and the one collective that adds the counters up. It is not: what is done with
them (`callbacks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallax.plugins.expert.plans import find_experts
from parallax.plugins.expert.routing import within_capacity
from parallax.strategies.mesh import Mesh


class Load(NamedTuple):
    """Counts of some steps.

    Attributes:
        tokens: for each layer how often each of its experts was chosen, int64 [experts].
        nowhere: choices that name no expert, int64 [layers].
        bytes: of the rows that were chosen; each crosses the exchange four times, twice in a forward and twice in a
            backward. int64 [layers].
    """

    tokens: list[Tensor]
    nowhere: Tensor
    bytes: Tensor


class LoadCounter:
    """Counts the choices of the experts modules on this rank, at any layout; nothing waits for the device.

    Forwards count while gradients are taken: no evaluation, and no forward is counted again when a backward recomputes
    it. A layer is named after the module that holds its experts.

    Args:
        model: the user's LightningModule, in its final form.
        mesh: the ranks to add up over.
        device: where counters live.
        ep_plan: as the strategy was given.

    Attributes:
        layers: names of all layers with experts, over all pipeline stages, in the model's order.
        experts: experts of each of them.
        here: the layers on this rank's stages.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, ep_plan: Any = None) -> None:
        self._mesh = mesh
        self._hooks: list[Any] = []
        found = {t.fqn: t.module for t in find_experts(model, ep_plan)}
        mine = {fqn: _count(module) for fqn, module in found.items()}
        known: dict[str, int] = {}
        for stage in mesh["pp"].gather_objects(mine):
            known |= stage
        self.layers = sorted(known, key=_natural)
        self.experts = [known[fqn] for fqn in self.layers]
        self.here = list(mine)
        self._counts = torch.zeros(len(known), max(self.experts, default=0) + 2, dtype=torch.int64, device=device)
        for fqn, module in found.items():
            row = self._counts[self.layers.index(fqn)]
            if mesh.index("tp") == 0 or _real_tokens(module) is not None:  # elsewhere these tokens are counted already
                self._hooks.append(module.register_forward_pre_hook(_counting(row, known[fqn]), with_kwargs=True))

    def take(self) -> Load:
        """What was counted since the last call, over all ranks. Collective."""
        total = self._counts.clone()
        self._counts.zero_()
        self._mesh["data"].all_reduce(total)
        self._mesh["model"].all_reduce(total)
        return Load([row[:n] for row, n in zip(total, self.experts, strict=True)], total[:, -2], total[:, -1])

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _counting(row: Tensor, experts: int) -> Any:
    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recomputing = torch._C._current_graph_task_id() != -1
        if not torch.is_grad_enabled() or recomputing:
            return
        hidden, choices, weights, *_ = (*args, *kwargs.values())
        real = _real_tokens(module)
        choices, weights = (x.reshape(-1, x.shape[-1])[: real() if real else None] for x in (choices, weights))
        if (factor := getattr(module, "capacity_factor", None)) is not None:
            choices = within_capacity(choices, weights, experts, factor)
        choices = choices.detach().reshape(-1)
        counted = choices < experts
        row.scatter_add_(0, torch.where(counted, choices, len(row) - 2), torch.ones_like(choices))
        row[-1] += counted.sum() * (hidden.shape[-1] * hidden.element_size())

    return count


def _real_tokens(module: nn.Module) -> Callable[[], int] | None:
    """See `layers.Experts.real`."""
    found: Callable[[], int] | None = getattr(module, "real", None)
    return found


def _count(module: Any) -> int:
    return int(getattr(module, "all_experts", module.num_experts))


def _natural(fqn: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in fqn.split(".")]
