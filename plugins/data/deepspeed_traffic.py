"""DeepSpeed's own collectives in the mesh's ledger.

It is: a stand-in for DeepSpeed's communication backend that counts each call and passes it on. It is not: a change of
any call, and it is there only while an engine of ours runs.

2026-11, 0.19.8: every collective of DeepSpeed goes through one backend object, `deepspeed.comm.comm.cdb`. Goes when
DeepSpeed's own logger reports bytes per group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from parallax.plugins.data.deepspeed_shims import module, replaced
from parallax.strategies.comm import nbytes
from parallax.strategies.mesh import Mesh

PAYLOAD: dict[str, tuple[str, str]] = {
    "all_reduce": ("all_reduce", "tensor"),
    "reduce": ("reduce", "tensor"),
    "broadcast": ("broadcast", "tensor"),
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "all_gather_base": ("all_gather", "output_tensor"),
    "reduce_scatter_tensor": ("reduce_scatter", "input_tensor"),
    "all_to_all_single": ("all_to_all", "input"),
}
"""Method of the backend -> (kind in the ledger, argument that is the payload)."""
LISTS: dict[str, tuple[str, str]] = {
    "all_gather": ("all_gather", "tensor_list"),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "all_reduce_coalesced": ("all_reduce", "tensors"),
    "all_gather_coalesced": ("all_gather", "output_tensors"),
}
"""The same for methods whose payload is a list of tensors."""


class CountingBackend:
    """DeepSpeed's backend, whose collectives on the mesh's groups are counted."""

    def __init__(self, backend: Any, mesh: Mesh) -> None:
        self._backend, self._mesh = backend, mesh

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)
        found = PAYLOAD.get(name) or LISTS.get(name)
        return method if found is None else self._counting(method, *found)

    def _counting(self, method: Callable[..., Any], kind: str, payload: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            value = kwargs[payload] if payload in kwargs else args[0]
            tensors = [value] if isinstance(value, Tensor) else value
            axis, size = self._axis(next((a for a in (*args, *kwargs.values()) if isinstance(a, ProcessGroup)), None))
            if size > 1:
                self._mesh.ledger.add(axis, kind, sum(nbytes(t) for t in tensors))
            return method(*args, **kwargs)

        return call

    def _axis(self, group: Any) -> tuple[str, int]:
        """Name and size of the axis of a process group; DeepSpeed takes None for the world."""
        for name in ("data", "edp", "ep", "model", "tp", "pp"):
            if group is not None and self._mesh[name].group is group:
                return name, self._mesh.size(name)
        alone = group is not None and self._backend.get_world_size(group) == 1
        return ("world", 1 if alone else self._mesh.world_size)


@contextmanager
def counted(mesh: Mesh) -> Iterator[None]:
    """Inside, what DeepSpeed sends is counted in the mesh's ledger."""
    comm = module("comm.comm")
    with replaced(comm, "cdb", CountingBackend(comm.cdb, mesh)):
        yield
