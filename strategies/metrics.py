"""torchmetrics objects of the user's module under micro-batches and pipeline stages.

It is: what keeps a metric's value right on every rank: each sample counts once over the data axis, every stage
computes from the last stage's state, and the value of a step is that of the whole batch. It is not: logging
(`logs.py`).

Only the last stage runs the user's step to its end, so only its metrics are updated. Their state travels when
`compute` is called outside a step, which every rank does in the same hook; a step itself sends one number for a
metric that is logged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from parallax.strategies.comm import AxisComm
from parallax.strategies.mesh import Mesh
from parallax.strategies.tree import map_tensors


class MetricShare:
    """The metrics of one module at a layout.

    Args:
        module: the user's LightningModule; every metric in it is prepared, until `release`.
        mesh: where this rank sits.
        source: index on "pp" of the rank that holds the last stage.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, source: int) -> None:
        self._module = module
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._in_step = False
        self._saved: dict[int, tuple[Metric, dict[str, Any]]] | None = None
        self._batch: dict[int, Metric] = {}
        self._called: set[int] = set()

        def called(metric: Metric, args: Any, kwargs: Any, output: Any) -> None:
            self._forward_called(metric, args, kwargs)

        # Functions, not methods or groups: a metric must remain one that can be copied.
        self._hooks = [m.register_forward_hook(called, with_kwargs=True) for m in metrics]
        self._before = [(m, m.dist_sync_fn, m.distributed_available_fn) for m in metrics]
        data = mesh["data"]

        def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
            return gather_all_tensors(tensor, group=group or data.group)

        along = mesh["cp"]

        def gather_sequence(tensor: Tensor, group: Any = None) -> list[Tensor]:
            return gather_all_tensors(tensor, group=along.group)

        self._whole_sequences = gather_sequence, lambda: along.size > 1  # a batch is that of a data rank: whole
        for metric in metrics:
            metric.dist_sync_fn = metric.dist_sync_fn or gather
            metric.distributed_available_fn = lambda: data.size > 1
            if mesh.size("pp") > 1:
                _on_last_stage(metric, mesh["pp"], source, lambda: self._in_step, self._changes)

    def release(self) -> None:
        """Make the metrics ordinary ones again."""
        for hook in self._hooks:
            hook.remove()
        for metric, gather, available in self._before:
            metric.dist_sync_fn, metric.distributed_available_fn = gather, available
            _as_it_was(metric)

    # One step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the micro-batches of one batch."""
        self._in_step = True
        self._called.clear()
        try:
            yield
        finally:
            self._in_step = False

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Within, updates of metrics leave nothing behind: the user's step runs up to the end of an earlier stage."""
        saved = self._saved = {}
        try:
            yield
        finally:
            self._saved = None
            for metric, state in saved.values():
                for name, value in state.items():
                    setattr(metric, name, value)

    def _changes(self, metric: Any) -> None:
        """Called before a metric takes something in."""
        if self._saved is not None and id(metric) not in self._saved:
            state = {name: map_tensors(Tensor.clone, getattr(metric, name)) for name in metric._defaults}
            kept = {name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")}
            self._saved[id(metric)] = metric, state | kept

    def _forward_called(self, metric: Any, args: Any, kwargs: Any) -> None:
        """Called after `metric(...)`: a second metric sees this batch only."""
        if not self._in_step or self._saved is not None:
            return
        batch = self._batch.get(id(metric))
        if batch is None:
            batch = self._batch[id(metric)] = metric.clone()
            if not metric.dist_sync_on_step:
                batch.dist_sync_fn, batch.distributed_available_fn = self._whole_sequences
        if id(metric) not in self._called:
            self._called.add(id(metric))
            batch.reset()
        batch.update(*args, **kwargs)

    def name_of(self, metric: Metric) -> str:
        """Its name in the module.

        Raises:
            ValueError: it is no attribute of the module, so that the other ranks cannot know it.
        """
        name = next((name for name, child in self._module.named_modules() if child is metric), None)
        if name is None:
            raise ValueError(
                f"self.log was given a {type(metric).__name__} that is no attribute of {type(self._module).__name__}; "
                f"assign it in __init__ (self.metric = ...)"
            )
        return name

    def value_of_batch(self, metric: Metric) -> Any:
        """What `metric(...)` would have returned for the whole batch; None when the step only called `update`."""
        return self._batch[id(metric)].compute() if id(metric) in self._called else None

    def restore(self, name: str, value: Any) -> Metric:
        """The metric called `name`, whose value of the last batch is `value`."""
        metric: Any = self._module.get_submodule(name)
        metric._forward_cache = value
        assert isinstance(metric, Metric)
        return metric


def _on_last_stage(
    metric: Any, comm: AxisComm, source: int, in_step: Callable[[], bool], changes: Callable[[Any], None]
) -> None:
    """Let `compute`, outside a step, take the state of the last stage first (collective there, on every rank), and
    tell `changes` of a metric before it takes something in.

    The class is exchanged, not the methods: torchmetrics makes them anew whenever a metric is copied.
    """
    cls = type(metric)

    def _wrap_compute(self: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
        local = cls._wrap_compute(self, compute)

        @functools.wraps(compute)
        def from_source(*args: Any, **kwargs: Any) -> Any:
            if not in_step():
                _take_state(self, comm, source)
            return local(*args, **kwargs)

        return from_source

    def _wrap_update(self: Any, update: Callable[..., Any]) -> Callable[..., Any]:
        local = cls._wrap_update(self, update)

        @functools.wraps(update)
        def announced(*args: Any, **kwargs: Any) -> Any:
            changes(self)
            return local(*args, **kwargs)

        return announced

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        changes(self)  # before it sets the state aside itself
        return cls.forward(self, *args, **kwargs)

    named = {"_alone": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    body = {"_wrap_compute": _wrap_compute, "_wrap_update": _wrap_update, "forward": forward, **named}
    metric.__class__ = type(cls.__name__, (cls,), body)
    _wrap_again(metric, cls)


def _as_it_was(metric: Any) -> None:
    cls = getattr(type(metric), "_alone", None)
    if cls is not None:
        metric.__class__ = cls
        _wrap_again(metric, cls)


def _wrap_again(metric: Any, cls: Any) -> None:
    metric.compute = metric._wrap_compute(MethodType(cls.compute, metric))
    metric.update = metric._wrap_update(MethodType(cls.update, metric))


def _take_state(metric: Any, comm: AxisComm, source: int) -> None:
    """Copy the last stage's state into `metric`, and forget a value computed from another."""
    names = (*metric._defaults, "_update_count")
    mine = {name: getattr(metric, name) for name in names} if comm.index == source else None
    state = comm.broadcast_object(map_tensors(lambda t: t.detach().cpu(), mine), src=source)
    if comm.index == source:
        return
    for name, value in state.items():
        setattr(metric, name, map_tensors(lambda t: t.to(metric.device), value))
    metric._computed = None
