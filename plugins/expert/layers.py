"""The experts of one layer, of which this rank holds some: dispatch, compute, combine.

It is: the forward put around a model's own experts module, in place. What is inside an expert (gates, biases,
activations, which grouped product) stays the model's, through its own forward on the rows received. It is not:
the router, shared experts or anything else of the mixture-of-experts block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallax.plugins.expert.beside import Beside
from parallax.plugins.expert.functions import Transit, receive, regroup, send, spread, weighted_sum
from parallax.plugins.expert.grouped import grouped, takes
from parallax.plugins.expert.routing import Route, route, within_capacity
from parallax.plugins.tensor.functions import copy_to_region, reduce_from_region
from parallax.plugins.tensor.sequence_functions import Tokens, cut, gather, local_part
from parallax.strategies.comm import AxisComm


class Experts(nn.Module):
    """Mixin over a module called as `(hidden_states [tokens, h], top_k_index [tokens, k], top_k_weights [tokens, k])`.

    Attributes:
        ep: the expert axis: rank i holds whole experts [i E / n, (i + 1) E / n).
        etp: the axis every expert is cut over inside; None when it is whole.
        shares: the ranks that are called with the same tokens and dispatch a share of them each; None when alone.
        all_experts: experts of the layer over all ranks; the module's own `num_experts` counts those here.
        capacity_factor: choices an expert takes of a rank, over the mean; None takes all.
        chunks: parts of the tokens that are dispatched one after the other, each while the one before is computed.
        real: under sequence parallelism, where it is called with its share of the tokens already, how many of them, the
            first, are no padding; None elsewhere.
        beside: the block's shared expert, computed during the first dispatch; None when there is none to compute then.
    """

    ep: AxisComm
    etp: AxisComm | None
    shares: AxisComm | None
    all_experts: int
    capacity_factor: float | None
    chunks: int
    beside: Beside | None
    real: Callable[[], int] | None = None
    is_experts_share = True  # its parameters are no other plugin's

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        shape = hidden_states.shape
        hidden, weights = hidden_states.reshape(-1, shape[-1]), top_k_weights.reshape(-1, top_k_index.shape[-1])
        choices = top_k_index.reshape(-1, top_k_index.shape[-1])
        weights = weights.to(torch.promote_types(weights.dtype, hidden.dtype))  # sums of their gradients are as wide
        if self.real is None or (real := self.real()) == len(hidden):
            return self._shared(hidden, choices, weights, hidden).view(shape)
        out = self._shared(hidden[:real], choices[:real], weights[:real], hidden)
        return F.pad(out, (0, 0, 0, len(hidden) - real)).view(shape)

    def _shared(self, hidden: Tensor, choices: Tensor, weights: Tensor, given: Tensor) -> Tensor:
        """The experts' output for tokens that ranks of `shares` may have in common; `given` are all the block has."""
        if self.capacity_factor is not None:
            choices = within_capacity(choices, weights, self.all_experts, self.capacity_factor)
            weights = weights.masked_fill(choices >= self.all_experts, 0)
        if self.shares is None or self.real is not None:
            return self._computed(hidden, choices, weights, given)
        tokens = Tokens((len(hidden),), self.shares.size)
        nobody = self.all_experts  # what padding chooses
        part = local_part(choices - nobody, tokens, self.shares.index) + nobody
        out = self._computed(cut(hidden, tokens, self.shares), part, cut(weights, tokens, self.shares), given)
        return gather(out, tokens, self.shares)

    def _computed(self, hidden: Tensor, choices: Tensor, weights: Tensor, given: Tensor) -> Tensor:
        """The experts' output for this rank's tokens."""
        if self.etp is not None:  # each rank computes a part of every expert: sum at the exit, gradients at the entry
            hidden, weights = copy_to_region(hidden, self.etp), copy_to_region(weights, self.etp)
        if self.ep.size == 1 and self.shares is None and self.capacity_factor is None:
            out: Tensor = super().forward(hidden, choices, weights)
        else:
            out = self._dispatched(hidden, choices, weights, given)
        return out if self.etp is None else reduce_from_region(out, self.etp)

    def _dispatched(self, hidden: Tensor, choices: Tensor, weights: Tensor, given: Tensor) -> Tensor:
        """Weights are applied where the tokens are: they need not travel, nor does their gradient."""
        tokens = hidden.tensor_split(self.chunks) if self.chunks > 1 else (hidden,)
        routes = route(choices.tensor_split(self.chunks), self.all_experts, self.ep)
        there = [Transit(plan.splits, self.ep) for plan in routes]
        back = [Transit(plan.splits.swapped(), self.ep) for plan in routes]
        going = [send(spread(tokens[0], routes[0].order), there[0])]
        if self.beside is not None:
            self.beside.start(given)
        coming = []
        for i, plan in enumerate(routes):
            if i + 1 < len(routes):
                going.append(send(spread(tokens[i + 1], routes[i + 1].order), there[i + 1]))
            rows = receive(going[i], there[i])
            coming.append(send(self._expert_outputs(rows, plan), back[i]))
        outputs = [
            weighted_sum(receive(coming[i], back[i]), part, routes[i].order).to(hidden.dtype)
            for i, part in enumerate(weights.tensor_split(self.chunks) if self.chunks > 1 else (weights,))
        ]
        return torch.cat(outputs) if self.chunks > 1 else outputs[0]

    def _expert_outputs(self, rows: Tensor, plan: Route) -> Tensor:
        """Rows [n, h] through the local expert of each, by the model's own forward or, where that is known, faster."""
        if takes(self):
            order = plan.by_expert
            if order is None:
                return grouped(self, rows, plan.load)
            return regroup(grouped(self, regroup(rows, order), plan.load), order.swapped())
        if len(rows):
            out: Tensor = super().forward(rows, plan.experts.unsqueeze(1), rows.new_ones(len(rows), 1))
            return out
        # Nothing to compute, but the backward's exchange must run here too, and the weights get zero gradients.
        return rows + sum(p.flatten()[:1].sum() for p in self.parameters()) * 0


@cache
def _class(base: type) -> type[nn.Module]:
    return type(f"Parallel{base.__name__}", (Experts, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def become_experts(
    module: Any,
    ep: AxisComm,
    etp: AxisComm | None,
    all_experts: int,
    capacity_factor: float | None = None,
    shares: AxisComm | None = None,
    chunks: int = 1,
    beside: Beside | None = None,
) -> None:
    """Turn an experts module whose parameters are already local into this rank's share of it."""
    base: type = type(module)
    module.__class__ = _class(base)
    module.ep, module.etp, module.shares, module.all_experts = ep, etp, shares, all_experts
    module.capacity_factor, module.chunks, module.beside = capacity_factor, chunks, beside
    module.num_experts = all_experts // ep.size


def count_once(module: nn.Module, etp: AxisComm) -> None:
    """Let what `module`, whole on every rank of `etp`, adds to a sum over the axis be that of the first rank alone."""
    share = float(etp.index == 0)
    module.register_forward_hook(lambda module, args, out: out * share)
