"""Which row goes where: from a router's choices to an order of rows and the sizes of the exchange.

It is: integer arithmetic on the choices, one small exchange of counts, and the one host read that split sizes
need. It is not: the movement of activations (`functions.py`) or the router, which is the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import Tensor

from parallax.strategies.comm import AxisComm


@dataclass(frozen=True)
class Splits:
    """Rows sent to and received from each rank of the axis, in axis order."""

    sent: list[int]
    received: list[int]

    def swapped(self) -> Splits:
        return Splits(self.received, self.sent)


@dataclass(frozen=True)
class Permutation:
    """An order of rows and the one that undoes it: `rows[there][back]` are `rows`."""

    there: Tensor
    back: Tensor

    def swapped(self) -> Permutation:
        return Permutation(self.back, self.there)


def by_value(values: Tensor) -> Permutation:
    """The order by `values`, of equals the first first."""
    there = torch.argsort(values, stable=True)
    back = torch.empty_like(there)
    back[there] = torch.arange(len(there), device=there.device)
    return Permutation(there, back)


@dataclass(frozen=True)
class Order:
    """The (token, choice) pairs that are sent, in the order of sending: by expert, then by token.

    Attributes:
        all_pairs: the order of the flattened [tokens, k] choices; those that are not sent come last.
        sent: how many are.
        num_tokens, top_k: shape of the choices.
    """

    all_pairs: Permutation
    sent: int
    num_tokens: int
    top_k: int

    @property
    def pairs(self) -> Tensor:
        """Index of each sent pair."""
        return self.all_pairs.there[: self.sent]

    @cached_property
    def tokens(self) -> Tensor:
        """Token of each sent pair."""
        return self.pairs // self.top_k

    def by_token(self, rows: Tensor) -> Tensor:
        """Rows in the order of sending -> [tokens, k, h]; pairs that were not sent are zero."""
        total = self.num_tokens * self.top_k
        if self.sent == total:
            whole = rows.index_select(0, self.all_pairs.back)
        else:
            whole = rows.new_zeros(total, *rows.shape[1:])
            whole[self.pairs] = rows
        return whole.view(self.num_tokens, self.top_k, *rows.shape[1:])


@dataclass(frozen=True)
class Route:
    """Everything one dispatch and its combine need.

    Attributes:
        order: which rows are sent, in which order.
        splits: sizes of the exchange.
        experts: local expert of each received row, [rows received].
        load: rows received for each local expert.
    """

    order: Order
    splits: Splits
    experts: Tensor
    load: list[int]

    @cached_property
    def by_expert(self) -> Permutation | None:
        """The order of received rows, which come by rank, by local expert; None where they are in that order."""
        return by_value(self.experts) if len(self.load) > 1 and len(self.splits.received) > 1 else None


def within_capacity(choices: Tensor, weights: Tensor, num_experts: int, factor: float) -> Tensor:
    """`choices` [tokens, k] with `num_experts` (no expert) where an expert is chosen by more than its capacity.

    The capacity is ceil(factor * tokens * k / experts) of the tokens on this rank (Lepikhin et al. 2020, "GShard",
    section 3.2). An expert keeps those that weigh it highest, of equals the first. Nothing waits for the device.
    """
    flat = choices.reshape(-1)
    capacity = ceil(factor * flat.numel() / num_experts)
    by_weight = torch.argsort(weights.detach().reshape(-1), descending=True, stable=True)
    order = by_weight[torch.argsort(flat[by_weight], stable=True)]  # by expert, then by weight
    queued = flat[order]
    place = torch.arange(len(flat), device=flat.device) - torch.searchsorted(queued, queued)
    kept = flat.clone()
    kept[order] = torch.where(place < capacity, queued, num_experts)
    return kept.view_as(choices)


def route(parts: Sequence[Tensor], num_experts: int, comm: AxisComm) -> list[Route]:
    """Plan a dispatch over `comm` for each of `parts`, choices [tokens, k] below `num_experts`. Collective.

    Rank i of the axis holds experts [i E / n, (i + 1) E / n). An index of `num_experts` or more means no expert.
    The counts travel as one message of E numbers for each part; reading the split sizes is the only wait for the
    device. Every rank has as many parts; any of them may be empty.
    """
    flat = [choices.reshape(-1).long() for choices in parts]
    counts = flat[0].new_zeros(len(parts), num_experts + 1)
    for count, each in zip(counts, flat, strict=True):  # a bincount would wait for the largest index
        count.scatter_add_(0, each.clamp(max=num_experts), torch.ones_like(each))
    sent = counts[:, :num_experts].t().contiguous().view(comm.size, -1, len(parts))
    received = torch.empty_like(sent)
    comm.all_to_all_into(received, sent)
    sizes = torch.cat([sent.sum(1), received.sum(1), received.sum(0)]).t().tolist()  # [parts, 2 ranks + local experts]
    local = torch.arange(sent.shape[1], device=sent.device).repeat(comm.size)
    routes = []
    for at, (choices, each) in enumerate(zip(parts, flat, strict=True)):
        size, mine = sizes[at], received[..., at]
        splits, load = Splits(size[: comm.size], size[comm.size : 2 * comm.size]), size[2 * comm.size :]
        order = Order(by_value(each), sum(splits.sent), choices.shape[0], choices.shape[1])
        experts = torch.repeat_interleave(local, mine.flatten(), output_size=sum(splits.received))
        routes.append(Route(order, splits, experts, load))
    return routes
