"""Moves activations and gradients between the ranks of neighbouring stages.

It is: sends that do not block, receives into reused buffers (`buffers.py`), and the one-time exchange of what an
activation looks like. It is not: aware of schedules; what is asked for when is the business of `routes.py`.

Every pipeline rank of one data index loads the same batch, so sender and receiver know by themselves when the shapes
of a micro-batch are new; only then does a description travel, and never again for the same shapes.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallax.plugins.pipeline.buffers import Buffers
from parallax.plugins.pipeline.routes import Message
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

    def agrees(self, other: Description, *, graph: bool) -> bool:
        """Whether both have the same tensors, and, with `graph`, the same of them carry gradient."""
        if graph:
            return self.tensors == other.tensors
        return [t[:2] for t in self.tensors] == [t[:2] for t in other.tensors]


class StageFailed(Exception):
    """A stage before this one has met an error and sends no more activations; it says itself which."""


class Transfer:
    """One rank's links to the ranks whose stages neighbour its own.

    Args:
        up: group on which messages travel to a rank of higher index.
        down: the same ranks again, for messages to a rank of lower index. So between two ranks each group carries one
            direction only, and no send waits behind one in the other direction.
        device: where received tensors live.
    """

    def __init__(self, up: AxisComm, down: AxisComm, device: torch.device) -> None:
        self.comm, self._down = up, down
        self.buffers = Buffers(device)
        self.device = device
        self._known: dict[tuple[int, Hashable], Description] = {}
        self._posted: dict[Message, tuple[list[Tensor], list[Work]]] = {}
        self._sending: list[tuple[Work, Tensor]] = []

    # Receiving

    def post(self, message: Message, key: Hashable, *, early: bool) -> bool:
        """Ask for `message`. Receives from one rank are asked for in the order in which that rank sends.

        Args:
            key: identifies the input shapes of its micro-batch.
            early: it is not needed yet. Then False says that its shapes are not known, and nothing was asked for.

        Raises:
            StageFailed: the sender has met an error before it could say what it sends.
        """
        edge = (message.edge, key)
        description = self._known.get(edge)
        if description is None:
            if early:
                return False
            if message.kind == "F":
                description = self._describe(message, edge)
        shapes = () if description is None else description.tensors
        if message.kind == "B":
            shapes = tuple(each for each in shapes if each[2])
        tensors = [self.buffers.take(shape, dtype) for shape, dtype, _ in shapes]
        comm = self._link(message)
        with comm.ledger.during("forward" if message.kind == "F" else "backward"):  # not of the action before it
            self._posted[message] = tensors, [comm.irecv(t, message.source, _tag(message)) for t in tensors]
        return True

    def take(self, message: Message) -> list[Tensor]:
        """The tensors of a message asked for before, once they are here."""
        tensors, works = self._posted.pop(message)
        for work in works:
            work.wait()
        return tensors

    def _describe(self, message: Message, edge: tuple[int, Hashable]) -> Description:
        box = torch.empty(DESCRIPTION_BYTES, dtype=torch.uint8, device=self.device)
        self._link(message).irecv(box, message.source, _tag(message)).wait()
        description = _decode(box)
        if description is None:
            self._posted[message] = [], []
            raise StageFailed(f"pipeline stage {message.stage} on rank {self.comm.ranks[message.source]} has failed")
        self._known[edge] = description
        return description

    def unpack(self, edge: int, key: Hashable, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """An activation in its structure, and its leaves whose gradients go back (none without autograd)."""
        description = self._known[edge, key]
        leaves = []
        for tensor, (_, _, grad) in zip(tensors, description.tensors, strict=True):
            leaves.append(tensor.detach().requires_grad_(grad and torch.is_grad_enabled()))
        return join_tensors(leaves, description.skeleton), [leaf for leaf in leaves if leaf.requires_grad]

    # Sending

    def knows(self, message: Message, key: Hashable) -> bool:
        """Whether an activation like `message` has been packed before."""
        return (message.edge, key) in self._known

    def pack(self, message: Message, key: Hashable, value: Any, *, graph: bool = True) -> list[Tensor]:
        """The tensors of an activation. Where its receiver cannot know what they look like, it is told.

        Without `graph` they were computed without autograd: what carries gradient is known from before.
        """
        description, tensors = Description.of(value)
        known = self._known.get((message.edge, key))
        if known is None:
            self._known[message.edge, key] = description
            if message.target != message.source:
                self._send(message, _encode(description, self.device))
        elif not known.agrees(description, graph=graph):
            raise ValueError(
                f"stage {message.stage} sent activations {known.tensors} and now {description.tensors} for inputs "
                f"of the same shapes; a pipeline needs activation shapes to depend on input shapes only"
            )
        return tensors

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send without waiting; the tensors are held until they are gone."""
        # Sends that are done let go of their tensors now, so that memory follows the schedule, not the step.
        self._sending = [(work, held) for work, held in self._sending if not work.is_completed()]
        for tensor in tensors:
            self._send(message, tensor.detach().contiguous())

    def send_nothing(self, message: Message, key: Hashable) -> None:
        """Keep the target from waiting for an activation that this rank, having failed, cannot compute.

        Zeros where the target knows the shapes, else word of the failure.
        """
        known = self._known.get((message.edge, key))
        if known is None:
            self._send(message, _encode(None, self.device))
        else:
            self.send(message, [torch.zeros(s, dtype=d, device=self.device) for s, d, _ in known.tensors])

    def send_no_gradients(self, message: Message, key: Hashable) -> None:
        """The same for gradients. Where it knows no shapes the target waits for none."""
        known = self._known.get((message.edge, key))
        shapes = [] if known is None else [(s, d) for s, d, grad in known.tensors if grad]
        self.send(message, [torch.zeros(s, dtype=d, device=self.device) for s, d in shapes])

    def finish(self) -> None:
        """Wait for every send; the tensors are held until then. Buffers nobody used since the last time go."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        self._posted.clear()
        self.buffers.trim()

    def _send(self, message: Message, tensor: Tensor) -> None:
        self._sending.append((self._link(message).isend(tensor, message.target, _tag(message)), tensor))

    def _link(self, message: Message) -> AxisComm:
        return self.comm if message.source < message.target else self._down


def _tag(message: Message) -> int:
    """Different for all messages in flight between two ranks; a group that ignores it carries them in order."""
    return message.microbatch << 12 | message.stage << 1 | (message.kind == "B")


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
