"""Moves activations forward and gradients backward between neighbouring stages.

It is: sends that do not block, receives posted early into reused buffers, and the one-time exchange of
what an activation looks like. It is not: aware of schedules.

Every pipeline rank of one data index loads the same batch, so sender and receiver know by themselves when the shapes
of a micro-batch are new; only then does a description travel, and never again for the same shapes.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallax.strategies.comm import AxisComm, Work
from parallax.strategies.tree import join_tensors, split_tensors

DESCRIPTION_BYTES = 1 << 16
"""Room for one pickled activation description."""


@dataclass(frozen=True)
class Description:
    """What one stage sends to the next: tensors (shape, dtype, whether they carry gradient) in a structure."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    skeleton: Any

    @classmethod
    def of(cls, value: Any) -> tuple[Description, list[Tensor]]:
        tensors, skeleton = split_tensors(value)
        return cls(tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors), skeleton), tensors

    @property
    def carries_grad(self) -> list[int]:
        return [i for i, (_, _, grad) in enumerate(self.tensors) if grad]


class StageFailed(Exception):
    """The stage before this one has met an error and sends no more activations; it says itself which."""


class Buffers:
    """Receive buffers by shape and dtype; a buffer comes back when its micro-batch is done with it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        free = self._free.get((shape, dtype))
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=self._device)

    def give(self, tensor: Tensor) -> None:
        self._free.setdefault((tuple(tensor.shape), tensor.dtype), []).append(tensor.detach())


@dataclass
class Incoming:
    """Tensors on their way: `wait` returns them when they are there."""

    tensors: list[Tensor]
    works: list[Work]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


class Transfer:
    """One rank's link to the stages before and after it.

    Args:
        forward: group activations travel on.
        backward: group gradients travel on (the same ranks, a group of its own).
        device: where received tensors live.
    """

    def __init__(self, forward: AxisComm, backward: AxisComm, device: torch.device) -> None:
        self.forward, self.backward = forward, backward
        self.buffers = Buffers(device)
        self._device = device
        self._from_previous: dict[Hashable, Description] = {}
        self._told_next: dict[Hashable, Description] = {}
        self._sending: list[tuple[Work, Tensor]] = []

    # Activations

    def send_activation(self, key: Hashable, value: Any) -> list[Tensor]:
        """Send the stage's output to the next stage; returns its tensors. `key` identifies the input shapes."""
        description, tensors = Description.of(value)
        told = self._told_next.get(key)
        if told is None:
            box = _encode(description, self._device)
            self._told_next[key] = description
            self._post(self.forward, box, self.forward.index + 1)
        elif told.tensors != description.tensors:
            raise ValueError(
                f"stage {self.forward.index} sent activations {told.tensors} and now {description.tensors} for inputs "
                f"of the same shapes; a pipeline needs activation shapes to depend on input shapes only"
            )
        for tensor in tensors:
            self._post(self.forward, tensor.detach().contiguous(), self.forward.index + 1)
        return tensors

    def send_nothing(self, key: Hashable) -> list[Tensor]:
        """Keep the next stage from waiting for an output that this stage, having failed, cannot compute.

        Zeros where it knows the shapes, else word of the failure (see `describe`). Returns what was sent.
        """
        told = self._told_next.get(key)
        if told is None:
            self._post(self.forward, _encode(None, self._device), self.forward.index + 1)
            return []
        zeros = [torch.zeros(s, dtype=d, device=self._device, requires_grad=grad) for s, d, grad in told.tensors]
        for tensor in zeros:
            self._post(self.forward, tensor.detach(), self.forward.index + 1)
        return zeros

    def expect_activation(self, key: Hashable) -> Incoming | None:
        """Post the receives of one micro-batch; None when the description has yet to come (see `describe`)."""
        description = self._from_previous.get(key)
        if description is None:
            return None
        tensors = [self.buffers.take(shape, dtype) for shape, dtype, _ in description.tensors]
        peer = self.forward.index - 1
        return Incoming(tensors, [self.forward.irecv(t, peer) for t in tensors])

    def describe(self, key: Hashable) -> None:
        """Receive the description for inputs `key` (the first time they are seen).

        Raises:
            StageFailed: the previous stage has failed and sends no activations for `key`.
        """
        if key not in self._from_previous:
            box = torch.empty(DESCRIPTION_BYTES, dtype=torch.uint8, device=self._device)
            self.forward.irecv(box, self.forward.index - 1).wait()
            description = _decode(box)
            if description is None:
                raise StageFailed(f"pipeline stage {self.forward.index - 1}, before this one, has failed")
            self._from_previous[key] = description

    def activation(self, key: Hashable, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """The received value in its structure, and the leaves whose gradients go back."""
        description = self._from_previous[key]
        leaves = []
        for tensor, (_, _, grad) in zip(tensors, description.tensors, strict=True):
            leaves.append(tensor.detach().requires_grad_(grad and torch.is_grad_enabled()))
        wanted = [leaves[i] for i in description.carries_grad] if torch.is_grad_enabled() else []
        return join_tensors(leaves, description.skeleton), wanted

    # Gradients

    def send_gradients(self, leaves: list[Tensor]) -> None:
        for leaf in leaves:
            grad = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            self._post(self.backward, grad.contiguous(), self.backward.index - 1)
            leaf.grad = None

    def expect_gradients(self, outputs: list[Tensor]) -> Incoming:
        tensors = [self.buffers.take(tuple(o.shape), o.dtype) for o in outputs]
        return Incoming(tensors, [self.backward.irecv(t, self.backward.index + 1) for t in tensors])

    # Sends in flight

    def _post(self, comm: AxisComm, tensor: Tensor, peer: int) -> None:
        # Sends that are done let go of their tensors now, so that memory follows the schedule, not the step.
        self._sending = [(work, held) for work, held in self._sending if not work.is_completed()]
        self._sending.append((comm.isend(tensor, peer), tensor))

    def drain(self) -> None:
        """Wait for every send of the step; the tensors are held until then."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()


def _encode(description: Description | None, device: torch.device) -> Tensor:
    raw = pickle.dumps(description)
    if len(raw) + 8 > DESCRIPTION_BYTES:
        raise ValueError(f"an activation description takes {len(raw)} bytes; at most {DESCRIPTION_BYTES - 8} are sent")
    data = len(raw).to_bytes(8, "little") + raw
    box = torch.zeros(DESCRIPTION_BYTES, dtype=torch.uint8)
    box[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return box.to(device)


def _decode(box: Tensor) -> Description | None:
    data = bytes(box.cpu().numpy().tobytes())
    size = int.from_bytes(data[:8], "little")
    value = pickle.loads(data[8 : 8 + size])
    assert value is None or isinstance(value, Description)
    return value
