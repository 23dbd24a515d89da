"""How many heads a ring takes round at a time.

It is: the rule, from sizes alone and so the same on every rank, and putting together what the runs of heads give. It is
not: attention or communication.

Heads know nothing of each other, so that a ring may take them round one run after another: the same bytes in smaller
messages, and what is under way, and the sums in fp32, are those of one run. A run is as small as leaves messages long
enough to hide their latency and, on a CPU, work for every thread: the kernels share heads out.
"""

from __future__ import annotations

from torch import Tensor

MESSAGE = {"cpu": 4 << 20}
GPU_MESSAGE = 16 << 20
"""Fewest bytes of keys and values worth a message: measured on a CPU with gloo; on a GPU, where it was not, a run then
has blocks of queries for every processor."""


def count(nbytes: int, heads: int, kv_heads: int, device: str, threads: int = 1) -> int:
    """Into how many runs of equal size the heads are cut; 1 where there is little to win.

    Args:
        nbytes: of this rank's keys and values.
        heads: query heads, of all samples together.
        kv_heads: key and value heads of a sample.
        device: "cpu", "cuda".
        threads: of a rank, the same number on every rank; only looked at on a CPU.
    """
    least, hands = MESSAGE.get(device, GPU_MESSAGE), threads if device == "cpu" else 1
    fits = (n for n in range(2, kv_heads + 1) if kv_heads % n == 0 and nbytes >= n * least and heads >= n * hands)
    return max(fits, default=1)


def cut(size: int, number: int) -> list[slice]:
    """`number` equal slices of `size` heads."""
    width = size // number
    return [slice(at, at + width) for at in range(0, size, width)]


class Whole:
    """Tensors [batch, heads, rows, ...] whose heads come in runs; one run of all heads is kept as it is.

    `held`: the tensors, in the order they are put in.
    """

    def __init__(self, heads: int) -> None:
        self._heads = heads
        self.held: tuple[Tensor, ...] = ()

    def put(self, at: slice, *parts: Tensor) -> None:
        """The heads `at` of the tensors are `parts`."""
        if parts[0].shape[1] == self._heads:
            self.held = parts
            return
        if not self.held:
            self.held = tuple(self._empty(part) for part in parts)
        for whole, part in zip(self.held, parts, strict=True):
            whole[:, at] = part

    def _empty(self, like: Tensor) -> Tensor:
        batch, _, rows, *dims = like.shape
        if not dims:
            return like.new_empty(batch, self._heads, rows)
        return like.new_empty(batch, rows, self._heads, *dims).transpose(1, 2)  # the strides of projections
