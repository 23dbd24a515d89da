"""Context parallelism along axis "cp": every sequence is shared by several ranks.

It is: check, the hooks into the model, the cutting of batches, and what each rank holds. It is not: attention over a
cut sequence (`AttentionMethod`), or what calls of the user's code become (`routing.py`, `hf.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from parallax.plugins.base import ParallelPlugin
from parallax.plugins.context.batch import cut_batch, own_targets
from parallax.plugins.context.hf import attach
from parallax.plugins.context.methods import Methods
from parallax.plugins.context.plans import carried_plan
from parallax.plugins.context.refusals import check_model
from parallax.plugins.context.routing import Routed
from parallax.plugins.context.sequence import CutSequence
from parallax.plugins.context.share import whole_output
from parallax.plugins.context.step_traffic import add_traffic
from parallax.strategies.batch import shifts_labels
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.theory import Case, Expected


class ContextParallel(ParallelPlugin):
    """Cuts sequences over ranks without changing the model's or the step's code.

    Args:
        plan: `cp_plan`, the batch's entries that have tokens and at which dim; None reads the one the model carries,
            and without one the batch's shapes and names.
    """

    name = "context"
    axis = "cp"

    def __init__(self, plan: Mapping[str, int] | None = None) -> None:
        self._plan = plan
        self.sequence: CutSequence | None = None
        self._detach: Callable[[], None] | None = None
        self._methods: Methods | None = None
        self._report: dict[str, str] = {}
        self._speaks = False
        self._shifted = False
        self._own: list[Tensor] = []

    def check(self, layout: Layout, model: nn.Module) -> None:
        check_model(model)

    def apply(self, model: nn.Module, *, mesh: Mesh, layout: Layout) -> None:
        self._plan = self.batch_plan(model)
        self._shifted = shifts_labels(model)
        self._methods = Methods(mesh, layout)
        self._speaks = mesh.rank == 0
        self.sequence = CutSequence(model, mesh["cp"], layout.context_sharding, self._methods)
        self._detach = attach(model, self.sequence)
        self._report = _describe(layout, mesh.index("cp"))

    @property
    def _sequence(self) -> CutSequence:
        if self.sequence is None:
            raise RuntimeError("ContextParallel.apply has not run")
        return self.sequence

    def shard_batch(self, batch: Any, *, mesh: Mesh) -> Any:
        part = cut_batch(batch, self._sequence, self._plan)
        self._own.append(own_targets(batch, self._sequence, shifted=self._shifted))
        return part

    @contextmanager
    def running(self) -> Iterator[Tensor]:
        """Around all forwards and backwards of the parts cut since the last time; gives the targets in each of them."""
        sequence = self._sequence
        sequence.own, self._own = torch.stack(self._own).double(), []
        sequence.attentions = 0
        assert self._methods is not None
        self._methods.begin()
        try:
            with Routed(sequence):
                yield sequence.own
        finally:
            sequence.end()
        self._report["sends in a step"] = self._methods.describe()
        if self._speaks and sequence.attentions:
            self._speaks = False
            text = f"attention over {sequence.comm.size} context ranks; a step of one sends {self._methods.describe()}"
            Console().print(text, highlight=False, soft_wrap=True)
        if not sequence.attentions:
            raise ValueError(
                f"no attention was called that could look beyond the {sequence.local} tokens of a sequence on this "
                f"context rank; call F.scaled_dot_product_attention (or parallax.scaled_dot_product_attention), or use "
                f"context_parallel_size=1"
            )

    def begin(self, microbatch: int) -> None:
        self._sequence.begin_microbatch(microbatch)

    def whole_output(self, output: Any) -> Any:
        return whole_output(self._sequence, output)

    def restore(self, model: nn.Module) -> None:
        if self._detach is not None:
            self._detach()
        self._detach, self.sequence = None, None

    def batch_plan(self, model: nn.Module) -> Mapping[str, int] | None:
        """Entries of a batch that have tokens, as given, else as `model` carries them."""
        return self._plan if self._plan is not None else carried_plan(model)

    def traffic(self, case: Case, out: Expected) -> None:
        """See `step_traffic.py`."""
        add_traffic(case, out)

    def describe(self) -> dict[str, str]:
        return dict(self._report)


SENDS: Mapping[str, str] = {
    "auto": "as the method does that is chosen at the first call, from heads, length and hosts",
    "ring": "forward: keys and values of a rank, c-1 times; backward: the same again, and c times their gradients",
    "all_gather": "forward: keys and values of all ranks, gathered; backward: the same, and their gradients scattered",
    "ulysses": "forward: queries, keys, values and outputs once, for heads; backward: their gradients likewise",
    "hybrid": "ulysses among neighbours, ring between groups of them",
}
"""Method -> what a rank sends for one attention call; the formulas are in `traffic.py`."""


def _describe(layout: Layout, index: int) -> dict[str, str]:
    size, method = layout.context_parallel_size, layout.context_method
    chunks = f"chunk {index} of {size}"
    if layout.context_sharding == "zigzag":
        chunks = f"chunks {index} and {2 * size - 1 - index} of {2 * size}"
    return {
        "holds": f"{chunks} of every sequence",
        "attention": method,
        "sends": SENDS.get(method, "as the method says"),
    }
