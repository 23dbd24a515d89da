"""The comparison of a layout's run with one process: the first thing that differs, in the order it happens.

It is: losses, norms, gradients, weights, optimizer states, metrics and samples, with one rule of size. It is not: the
runs (`runs.py`) or the guess at a cause (`causes.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from parallax.strategies.fingerprint import fingerprint
from parallax.strategies.tree import tensors_of
from parallax.strategies.verify.causes import Clue, likely_cause
from parallax.strategies.verify.observe import Observation
from parallax.strategies.verify.runs import RankResult
from parallax.strategies.verify.whole import Assembled, assemble_whole

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 5e-2}
"""Largest difference, relative to the largest element of a tensor, that counts as rounding."""


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        what: "sample", "initial weight", "loss", "norm", "gradient", "weight", "moment" or "metric".
        name: FQN or name of the metric; empty for the loss and the norm.
        step: from 0.
        phase: where it arises: "data", "setup", "forward", "backward" or "update".
        error: relative to the largest element of the right value.
        ranks: ranks that hold the wrong value.
        cause: likely cause.
    """

    what: str
    name: str
    step: int
    phase: str
    error: float
    ranks: tuple[int, ...]
    cause: str

    def __str__(self) -> str:
        where = f" of {self.name}" if self.name else ""
        ranks = f" on rank(s) {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return (
            f"step {self.step}, {self.phase}: {self.what}{where} is off by {self.error:.1e} (relative){ranks}; "
            f"likely cause: {self.cause}"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Comparison:
    """All differences of one layout's run, in the order they arise; `first` is the one to look at.

    Args:
        ranks: what each rank saw.
        one: what one process saw.
        sizes: axis -> ranks, "m" -> micro-batches.
        tolerance: see `TOLERANCE`.
        by_step: one process started each step from the ranks' weights.
    """

    def __init__(
        self,
        ranks: list[RankResult],
        one: Observation,
        sizes: Mapping[str, int],
        tolerance: float,
        *,
        by_step: bool = False,
    ) -> None:
        self._by_step = by_step
        self._ranks, self._one, self._sizes, self._tolerance = ranks, one, sizes, tolerance
        self._noise = max(1e-3, tolerance)
        self._tied = _ties(ranks, one)
        self._zero = _zero_gradients(one)
        self._unknown: dict[str, Tensor | float] = {}
        self.notes: set[str] = set()
        self.differences = list(self._find())
        self.largest = max((d.error for d in self.differences), default=self._largest)

    _largest = 0.0

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    def _find(self) -> Iterator[Difference]:
        yield from self._samples()
        initial = self._whole("initial", None)
        yield from self._tensors("initial weight", 0, "setup", initial, self._one.initial)
        for step in range(len(self._one.losses)):
            yield from self._numbers("loss", step, "forward", self._losses(step), self._one.losses[step])
            yield from self._tensors("gradient", step, "backward", self._whole("grads", step), self._one.grads[step])
            norms = {i: r.seen.norms[step] for i, r in enumerate(self._ranks)}
            yield from self._numbers("norm", step, "update", norms, self._one.norms[step])
            self._note_unknown(step)
            right = self._one.weights[step]
            yield from self._tensors("weight", step, "update", self._whole("weights", step), right, self._unknown)
            yield from self._metrics(step)
        yield from self._moments()

    # One kind each

    def _metrics(self, step: int) -> Iterator[Difference]:
        """What `self.log` shows. Lightning averages over data ranks evenly, whatever their samples count."""
        if len({r.tokens[step] for r in self._ranks}) > 1:
            self.notes.add("metrics were not compared: data ranks have different numbers of valid tokens")
            return
        for name, want in self._one.metrics[step].items():
            got = {i: r.seen.metrics[step].get(name, float("nan")) for i, r in enumerate(self._ranks)}
            yield from self._numbers("metric", step, "forward", self._mean(got, step), want, name)

    def _samples(self) -> Iterator[Difference]:
        """No sample of a step may be read by two data ranks, and none may be left out."""
        readers = {r.coordinates["dp"]: i for i, r in reversed(list(enumerate(self._ranks)))}
        for step in range(len(self._one.losses)):
            rows = Counter(
                str(fingerprint(row)) for i in readers.values() for row in _rows(self._ranks[i].seen.batches[step])
            )
            twice = [count for count in rows.values() if count > 1]
            alone = Counter(str(fingerprint(row)) for row in _rows(self._ranks[0].seen.batches[step]))
            if twice and max(alone.values(), default=1) == 1:
                cause = f"{len(twice)} sample(s) are read by more than one data rank: the sampler's rank is wrong"
                yield Difference("sample", "", step, "data", 1.0, tuple(sorted(readers.values())), cause)
                return
        yield from self._epoch(readers)

    def _epoch(self, readers: Mapping[int, int]) -> Iterator[Difference]:
        """In an epoch every sample is read, by one data rank; all but as many as make the ranks' shares equal."""
        epochs = [epoch for i in readers.values() if (epoch := self._ranks[i].epoch) is not None]
        if len(epochs) < len(readers):
            return
        count = Counter(index for _, indices in epochs for index in indices)
        lost, twice = epochs[0][0] - len(count), sum(n - 1 for n in count.values())
        for number, what in ((lost, "read by no data rank"), (twice, "read more than once")):
            if number >= len(readers):
                cause = f"{number} of {epochs[0][0]} samples are {what} in an epoch: the sampler divides wrongly"
                yield Difference("sample", "", 0, "data", number / epochs[0][0], tuple(sorted(readers.values())), cause)

    def _losses(self, step: int) -> dict[int, float]:
        return self._mean({i: r.seen.losses[step] for i, r in enumerate(self._ranks)}, step)

    def _mean(self, values: dict[int, float], step: int) -> dict[int, float]:
        """The whole batch's value as each rank has it: the mean over data ranks by valid tokens, where a rank's own
        data index counts with that rank's value."""
        readers = {r.coordinates["dp"]: i for i, r in reversed(list(enumerate(self._ranks)))}
        weights = {i: self._ranks[i].tokens[step] for i in readers.values()}
        out = {}
        for rank, result in enumerate(self._ranks):
            mine = result.coordinates["dp"]
            parts = ((values[rank if dp == mine else i], weights[i]) for dp, i in readers.items())
            out[rank] = sum(value * weight for value, weight in parts) / sum(weights.values())
        return out

    def _moments(self) -> Iterator[Difference]:
        step = len(self._one.losses) - 1
        for key in sorted({k for state in self._one.moments.values() for k in state}):
            want = {n: s[key] for n, s in self._one.moments.items() if key in s}
            parts = [({n: s[key] for n, s in r.seen.moments.items() if key in s}, r.shards) for r in self._ranks]
            got = assemble_whole(parts, want, self._tied)
            yield from self._tensors("moment", step, "update", got, want, suffix=f" ({key})")

    def _numbers(
        self, what: str, step: int, phase: str, got: dict[int, float], want: float, name: str = ""
    ) -> Iterator[Difference]:
        errors = {rank: abs(value - want) / max(abs(want), 1e-12) for rank, value in got.items()}
        wrong = {rank: e if e == e else 1.0 for rank, e in errors.items() if not e <= self._tolerance}
        self._largest = max([self._largest, *(e for e in errors.values() if e <= self._tolerance)])
        if wrong:
            rank = max(wrong, key=lambda r: wrong[r])
            found, right = torch.tensor(got[rank]).double(), torch.tensor(want).double()
            clue = Clue(what, found, right, self._sizes, noise=self._noise)
            yield Difference(what, name, step, phase, wrong[rank], tuple(wrong), likely_cause(clue))

    def _note_unknown(self, step: int) -> None:
        """Add to `_unknown` how far each weight may be off because its gradient is known to the tolerance only.

        An optimizer that divides a gradient by its size (Adam) makes the relative error of an element of the gradient
        that of its update, and a small element beside large ones is rounding for the most part. So an update counts as
        known up to its own size times that relative error. Where the gradient is below the tolerance neither its sign
        nor, beside an optimizer's epsilon, its size is known: it may be as large as the tensor's largest, either way.
        """
        before = self._one.weights[step - 1] if step else self._one.initial
        for name, grad in self._one.grads[step].items():
            update = (self._one.weights[step][name] - before[name]).abs()
            error = (self._tolerance * grad.abs().max() / grad.abs()).nan_to_num(2.0)
            kept = 0.0 if self._by_step else self._unknown.get(name, 0.0)
            off = torch.where(error < 1, update * error, update + update.max())
            self._unknown[name] = kept + off.to(update.dtype)

    def _tensors(
        self,
        what: str,
        step: int,
        phase: str,
        got: Assembled,
        want: Mapping[str, Tensor],
        unknown: Mapping[str, Tensor | float] = MappingProxyType({}),
        suffix: str = "",
    ) -> Iterator[Difference]:
        largest = max((float(t.abs().max()) for t in want.values() if t.numel()), default=0.0)
        order = [n for n in self._one.order if n in want]
        for name in [*order, *(n for n in want if n not in order)]:
            right, found = want[name], got.tensors[name]
            scale = largest if name in self._zero else float(right.abs().max()) or largest
            spread = got.disagree.get(name, (0, 0.0))[1] / (scale or 1.0)
            off = partial(_off, right, unknown.get(name, 0.0), scale or 1.0)
            error = off(found)
            if error <= self._tolerance and spread <= self._tolerance:
                self._largest = max(self._largest, error)
                continue
            clue = Clue(what, found, right, self._sizes, replicas=spread > self._tolerance, noise=self._noise)
            wrong = dict.fromkeys(rank for rank, part in got.each(name, right) if not off(part) <= self._tolerance)
            yield Difference(
                what, name + suffix, step, phase, error if error == error else 1.0, tuple(wrong), likely_cause(clue)
            )

    def _whole(self, kind: str, step: int | None) -> Assembled:
        of = lambda seen: getattr(seen, kind) if step is None else getattr(seen, kind)[step]  # noqa: E731
        return assemble_whole([(of(r.seen), r.shards) for r in self._ranks], of(self._one), self._tied)

    def _name(self, fqn: str) -> str:
        return self._tied.get(fqn, fqn)


