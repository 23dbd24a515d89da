"""Gradients that live in flat buffers: `param.grad` is a view, and reducing is one call per buffer.

It is: the buffers, reused every step, and the record of which parameters took part in the step. It is
not: an overlap of reduction and backward (under a pipeline all backwards of a step come first), nor the step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parallax.strategies.comm import AxisComm

BUCKET_BYTES = 25 * 2**20


class GradBuckets:
    """Flat gradient buffers of about `limit` bytes, each of one dtype and device.

    A parameter that no backward of the step reached has no gradient, as in plain torch: an optimizer with weight
    decay must leave it alone. With several data ranks "no backward" means none on any of them. Each buffer
    therefore ends in one count per parameter, reduced along with the gradients for nothing; only a rank where a
    parameter was left out has to look at the result.

    Args:
        params: parameters that require a gradient, without repetition.
        comm: the ranks that hold replicas: the data axis, or "edp" for experts.
        average_of: what the sum over `comm` is divided by; None for its size.
        limit: bytes per buffer; a larger parameter gets a buffer of its own.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        comm: AxisComm,
        *,
        average_of: int | None = None,
        limit: int = BUCKET_BYTES,
    ) -> None:
        self.comm = comm
        self.average_of = average_of or comm.size
        self.buffers: list[Tensor] = []
        self.grads: list[Tensor] = []
        """What of each buffer is gradients."""
        self.views: dict[nn.Parameter, Tensor] = {}
        self.counts: dict[nn.Parameter, Tensor] = {}
        self.touched: set[nn.Parameter] = set()
        for members in _batches(params, limit):
            self._add(members)
        self._hooks = [p.register_post_accumulate_grad_hook(self.touch) for p in self.views]
        self.attach()

    def _add(self, members: list[nn.Parameter]) -> None:
        size = sum(p.numel() for p in members)
        buffer = torch.zeros(size + len(members), dtype=members[0].dtype, device=members[0].device)
        self.buffers.append(buffer)
        self.grads.append(buffer[:size])
        at = 0
        for i, p in enumerate(members):
            self.views[p] = buffer[at : at + p.numel()].view(p.shape)
            self.counts[p] = buffer[size + i]
            at += p.numel()

    def touch(self, param: Tensor) -> None:
        """A backward has reached `param`."""
        assert isinstance(param, nn.Parameter)
        self.touched.add(param)

    def attach(self) -> None:
        """Point every `param.grad` at its view."""
        for p, view in self.views.items():
            p.grad = view

    @torch.no_grad()
    def reduce(self) -> None:
        """Average over the ranks. Gradients that someone replaced or dropped since are taken as they are now."""
        for p, view in self.views.items():
            if p.grad is None:
                view.zero_()
                self.touched.discard(p)
            elif p.grad.data_ptr() != view.data_ptr() or p.grad.shape != view.shape:
                view.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
                self.touched.add(p)
            elif p not in self.touched and bool(view.any()):
                self.touched.add(p)  # written without a backward: a tied weight whose other copy was used
        if self.comm.size > 1:
            for p in self.touched:
                self.counts[p].fill_(1)
            works = [self.comm.all_reduce(b, async_op=True) for b in self.buffers]
            for work in works:
                if work is not None:
                    work.wait()
        if self.average_of > 1:
            for grads in self.grads:
                grads.div_(self.average_of)
        for p, view in self.views.items():
            p.grad = view if p in self.touched or self._touched_elsewhere(p) else None

    def _touched_elsewhere(self, param: nn.Parameter) -> bool:
        return self.comm.size > 1 and bool(self.counts[param] > 0)

    @torch.no_grad()
    def clear(self) -> None:
        """Zero everything for the next step."""
        for buffer in self.buffers:
            buffer.zero_()
        self.touched.clear()
        self.attach()

    def release(self) -> None:
        """Remove hooks and let go of the buffers."""
        for hook in self._hooks:
            hook.remove()
        for p in self.views:
            p.grad = None
        self.views, self.counts, self.buffers, self.grads, self._hooks = {}, {}, [], [], []


class PlainGrads:
    """The same interface where nothing is reduced: gradients are torch's own, with no buffer to clear and add to.

    Args:
        params: parameters that require a gradient, without repetition.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.views = dict.fromkeys(params)

    @property
    def grads(self) -> list[Tensor]:
        """Gradients there are."""
        return [p.grad for p in self.views if p.grad is not None]

    def reduce(self) -> None:
        """Only make sparse gradients dense, as they are after a reduction."""
        for p in self.views:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()

    def clear(self) -> None:
        """Let go of every gradient."""
        for p in self.views:
            p.grad = None

    release = clear


def _batches(params: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """`params` in runs of one dtype and device of at most `limit` bytes (or one parameter)."""
    open_runs: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    done: list[list[nn.Parameter]] = []
    for p in params:
        run = open_runs.setdefault((p.dtype, p.device), [])
        held = sum(q.numel() for q in run) * p.element_size()
        if run and held + p.numel() * p.element_size() > limit:
            done.append(run)
            run = open_runs[p.dtype, p.device] = []
        run.append(p)
    return done + [run for run in open_runs.values() if run]
