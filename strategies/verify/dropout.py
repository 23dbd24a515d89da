"""A layout with dropout on: other random numbers than one process, so statistics, and masks between ranks.

It is: the note of every dropout of a run (`Masks`), and what must hold: the mean loss over the steps equals that of
one process within a bound computed from both, as many elements are dropped as the module says, and between ranks that
hold the same tokens a mask is the same where they hold the same thing and another where each holds its part. It is
not: a comparison of values, which is made with dropout off.

Nothing of the product says which mask must agree: a tensor that has the shape here that it has in one process is
held by all ranks of "tp", any other is cut over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import sqrt
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LEAST_STEPS = 8
SIGMAS = 5.0
"""Standard errors a mean may be off by: once in two million by chance."""


@dataclass(frozen=True)
class Mask:
    """One dropout: of which shape, what identifies the mask drawn, how many of how many elements were dropped, and the
    rate asked for. Dropout inside an attention kernel shows no mask: the state it is drawn from stands for it."""

    shape: tuple[int, ...]
    identity: int
    dropped: int
    elements: int
    rate: float


@dataclass
class Masks:
    """Masks of a run: FQN of the innermost module -> in the order they were drawn."""

    drawn: dict[str, list[Mask]] = field(default_factory=dict)


class WatchDropout(TorchFunctionMode):
    """Notes every dropout of forwards (not of what is recomputed in a backward)."""

    def __init__(self, masks: Masks) -> None:
        super().__init__()
        self._masks = masks
        self.running: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout and self.running and torch._C._current_graph_task_id() == -1:
            return self._dropout(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention and self.running and torch._C._current_graph_task_id() == -1:
            rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if rate:
                query = args[0] if args else kwargs["query"]
                self._note(Mask(tuple(query.shape[:-1]), hash(torch.get_rng_state().numpy().tobytes()), 0, 0, rate))
        return func(*args, **kwargs)

    def _dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        out: Tensor = func(input, p, training, inplace)
        if p and training:
            live = input.detach() != 0 if not inplace else torch.ones_like(out, dtype=torch.bool)
            gone = (out.detach() == 0) & live
            identity = hash((tuple(out.shape), gone.reshape(-1).cpu().numpy().tobytes()))
            self._note(Mask(tuple(out.shape), identity, int(gone.sum()), int(live.sum()), p))
        return out

    def _note(self, mask: Mask) -> None:
        self._masks.drawn.setdefault(self.running[-1], []).append(mask)


@contextmanager
def watched(module: nn.Module, masks: Masks) -> Iterator[None]:
    """Inside, dropouts in the forwards of `module` are noted in `masks`."""
    mode = WatchDropout(masks)
    hooks: list[Any] = []
    for name, child in module.named_modules():
        hooks.append(child.register_forward_pre_hook(lambda m, args, name=name: mode.running.append(name)))
        # A pipeline stage ends inside a module; its forward is over then, too.
        hooks.append(child.register_forward_hook(lambda m, args, out: mode.running.pop() and None, always_call=True))
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class DropoutRun:
    """What a rank, or one process, saw: losses by step, masks, its place, and what its batches weigh."""

    losses: list[float]
    masks: Masks
    coordinates: Mapping[str, int] = field(default_factory=dict)
    tokens: Sequence[float] = ()


@dataclass(frozen=True)
class Fault:
    """What does not hold: "mean loss", "drop rate" or "mask"; where, how far, on which ranks, and why it must."""

    what: str
    name: str
    error: float
    ranks: tuple[int, ...]
    cause: str


def judge(ranks: Sequence[DropoutRun], one: DropoutRun, whole: Mapping[str, list[Mask]]) -> list[Fault]:
    """Everything that does not hold.

    Args:
        ranks: of the layout.
        one: one process on the same batches, with other random numbers.
        whole: masks one process draws in one micro-batch with the tokens of one rank.
    """
    return [*_rates(ranks, whole), *_masks(ranks, whole), *_loss(ranks, one)]


def _loss(ranks: Sequence[DropoutRun], one: DropoutRun) -> Iterator[Fault]:
    """The mean of the differences step by step, whose standard error is known from their spread."""
    readers = {r.coordinates["dp"]: r for r in reversed(ranks)}
    off = []
    for step, right in enumerate(one.losses):
        weights = {dp: r.tokens[step] for dp, r in readers.items()}
        value = sum(readers[dp].losses[step] * weights[dp] for dp in readers) / sum(weights.values())
        off.append(value - right)
    bound = SIGMAS * max(stdev(off), 1e-12) / sqrt(len(off))
    if not abs(mean(off)) <= bound:
        cause = (
            f"over {len(off)} steps the mean loss is off by {mean(off):+.3g}, more than chance allows ({bound:.2g}): "
            f"dropped elements are not replaced by larger ones, or not dropped at all"
        )
        yield Fault("mean loss", "", abs(mean(off)), tuple(range(len(ranks))), cause)


def _rates(ranks: Sequence[DropoutRun], whole: Mapping[str, list[Mask]]) -> Iterator[Fault]:
    """How many elements each module drops of all it was given, and whether it drops at all."""
    everyone = tuple(range(len(ranks)))
    for name in sorted(whole):
        here = [i for i, r in enumerate(ranks) if name in r.masks.drawn]
        drawn = [m for i in here for m in ranks[i].masks.drawn[name]]
        elements, asked = sum(m.elements for m in drawn), whole[name][0].rate
        if not drawn:
            yield Fault("drop rate", name, asked, everyone, f"no rank drops anything, though one process drops {asked}")
        elif drawn[0].rate != asked:
            cause = f"the rate is {drawn[0].rate}, and {asked} in one process"
            yield Fault("drop rate", name, abs(drawn[0].rate - asked), tuple(here), cause)
        elif elements:
            rate, spread = sum(m.dropped for m in drawn) / elements, sqrt(asked * (1 - asked) / elements)
            if abs(rate - asked) > SIGMAS * spread * sqrt(len(here)):  # replicas drop the same elements
                cause = f"{rate:.4f} of {elements:,} elements were dropped, {asked} were to be"
                yield Fault("drop rate", name, abs(rate - asked), tuple(here), cause)


def _masks(ranks: Sequence[DropoutRun], whole: Mapping[str, list[Mask]]) -> Iterator[Fault]:
    """Masks of ranks that differ only in tp, and of ranks that differ only in the samples they read."""
    for axis in ("tp", "data"):
        for group in _groups(ranks, axis):
            for name in sorted(ranks[group[0]].masks.drawn):
                yield from _compare(ranks, group, name, axis, whole.get(name, []))


def _groups(ranks: Sequence[DropoutRun], axis: str) -> list[list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    others = ("pp", "data") if axis == "tp" else ("pp", "tp")
    for i, r in enumerate(ranks):
        found.setdefault(tuple(r.coordinates[a] for a in others), []).append(i)
    return [group for group in found.values() if len(group) > 1]


def _compare(ranks: Sequence[DropoutRun], group: list[int], name: str, axis: str, whole: list[Mask]) -> Iterator[Fault]:
    drawn = [ranks[i].masks.drawn.get(name, []) for i in group]
    for at, masks in enumerate(zip(*drawn, strict=False)):
        right = whole[at % len(whole)] if whole else None
        alike = axis == "tp" and right is not None and masks[0].shape == right.shape
        same = [i for i, m in zip(group, masks, strict=True) if m.identity == masks[0].identity]
        if alike and len(same) < len(group):
            cause = "all ranks of tp hold this tensor, but drop different elements of it: they drew different numbers"
            yield Fault("mask", name, 1.0, tuple(i for i in group if i not in same), cause)
            return
        if not alike and len(same) > 1 and _is_large(masks[0]):
            what = "each rank of tp holds its own part" if axis == "tp" else "the ranks of data read other samples"
            cause = f"{what}, but the same elements are dropped on several: they drew the same numbers"
            yield Fault("mask", name, 1.0, tuple(same), cause)
            return


def _is_large(mask: Mask) -> bool:
    """Whether two masks that are drawn apart are the same less than once in two million."""
    return mask.elements == 0 or mask.elements * min(mask.rate, 1 - mask.rate) >= 15
