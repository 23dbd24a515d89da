"""Does the layout fit the machines: tensor and expert parallelism inside the fast domain, or a word about the price.

It is: the check after placement, with the better layout and the predicted loss of time. It is not: a planner of
layouts; it only tries smaller tp or ep for the layout it was given.

The *fast domain* of a device is what GPU links (NVLink, Infinity Fabric, Xe Link) reach from it, over several nodes
where a fabric joins them. On a node without any such link it is the node.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from parallax.plugins.topology.cost import groups_of
from parallax.plugins.topology.description import Cluster, Slot
from parallax.plugins.topology.placement import Placement, place, shape_of
from parallax.plugins.topology.rates import Rates
from parallax.plugins.topology.sites import Sites
from parallax.plugins.topology.traffic import AxisTraffic, ModelShape, traffic_of
from parallax.strategies.layout import Layout

CHECKED = {"tp": "tensor_parallel_size", "ep": "expert_parallel_size"}
MODES = ("refuse", "warn", "allow")


@dataclass(frozen=True)
class Misfit:
    """An axis whose groups leave the fast domain although they should not.

    Attributes:
        axis: "tp" or "ep".
        groups: how many of its groups leave, of how many.
        largest: devices in the largest fast domain.
        better: a layout that stays inside; None when there is none.
        loss: how many times as long as in the better layout; of all communication where the model is known, else of a
            byte on this axis. None without a better layout, or when that does without the axis.
        whole: whether `loss` is of all communication.
    """

    axis: str
    groups: tuple[int, int]
    largest: int
    better: Layout | None
    loss: float | None
    whole: bool

    def describe(self, layout: Layout) -> str:
        """One sentence for a person."""
        size = getattr(layout, CHECKED[self.axis])
        text = (
            f"{self.axis}{size}: {self.groups[0]} of {self.groups[1]} groups leave the fast domain, the largest of "
            f"which has {self.largest} device{'s' if self.largest > 1 else ''}"
        )
        if self.better is None:
            return text + f"; no smaller {self.axis} stays inside on these nodes"
        text += f"; `{self.better}` stays inside"
        if self.loss is None:
            return text
        what = f"`{layout}` communicates" if self.whole else f"a byte of {self.axis} takes"
        return f"{text}, and {what} {self.loss:.3g} times as long by prediction"


def check_fit(
    cluster: Cluster,
    slots: Sequence[Slot],
    layout: Layout,
    *,
    on_misfit: str = "refuse",
    placement: Placement | None = None,
    model: ModelShape | None = None,
    rates: Rates | None = None,
) -> tuple[Misfit, ...]:
    """See that tp and ep lie in fast domains in the best order of the ranks.

    Args:
        cluster, slots, layout, rates: as for `place`.
        on_misfit: "refuse" raises, "warn" gives a Python warning, "allow" only returns what was found.
        placement: the order that will be used; default: the one `place` finds.
        model: sizes for the predicted loss; default: the assumed volumes.

    Raises:
        ValueError: a misfit and `on_misfit` is "refuse"; or `on_misfit` is none of the three; or as `place`.
    """
    if on_misfit not in MODES:
        raise ValueError(f"on_misfit must be one of {', '.join(MODES)}; got {on_misfit!r}")
    asked, layout = layout, layout.resolve(len(slots))
    rates = rates or Rates()
    sites = Sites.of(cluster, slots, rates)
    found = placement or place(cluster, slots, layout, traffic_of(layout, model), rates)
    domains = fast_domains(sites)
    misfits = []
    for axis in CHECKED:
        left, total = _leaving(domains, layout, found, axis)
        if left:
            better = _better(cluster, slots, asked, axis, domains, model, rates)
            loss = None if better is None else _loss(axis, layout, found, *better, model)
            largest = int(torch.bincount(domains).max())
            misfits.append(Misfit(axis, (left, total), largest, better and better[0], loss, model is not None))
    text = "; ".join(misfit.describe(layout) for misfit in misfits)
    if misfits and on_misfit == "refuse":
        raise ValueError(f"{text}. To run it all the same, ask for a warning only (on_misfit='warn')")
    if misfits and on_misfit == "warn":
        warnings.warn(text, stacklevel=2)
    return tuple(misfits)


def fast_domains(sites: Sites) -> Tensor:
    """Number of the fast domain of each slot. int64 [N]."""
    width = max(kind.size for kind in sites.kinds)
    first = torch.zeros(len(sites.kinds), width, dtype=torch.int64)  # of the domain of an ordinal, its first ordinal
    for k, kind in enumerate(sites.kinds):
        if len(kind.domains) < kind.size:  # without any link all ordinals keep 0: one domain
            for domain in kind.domains:
                first[k, list(domain)] = domain[0]
    local = sites.node * width + first[sites.kind, sites.ordinal]
    joined = int(local.max()) + 1 + sites.key
    number = torch.where(sites.key >= 0, joined, local)
    return torch.unique(number, return_inverse=True)[1]


def _leaving(domains: Tensor, layout: Layout, placement: Placement, axis: str) -> tuple[int, int]:
    """How many groups of `axis` lie in more than one domain, and how many there are."""
    if getattr(layout, CHECKED[axis]) == 1:
        return 0, 0
    (groups,) = groups_of(shape_of(layout), [AxisTraffic(axis, "", getattr(layout, CHECKED[axis]), 0.0)])
    where = domains[torch.tensor(placement.slot_of())][groups.members]
    return int((where != where[:, :1]).any(1).sum()), len(where)


def _better(
    cluster: Cluster,
    slots: Sequence[Slot],
    asked: Layout,
    axis: str,
    domains: Tensor,
    model: ModelShape | None,
    rates: Rates,
) -> tuple[Layout, Placement] | None:
    """The layout with the largest smaller size of `axis` that stays inside, and its placement.

    What tp gives up goes to pp, so that a rank holds as much as before, or else to dp.
    """
    size = getattr(asked, CHECKED[axis])
    for smaller in (d for d in range(size - 1, 0, -1) if size % d == 0):
        for other in _smaller(asked, axis, smaller):
            try:
                layout = other.resolve(len(slots))
            except ValueError:
                continue
            found = place(cluster, slots, layout, traffic_of(layout, model), rates)
            if _leaving(domains, layout, found, axis)[0] == 0:
                return other, found
    return None


def _loss(
    axis: str, layout: Layout, found: Placement, better: Layout, instead: Placement, model: ModelShape | None
) -> float | None:
    """See `Misfit.loss`."""
    if model is not None:
        after = sum(instead.after.values())
        return sum(found.after.values()) / after if after else None
    if axis not in instead.after:
        return None
    other = better.resolve(layout.world_size)
    bytes_of = [next(t.edge_bytes for t in traffic_of(each) if t.axis == axis) for each in (layout, other)]
    return found.after[axis] / bytes_of[0] / (instead.after[axis] / bytes_of[1])


def _smaller(asked: Layout, axis: str, size: int) -> list[Layout]:
    if axis == "ep":
        return [replace(asked, expert_parallel_size=size)]
    moved = asked.tensor_parallel_size // size
    if asked.expert_tensor_parallel_size is not None:
        asked = replace(asked, expert_tensor_parallel_size=gcd(asked.experts_cut_over, size))
    pp, dp = asked.pipeline_parallel_size, asked.data_parallel_size
    return [
        replace(asked, tensor_parallel_size=size, pipeline_parallel_size=pp * moved),
        replace(asked, tensor_parallel_size=size, data_parallel_size=None if dp is None else dp * moved),
    ]