def _off(right: Tensor, unknown: Tensor | float, scale: float, found: Tensor) -> float:
    """Largest difference of an element beyond what is `unknown` of it, over `scale`."""
    return float(((found - right).abs() - unknown).max()) / scale


def _rows(batch: Any) -> list[Tensor]:
    """The samples of a batch: rows of its first tensor."""
    first = next((t for t in tensors_of(batch) if t.dim()), None)
    return [] if first is None else list(first)


def _zero_gradients(one: Observation) -> set[str]:
    """Parameters whose gradient vanishes in exact arithmetic: only the rounding of terms that cancel is left."""
    if not one.grads:
        return set()
    largest = max((float(t.abs().max()) for t in one.grads[0].values()), default=0.0)
    return {n for n, t in one.grads[0].items() if float(t.abs().max()) < 1e-7 * largest}


def _ties(ranks: list[RankResult], one: Observation) -> dict[str, str]:
    """Names a later stage knows a tied parameter by, for which the whole model has another."""
    foreign = {n for r in ranks for n in r.shards} - set(one.initial)
    out = {}
    for name in foreign:
        for rank in ranks:
            if name in rank.seen.initial:
                local = rank.seen.initial[name]
                shard = rank.shards[name]
                match = next((n for n, t in one.initial.items() if _same(shard, t, local)), None)
                if match:
                    out[name] = match
    return out


def _same(shard: Any, whole: Tensor, local: Tensor) -> bool:
    if shard is None:
        return whole.shape == local.shape and torch.equal(whole, local)
    return tuple(whole.shape) == shard.shape and torch.equal(shard.take(whole), local)
