"""The one thin layer every collective and send of Parallax goes through.

It is: a view of one process group (`AxisComm`) that names the axis it serves, counts every call
and its bytes in a `Ledger`, and turns a backend's time-out into an error that says who waited for
whom in which step. It is not: a scheduler of communication, and it holds no global state: the mesh
makes one `AxisComm` per axis and passes it to whoever needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.strategies import collectives
from parallax.strategies.gloo import Fill


class CommError(RuntimeError):
    """A collective or a send failed or ran into its time limit. The message names the ranks and the step."""


class Work(Protocol):
    """What an asynchronous call returns: something to wait for."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


@dataclass(frozen=True)
class Traffic:
    """What one kind of call on one axis has cost so far.

    Attributes:
        calls: number of calls this rank made.
        bytes: payload bytes of those calls: the size of the whole tensor that is reduced, gathered (the
            result), scattered (the input), broadcast or sent. `wire_bytes` turns it into traffic.
    """

    calls: int = 0
    bytes: int = 0


@dataclass
class Ledger:
    """Counts calls and payload bytes by (axis, kind, phase), and knows what the rank is doing now.

    Attributes:
        counts: (axis, kind, phase) -> Traffic.
        phase: "setup", "forward", "backward" or "step"; set by the engine.
        note: free text for error messages, e.g. "step 12, forward of micro-batch 3 on stage 1".
    """

    counts: dict[tuple[str, str, str], Traffic] = field(default_factory=dict)
    phase: str = "setup"
    note: str = "setup"

    def add(self, axis: str, kind: str, nbytes: int) -> None:
        key = (axis, kind, self.phase)
        old = self.counts.get(key, Traffic())
        self.counts[key] = Traffic(old.calls + 1, old.bytes + nbytes)

    def total(self, axis: str, kind: str | None = None) -> Traffic:
        """Sum over phases (and kinds, when `kind` is None) on one axis."""
        hits = [t for (a, k, _), t in self.counts.items() if a == axis and kind in (None, k)]
        return Traffic(sum(t.calls for t in hits), sum(t.bytes for t in hits))

    def reset(self) -> None:
        self.counts.clear()

    @contextmanager
    def during(self, phase: str, note: str | None = None) -> Iterator[None]:
        """Everything issued inside belongs to `phase`; `note` goes into error messages."""
        saved = self.phase, self.note
        self.phase, self.note = phase, note or self.note
        try:
            yield
        finally:
            self.phase, self.note = saved


