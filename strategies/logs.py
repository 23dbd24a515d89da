"""`self.log` under micro-batches and pipeline stages.

It is: a recorder that stands in for `LightningModule.log` while micro-batches run, one value from those of the
micro-batches, and the replay on every rank. It is not: a logger, or the trip between stages (`share.py`).

Only the last stage runs the user's step to its end, so only its records count.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torchmetrics import Metric

from parallax.strategies.batch import weighted_mean
from parallax.strategies.comm import AxisComm
from parallax.strategies.metrics import MetricShare

REDUCTIONS = ("mean", "sum", "min", "max")
"""What Lightning's `reduce_fx` may be, by name or as torch's function of that name ("avg" means "mean")."""


class Logged(NamedTuple):
    """One `self.log` of a batch; a tuple, so that a tensor in it is found.

    Attributes:
        name, options: as given.
        value: a number as a 0-dim tensor; for a metric its value of this batch, or None.
        metric: name of the metric in the module, if one was logged.
    """

    name: str
    options: dict[str, Any]
    value: Any
    metric: str | None = None


@dataclass
class Record:
    """One name logged with one set of options; `values` and `sizes` (the option batch_size) by micro-batch."""

    name: str
    options: dict[str, Any]
    values: dict[int, Any]
    sizes: dict[int, int]


class Recorder:
    """Collects `log` calls by micro-batch.

    Attributes:
        records: (name, how many times the name was logged before in the micro-batch) -> Record.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        self.records: dict[tuple[str, int], Record] = {}
        self._microbatch: int | None = 0
        self._signature = signature

    def start(self, microbatch: int | None) -> None:
        """A micro-batch begins; None where nothing of it is to be recorded."""
        self._microbatch = microbatch

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Stands in for `LightningModule.log`."""
        if self._microbatch is None:
            return
        options = self._signature.bind(self, *args, **kwargs).arguments
        options.pop("self")
        name, value = options.pop("name"), options.pop("value")
        size = options.pop("batch_size", None)
        ordinal = 0
        while (r := self.records.get((name, ordinal))) is not None and self._microbatch in r.values:
            ordinal += 1
        record = self.records.setdefault((name, ordinal), Record(name, options, {}, {}))
        record.values[self._microbatch] = value.detach() if isinstance(value, Tensor) else value
        if size is not None:
            record.sizes[self._microbatch] = int(size)

    def logged(self, weights: Tensor, metrics: MetricShare, along: AxisComm | None = None) -> list[Logged]:
        """One entry per record, its micro-batches reduced as `reduce_fx` says; means are weighed by `weights`.

        With `along` its ranks are reduced likewise: they log the same names, with weights of their own.
        """
        return [self._one(record, weights, metrics, along) for record in self.records.values() if record.values]

    def _one(self, record: Record, weights: Tensor, metrics: MetricShare, along: AxisComm | None) -> Logged:
        first = next(iter(record.values.values()))
        options = record.options
        if record.sizes:
            options = {**options, "batch_size": sum(record.sizes.values())}
        if isinstance(first, Metric):
            return Logged(record.name, options, metrics.value_of_batch(first), metrics.name_of(first))
        which = list(record.values)
        value = reduced(options.get("reduce_fx", "mean"), list(record.values.values()), weights[which], along)
        return Logged(record.name, options, value)


def reduced(how: Any, values: Sequence[Any], weights: Tensor, along: AxisComm | None = None) -> Tensor:
    """One number from one per micro-batch (and rank of `along`), in fp64, as `reduce_fx` reduces over batches.

    Raises:
        ValueError: a reduction Lightning does not know either.
    """
    name = how if isinstance(how, str) else getattr(how, "__name__", str(how))
    name = {"avg": "mean"}.get(name.lower(), name.lower())
    if name not in REDUCTIONS:
        raise ValueError(f"self.log(reduce_fx={how}) is not supported; use one of {', '.join(REDUCTIONS)}")
    if name == "mean":
        return weighted_mean(values, weights, along)
    numbers = torch.stack([torch.as_tensor(v, device=weights.device).double().reshape(()) for v in values])
    number = numbers.sum() if name == "sum" else numbers.min() if name == "min" else numbers.max()
    if along is not None:
        along.all_reduce(number, getattr(ReduceOp, name.upper()))
    return number


@contextmanager
def recording(module: Any, active: bool = True) -> Iterator[Recorder]:
    """Within, when `active`, `module.log` records instead of logging."""
    recorder = Recorder(inspect.signature(type(module).log))
    if not active:
        yield recorder
        return
    module.__dict__["log"] = recorder.log
    try:
        yield recorder
    finally:
        del module.__dict__["log"]


def replay(module: Any, logs: Sequence[Logged], metrics: MetricShare) -> None:
    """Log for real, on this rank."""
    for entry in logs:
        value = entry.value if entry.metric is None else metrics.restore(entry.metric, entry.value)
        module.log(entry.name, value, **entry.options)
