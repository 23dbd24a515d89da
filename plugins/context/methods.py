"""The attention method of a layout, for the calls a model makes.

It is: the named method, or for "auto" the one predicted to be fastest on these ranks, made once and checked once for
each kind of call; and what the calls of a step send. It is not: the prediction (`choose.py`) or a method.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallax.plugins import registry
from parallax.plugins.context.base import AttentionMethod, AttentionSpec, ContextGroups, SequenceShards
from parallax.plugins.context.choose import Machine, choose
from parallax.plugins.context.traffic import METHODS, AttentionShape, sent, traffic
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh

CPU = {"inside": 2e9, "across": 1e9, "latency": 1e-4, "flops": 2e10}


class Methods:
    """Gives the method of each call. Made by all ranks of the context axis together: they tell each other their hosts.

    Args:
        mesh: see `Mesh`.
        layout: its `context_method` and `context_inner_size`.
    """

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        told = mesh["cp"].gather_objects((socket.gethostname(), torch.get_num_threads()))
        self._groups = ContextGroups.of(mesh, max(threads for _, threads in told))
        self._name, self._domain = layout.context_method, domain_of([host for host, _ in told])
        self._made: dict[str, AttentionMethod] = {}
        self._known: dict[Any, AttentionMethod] = {}
        self._bytes: dict[Any, tuple[int, int]] = {}
        self._calls: dict[str, tuple[int, int, int]] = {}

    def __call__(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, shards: SequenceShards
    ) -> AttentionMethod:
        """The method for this call.

        Raises:
            ValueError: the named one, or for "auto" every one, cannot do it.
        """
        per_head = spec.sinks is not None, spec.alibi_slopes is not None
        kind = (spec.causal, spec.window, spec.softcap, spec.dropout_p, per_head, q.shape, k.shape, v.shape, q.dtype)
        if (kind, shards) not in self._known:
            self._known[kind, shards] = self._find(spec, q, k, v, shards)
            self._bytes[kind, shards] = self._sent(self._known[kind, shards].name, spec, q, k, v, shards)
        method = self._known[kind, shards]
        recomputed = torch._C._current_graph_task_id() != -1
        self._count(method.name, self._bytes[kind, shards], torch.is_grad_enabled() and not recomputed)
        return method

    def begin(self) -> None:
        """A step starts: its calls are counted anew."""
        self._calls.clear()

    def describe(self) -> str:
        """What calls since `begin` send from this rank: "ring: 10 calls, 0.10 MB forward, 0.30 MB backward"."""
        parts = []
        for name, (calls, forward, backward) in self._calls.items():
            known = f", {forward / 1e6:.2f} MB forward, {backward / 1e6:.2f} MB backward" if name in METHODS else ""
            parts.append(f"{name}: {calls} calls{known}")
        return "; ".join(parts)

    def _count(self, name: str, each: tuple[int, int], backward: bool) -> None:
        calls, there, back = self._calls.get(name, (0, 0, 0))
        self._calls[name] = (calls + 1, there + each[0], back + each[1] * backward)

    def _sent(
        self, name: str, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, shards: SequenceShards
    ) -> tuple[int, int]:
        """Payload bytes of one call, forward and backward."""
        if name not in METHODS:
            return 0, 0
        calls = traffic(name, self._shape(q, k, v), spec, shards, self._groups.inner.size)
        return sent(calls, "forward"), sent(calls, "backward")

    def _find(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, shards: SequenceShards) -> AttentionMethod:
        name, inner = self._name, self._groups.inner.size
        if name == "auto":
            numbers = CPU if q.device.type == "cpu" else {}
            known = {method: registry.load("parallax.attention", method) for method in METHODS}
            name = choose(known, self._shape(q, k, v), spec, shards, inner, Machine(self._domain, **numbers)).name
        if name not in self._made:
            self._made[name] = registry.load("parallax.attention", name)(self._groups)
        method = self._made[name]
        method.check(spec, q.shape[1], k.shape[1], shards.size, inner)
        return method

    def _shape(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionShape:
        sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size()
        return AttentionShape(*sizes, device=q.device.type, threads=self._groups.threads)


def domain_of(hosts: Sequence[str]) -> int:
    """Length of the longest equal runs of neighbours that stay on one host; it divides the number of ranks."""
    size = len(hosts)
    fits = [n for n in range(1, size + 1) if size % n == 0 and all(hosts[i] == hosts[i - i % n] for i in range(size))]
    return max(fits)