def wire_bytes(kind: str, payload: int, size: int) -> float:
    """Bytes one rank sends for a call of `kind` with `payload` bytes in a group of `size` ranks.

    Ring algorithms (Patarasuk & Yuan 2009): an all-reduce sends 2(n-1)/n of its payload, an
    all-gather, reduce-scatter or all-to-all (n-1)/n, a broadcast 1 from its source, a send 1.
    """
    if size <= 1:
        return 0.0
    share = {"all_reduce": 2 * (size - 1) / size, "broadcast": 1.0, "send": 1.0, "recv": 0.0}
    return payload * share.get(kind, (size - 1) / size)


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class AxisComm:
    """One rank's view of one group of ranks along a mesh axis.

    A group of one rank does nothing, counts nothing and needs no process group.

    Args:
        axis: name of the axis ("tp", "pp", "dp", "cp", "data", "model", ...), used for counting and in errors.
        ranks: global ranks of the group, in axis order.
        rank: this process's global rank; must be one of `ranks`.
        group: torch process group of exactly these ranks, None when there is only one.
        ledger: where calls are counted.
    """

    def __init__(
        self, axis: str, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None, ledger: Ledger
    ) -> None:
        if rank not in ranks:
            raise ValueError(f"rank {rank} is not in the {axis} group {tuple(ranks)}")
        self.axis = axis
        self.ranks = tuple(ranks)
        self.rank = rank
        self.group = group
        self.ledger = ledger
        self.size = len(self.ranks)
        self.index = self.ranks.index(rank)

    def __repr__(self) -> str:
        return f"AxisComm({self.axis}, ranks={self.ranks}, index={self.index})"

    def __deepcopy__(self, memo: dict[int, Any]) -> AxisComm:
        return self  # copies of a module share its groups: a process group cannot be copied

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    @contextmanager
    def _named(self, kind: str, payload: int, peers: Sequence[int] | None = None) -> Iterator[None]:
        self.ledger.add(self.axis, kind, payload)
        try:
            with torch._C.DisableTorchFunction():  # torch's own arithmetic on messages is no call of the user's code
                yield
        except RuntimeError as error:
            waiting_for = [r for r in (peers or self.ranks) if r != self.rank]
            raise CommError(
                f"rank {self.rank} failed in {kind} on axis {self.axis!r} with rank(s) {waiting_for} "
                f"({payload} bytes) during {self.ledger.note}: {error}"
            ) from error

    # Collectives. Every rank of the group calls them in the same order.

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Work | None:
        """Reduce `tensor` in place over the group. Returns a handle when `async_op`."""
        if self.size == 1:
            return None
        with self._named("all_reduce", nbytes(tensor)):
            work = dist.all_reduce(tensor, op=op, group=self.group, async_op=async_op)
        return named_work(work, self, "all_reduce") if async_op else None

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Concatenate every rank's `tensor` (same shape everywhere) along `dim`, in axis order."""
        if self.size == 1:
            return tensor
        out = tensor.new_empty((self.size, *tensor.shape))
        self.all_gather_into(out, tensor)
        return out.flatten(0, 1) if dim == 0 and tensor.dim() else torch.cat(out.unbind(0), dim=dim)

    def all_gather_into(self, out: Tensor, tensor: Tensor, async_op: bool = False) -> Work | None:
        """Fill `out`, `size` times as large as `tensor` and contiguous, with every rank's `tensor` in axis order.

        The caller keeps both alive, and `tensor` unchanged, until the returned handle has been waited for.
        """
        if self.size == 1:
            out.view(-1).copy_(tensor.reshape(-1))
            return None
        with self._named("all_gather", nbytes(out)):
            whole, part = out.view(self.size, -1), tensor.contiguous().view(-1)
            work = collectives.all_gather(whole, part, self.group, self.index, async_op=async_op)
        return named_work(work, self, "all_gather") if async_op else None

    def reduce_scatter_into(
        self, out: Tensor, tensor: Tensor, async_op: bool = False, fill: Fill | None = None
    ) -> Work | None:
        """Fill `out` with this rank's part, in axis order, of the sum over ranks of `tensor`, `size` times as large.

        Both are contiguous; parts are consecutive blocks of `tensor` seen as flat memory (dim 0). `fill`, if given, is
        called to compute some ranks' parts of `tensor`, so that some can travel while others are computed.
        """
        if self.size == 1:
            if fill is not None:
                fill(slice(0, 1))
            out.view(-1).copy_(tensor.reshape(-1))
            return None
        with self._named("reduce_scatter", nbytes(tensor)):
            mine, parts = out.view(-1), tensor.view(self.size, -1)
            work = collectives.reduce_scatter(mine, parts, self.group, self.index, fill, async_op=async_op)
        return named_work(work, self, "reduce_scatter") if async_op else None

    def all_to_all_into(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Send block i of `tensor`'s dim 0 to the rank at axis index i; `out` receives theirs in axis order.

        Args:
            out, tensor: contiguous, equal but for dim 0.
            out_splits, in_splits: rows of each block; None cuts evenly.
        """
        if self.size == 1:
            out.copy_(tensor)
            return None
        with self._named("all_to_all", nbytes(tensor)):
            work = dist.all_to_all_single(out, tensor, out_splits, in_splits, group=self.group, async_op=async_op)
        return named_work(work, self, "all_to_all") if async_op else None

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Copy `tensor` in place from the rank at axis index `src`."""
        if self.size > 1:
            with self._named("broadcast", nbytes(tensor)):
                dist.broadcast(tensor, src=self.ranks[src], group=self.group)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """A picklable object from the rank at axis index `src`. Not for the hot path."""
        if self.size == 1:
            return obj
        box = [obj]
        with self._named("broadcast_object", 0):
            dist.broadcast_object_list(box, src=self.ranks[src], group=self.group)
        return box[0]

    def gather_objects(self, obj: Any) -> list[Any]:
        """Every rank's picklable object, in axis order. Not for the hot path."""
        if self.size == 1:
            return [obj]
        out: list[Any] = [None] * self.size
        with self._named("gather_objects", 0):
            dist.all_gather_object(out, obj, group=self.group)
        return out

    def barrier(self) -> None:
        if self.size > 1:
            with self._named("barrier", 0):
                dist.barrier(group=self.group)

    # Point to point. `peer` is an index on the axis.

    def isend(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        dst = self.ranks[peer]
        with self._named("send", nbytes(tensor), [dst]):
            return named_work(dist.isend(tensor, dst, group=self.group, tag=tag), self, "send", [dst])

    def irecv(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        src = self.ranks[peer]
        with self._named("recv", nbytes(tensor), [src]):
            return named_work(dist.irecv(tensor, src, group=self.group, tag=tag), self, "recv", [src])

    def shift(self, send: Tensor, recv: Tensor, distance: int = 1, tag: int = 0) -> Work:
        """Send to the rank `distance` further on the axis and receive from the one `distance` before, around its ends.

        One call for both directions, so that no rank waits for another to turn around. The caller keeps both tensors
        (contiguous), and leaves `send` unchanged, until the returned handle has been waited for.
        """
        dst, src = (self.ranks[(self.index + step) % self.size] for step in (distance, -distance))
        pair = [
            dist.P2POp(dist.isend, send, dst, group=self.group, tag=tag),
            dist.P2POp(dist.irecv, recv, src, group=self.group, tag=tag),
        ]
        with self._named("send", nbytes(send), [dst, src]):
            works = dist.batch_isend_irecv(pair)
        self.ledger.add(self.axis, "recv", nbytes(recv))
        return named_work(_Works(works), self, "shift", [dst, src])


class _Works:
    """Several calls in flight, waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class named_work:  # noqa: N801 - used like a function
    """A call in flight whose failure names its peers and the step it was issued in."""

    def __init__(self, work: Any, comm: AxisComm, kind: str, peers: Sequence[int] | None = None) -> None:
        self._work, self._comm, self._kind = work, comm, kind
        self._peers = [r for r in (peers or comm.ranks) if r != comm.rank]
        self._note = comm.ledger.note

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CommError(
                f"rank {self._comm.rank} waited in vain for rank(s) {self._peers} to finish a {self._kind} on axis "
                f"{self._comm.axis!r} issued during {self._note}: {error}"
            ) from error
