"""The tape of a deferred construction: what was done to which memory, and how to do it again for one tensor.

It is: storages, the steps that write them, the backward slice of one tensor and its execution on a real device.
It is not: how steps get recorded (`deferred.py`) nor how values reach a module (`materialize.py`).

Memory is identified by its *storage*, not by tensor objects, so views, `.data`, `Parameter(...)` and in-place
writes through an alias need no special case: a view is a `Window` (dtype, size, stride, offset) on a storage. The
idea of deferred initialisation through an operation graph on fake tensors is that of torchdistx.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from parallax.plugins.base import ParamShard

META = torch.device("meta")


class WeightSource(Protocol):
    """Where a stored weight comes from; reads all of it, or only one rank's part."""

    def read(self, shard: ParamShard | None = None) -> Tensor: ...


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory a tensor views, while that memory lives."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class Window:
    """A strided view on a recorded storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class Outside:
    """A real tensor that took part in the construction, kept by reference, with its version when it was read."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Step:
    """One call that made or changed memory.

    Attributes:
        run: the operator (or initialiser, or reader) to call again.
        args, kwargs: its arguments, tensors replaced by `Window` or `Outside`.
        outs: for each tensor it returns, the window to store it in; None for one that is a view of an input.
        reads, writes: storages whose earlier contents it needs, and storages it changes.
        overwrites: the storage it fills completely, so that what was there before does not matter.
        random: whether it draws random numbers.
        default_dtype: torch's default dtype at the time of the call.
        source: set when the step reads a stored weight.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[Window | None, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    overwrites: int | None
    random: bool
    default_dtype: torch.dtype
    source: WeightSource | None = None


@contextmanager
def unrecorded() -> Iterator[None]:
    """Run real operators: no recording, no redirection to the meta device, no autograd."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def derive_seed(seed: int, fqn: str, ordinal: int) -> int:
    """63-bit seed of the `ordinal`-th random step of parameter `fqn`: the same on every rank and every Python."""
    digest = hashlib.sha256(f"{seed}\0{fqn}\0{ordinal}".encode()).digest()
    # torch's CPU generator keeps the low 32 bits only; a hash spreads well over any of them
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the default generators that work on `device` draws from; their states are put back afterwards."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"initial values can be drawn on cpu and cuda devices, not on {device}; use device='cpu'")
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [g.get_state() for g in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class Tape:
    """Steps in the order they happened, indexed by the storages they write."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # holding them keeps their addresses unique
        self._writers: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory was created under this tape."""
        return storage_key(tensor) in self._storages

    def window(self, tensor: Tensor) -> Window:
        """The window a meta tensor is; its storage is known to the tape from now on."""
        key = storage_key(tensor)
        self._storages.setdefault(key, tensor.untyped_storage())
        return Window(
            key,
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def covers(self, window: Window) -> bool:
        """Whether the window is the whole of its storage, in order."""
        expected = 1
        for length, stride in zip(reversed(window.size), reversed(window.stride), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return window.offset == 0 and expected * window.dtype.itemsize == self._storages[window.storage].nbytes()

    def append(self, step: Step) -> None:
        for storage in step.writes:
            self._writers.setdefault(storage, []).append(len(self.steps))
        self.steps.append(step)

    def needed(self, window: Window, before: int | None = None) -> tuple[int, ...]:
        """Indices, ascending, of the steps before step `before` that the window's value depends on."""
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        todo = [(window.storage, len(self.steps) if before is None else before)]
        while todo:
            storage, limit = todo.pop()
            writers = self._writers.get(storage, [])
            at = bisect_left(writers, limit)
            while at > 0 and (storage, at) not in seen:
                seen.add((storage, at))
                at -= 1
                step = self.steps[writers[at]]
                if writers[at] not in found:
                    found.add(writers[at])
                    todo += [(read, writers[at]) for read in step.reads]
                if step.overwrites == storage:
                    break  # whatever was written earlier is gone
        return tuple(sorted(found))

    def compute(
        self,
        window: Window,
        order: Sequence[int],
        device: torch.device,
        seed_of: Callable[[int], int] | None = None,
    ) -> Tensor:
        """The window's value on `device`, by running the steps `order`; memory never written reads as zero.

        Args:
            seed_of: step index -> seed of a random step. Without it there must be none in `order`.
        """
        memory: dict[int, torch.UntypedStorage] = {}
        default = torch.get_default_dtype()
        with unrecorded():
            try:
                for index in order:
                    step = self.steps[index]
                    torch.set_default_dtype(step.default_dtype)
                    if not step.random:
                        self._run(step, memory, device)
                    else:
                        assert seed_of is not None
                        with _seeded(device, seed_of(index)):
                            self._run(step, memory, device)
            finally:
                torch.set_default_dtype(default)
            whole = self._open(window, memory, device)
            return whole if self.covers(window) and not (window.conj or window.neg) else whole.clone()

    def _run(self, step: Step, memory: dict[int, torch.UntypedStorage], device: torch.device) -> None:
        inputs: set[int] = set()

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Window):
                leaf = self._open(leaf, memory, device, blank=leaf.storage == step.overwrites)
            elif isinstance(leaf, Outside):
                leaf = _unchanged(leaf).to(device)
            elif isinstance(leaf, torch.device):
                return device
            if isinstance(leaf, Tensor):
                inputs.add(storage_key(leaf))
            return leaf

        result = step.run(*tree_map(real, step.args), **tree_map(real, dict(step.kwargs)))
        values = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        for window, value in zip(step.outs, values, strict=True):
            if window is not None:
                self._store(window, value, memory, device, own=storage_key(value) not in inputs)

    def _store(
        self, window: Window, value: Tensor, memory: dict[int, torch.UntypedStorage], device: torch.device, *, own: bool
    ) -> None:
        """Put a result where the recorded one was: adopt its memory when it has the recorded form, else copy."""
        same = (value.dtype, tuple(value.size()), tuple(value.stride()), value.storage_offset()) == (
            window.dtype,
            window.size,
            window.stride,
            window.offset,
        )
        storage = value.untyped_storage()
        fits = storage.nbytes() == self._storages[window.storage].nbytes() and value.device.type == device.type
        if own and same and fits and window.storage not in memory:
            memory[window.storage] = storage
        else:
            self._open(window, memory, device).copy_(value)

    def _open(
        self, window: Window, memory: dict[int, torch.UntypedStorage], device: torch.device, *, blank: bool = False
    ) -> Tensor:
        """The real tensor of a window; `blank` memory is about to be filled and need not be zeroed."""
        if window.storage not in memory:
            make = torch.empty if blank else torch.zeros
            nbytes = self._storages[window.storage].nbytes()
            memory[window.storage] = make(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        tensor = torch.empty(0, dtype=window.dtype, device=device)
        tensor.set_(memory[window.storage], window.offset, window.size, window.stride)
        tensor = tensor.conj() if window.conj else tensor
        return torch._neg_view(tensor) if window.neg else tensor


def _unchanged(outside: Outside) -> Tensor:
    tensor = outside.tensor
    if not tensor.is_inference() and tensor._version != outside.version:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} from outside configure_model was used there and changed in place "
            "afterwards, so the construction cannot be replayed; pass a copy (`tensor.clone()`) to the model"
        )
    return tensor
