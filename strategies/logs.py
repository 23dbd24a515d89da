"""`self.log` under micro-batches and pipeline stages.

It is: a recorder that stands in for `LightningModule.log` while micro-batches run, the average over
micro-batches, the trip from the last stage to the others, and the replay on every rank. It is not: a logger.

Only the last stage runs the user's step to its end, so only its records count. What was logged (names and options)
travels once and again when it changes; the values travel as one small tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from parallax.strategies.batch import weighted_mean
from parallax.strategies.comm import AxisComm
from parallax.strategies.mesh import Mesh
from parallax.strategies.tree import map_tensors

Logged = tuple[str, Any, dict[str, Any]]
"""(name, value, options) of one `self.log`."""


@dataclass
class Record:
    """One name logged with one set of options; `values` by micro-batch."""

    name: str
    options: dict[str, Any]
    values: dict[int, Any]


class Recorder:
    """Collects `log` calls by micro-batch.

    Attributes:
        microbatch: index of the micro-batch that runs now.
        records: (name, how many times the name was logged before in the micro-batch) -> Record.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        self.microbatch = 0
        self.records: dict[tuple[str, int], Record] = {}
        self._signature = signature

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Stands in for `LightningModule.log`."""
        options = self._signature.bind(self, *args, **kwargs).arguments
        options.pop("self")
        name, value = options.pop("name"), options.pop("value")
        ordinal = 0
        while (r := self.records.get((name, ordinal))) is not None and self.microbatch in r.values:
            ordinal += 1
        record = self.records.setdefault((name, ordinal), Record(name, options, {}))
        record.values[self.microbatch] = value.detach() if isinstance(value, Tensor) else value

    def averaged(self, weights: Tensor) -> list[Logged]:
        """(name, mean over micro-batches by `weights`, options); a Metric stays itself."""
        out: list[Logged] = []
        for record in self.records.values():
            first = next(iter(record.values.values()))
            if isinstance(first, Metric):
                out.append((record.name, first, record.options))
                continue
            mean = weighted_mean(list(record.values.values()), weights[list(record.values)])
            out.append((record.name, mean, record.options))
        return out


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


@dataclass
class Shared:
    """What the last stage knows at the end of a step and every stage needs.

    Attributes:
        logs: (name, value, options) in the order they were logged.
        loss: the batch's loss, None in evaluation.
        extra: further outputs of the user's step.
    """

    logs: list[Logged]
    loss: Tensor | None
    extra: dict[str, Any]


class LogShare:
    """Brings the last stage's records, loss and outputs to every stage of its pipeline.

    Args:
        comm: the pipeline axis; its last index is the source.
    """

    def __init__(self, comm: AxisComm) -> None:
        self._comm = comm
        self._known: list[tuple[str, dict[str, Any], str | None]] = []

    def __call__(self, mine: Shared, module: Any, device: torch.device) -> Shared:
        """The last stage's `Shared`, on every stage. `mine` matters on the last stage only."""
        comm = self._comm
        if comm.size == 1:
            return mine
        last = comm.size - 1
        what = [(name, options, _metric_name(module, value)) for name, value, options in mine.logs]
        numbers = [0.0 if isinstance(value, Metric) else value for _, value, _ in mine.logs]
        # Flags and loss, then the values of the names every stage knows already.
        box = torch.zeros(3 + len(self._known), dtype=torch.float64, device=device)
        if comm.is_last:
            box[0] = what != self._known
            box[1] = bool(mine.extra)
            box[2] = mine.loss if mine.loss is not None else float("nan")
            if what == self._known and numbers:
                box[3:] = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers])
        comm.broadcast(box, src=last)
        changed, has_extra = (bool(flag) for flag in box[:2].tolist())
        values = box[3:]
        if changed:
            self._known, numbers = comm.broadcast_object((what, [float(n) for n in numbers]), src=last)
            values = torch.tensor(numbers, dtype=torch.float64, device=device)
        logs: list[Logged] = []
        for value, (name, options, metric) in zip(values, self._known, strict=True):
            logs.append((name, value if metric is None else self._metric(module, metric, last), options))
        extra = mine.extra
        if has_extra:
            extra = comm.broadcast_object(map_tensors(lambda t: t.detach().cpu(), mine.extra), src=last)
            extra = map_tensors(lambda t: t.to(device), extra)
        return Shared(logs, box[2] if mine.loss is not None or not comm.is_last else None, extra)

    def _metric(self, module: Any, name: str, src: int) -> Metric:
        """A torchmetrics object logged by name: its state is copied from the last stage, then it is the local one."""
        metric: Any = module.get_submodule(name)
        names = (*metric._defaults, "_update_count", "_forward_cache")
        state = self._comm.broadcast_object({key: getattr(metric, key) for key in names}, src=src)
        for key, value in state.items():
            setattr(metric, key, value)
        metric._computed = None
        assert isinstance(metric, Metric)
        return metric


def count_samples_once(module: nn.Module, mesh: Mesh) -> None:
    """Let every torchmetrics object in `module` gather over the data axis only: along tp and pp it is the same."""
    data = mesh["data"]
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.process_group is None:
            metric.process_group = data.group
            metric.distributed_available_fn = lambda: data.size > 1


def _metric_name(module: Any, value: Any) -> str | None:
    if not isinstance(value, Metric):
        return None
    return next(name for name, child in module.named_modules() if child is value)


def replay(module: Any, logs: list[Logged]) -> None:
    """Log for real, on this rank."""
    for name, value, options in logs:
        module.log(name, value, **options)
