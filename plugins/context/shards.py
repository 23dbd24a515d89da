"""How a sequence is cut over the ranks of the context axis.

It is: pure arithmetic on positions: which positions a rank holds, taking its part of a whole tensor, and putting the
parts together. It is not: communication, and it knows nothing of batches (see the plugin) or of attention.

*Contiguous*: rank r of c holds the r-th of c equal chunks. *Zigzag*: the sequence is cut into 2c equal chunks and
rank r holds chunks r and 2c-1-r, in this order, so that under a causal mask every rank has the same work: a query in
chunk i sees i chunks of keys, and r + (2c-1-r) is the same for all r (Llama 3 technical report, section 3.3.2).

    c = 2, zigzag:      chunk  0 1 2 3        contiguous:   chunk  0 1
                        rank   0 1 1 0                      rank   0 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""[start, stop) of global positions, ascending, with gaps between them."""

ORDERS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class SequenceShards:
    """The cut of one sequence of `tokens` tokens, padded at its end to `length`, over `size` ranks.

    Attributes:
        tokens: tokens before padding. Positions from here on are padding: no query sees them and their output is 0.
        length: tokens after padding, a multiple of `multiple_of(size, order)`. `of` chooses the smallest.
        size: ranks.
        order: "zigzag" or "contiguous".

    Raises:
        ValueError: an unknown order, or numbers that do not fit each other.
    """

    tokens: int
    length: int
    size: int
    order: str = "zigzag"

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"sequences are cut in order {' or '.join(ORDERS)}, not {self.order!r}")
        multiple = self.multiple_of(self.size, self.order)
        if self.length % multiple or not 0 <= self.tokens <= self.length:
            nearest = -(-max(self.tokens, 1) // multiple) * multiple
            raise ValueError(
                f"{self.tokens} tokens in a length of {self.length} cannot be cut over {self.size} ranks in "
                f"{self.order} order; the length must be a multiple of {multiple}, e.g. {nearest}"
            )

    @staticmethod
    def multiple_of(size: int, order: str = "zigzag") -> int:
        """What the padded length must be a multiple of."""
        return 2 * size if order == "zigzag" else size

    @classmethod
    def of(cls, tokens: int, size: int, order: str = "zigzag") -> SequenceShards:
        """The cut of `tokens` tokens with the least padding."""
        multiple = cls.multiple_of(size, order)
        return cls(tokens, -(-tokens // multiple) * multiple, size, order)

    @property
    def local_length(self) -> int:
        """Positions of every rank, padding included."""
        return self.length // self.size

    @property
    def whole(self) -> Ranges:
        return ((0, self.length),) if self.length else ()

    def ranges(self, rank: int) -> Ranges:
        """Global positions of `rank`, in the order of its local dim; neighbouring chunks are one range."""
        if not self.length:
            return ()
        if self.order == "contiguous":
            return ((rank * self.local_length, (rank + 1) * self.local_length),)
        chunk, mirror = self.local_length // 2, 2 * self.size - 1 - rank
        if mirror == rank + 1:
            return ((rank * chunk, (mirror + 1) * chunk),)
        return ((rank * chunk, (rank + 1) * chunk), (mirror * chunk, (mirror + 1) * chunk))

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Global positions of `rank` as int64 [local_length]: explicit position ids."""
        parts = [torch.arange(start, stop, device=device) for start, stop in self.ranges(rank)]
        return torch.cat(parts) if parts else torch.arange(0, device=device)

    def pad(self, whole: Tensor, dim: int, value: float = 0) -> Tensor:
        """`whole` with `tokens` entries along `dim`, filled up with `value` to `length` (itself if nothing lacks)."""
        self._require(whole, dim, self.tokens)
        if self.tokens == self.length:
            return whole
        shape = list(whole.shape)
        shape[dim] = self.length - self.tokens
        return torch.cat([whole, whole.new_full(shape, value)], dim)

    def take(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """The part of `rank`, of a tensor with `length` entries along `dim`. A view where it is one range."""
        self._require(whole, dim, self.length)
        parts = [whole.narrow(dim, start, stop - start) for start, stop in self.ranges(rank)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else whole

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole of the parts of all ranks, by rank: `length` entries along `dim` in order of position.

        The inverse of `take`. `join(...).narrow(dim, 0, tokens)` is without padding.
        """
        pieces: list[tuple[int, Tensor]] = []
        for rank, part in enumerate(parts):
            self._require(part, dim, self.local_length)
            at = 0
            for start, stop in self.ranges(rank):
                pieces.append((start, part.narrow(dim, at, stop - start)))
                at += stop - start
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([piece for _, piece in pieces], dim) if pieces else parts[0]

    def grouped(self, inner: int) -> SequenceShards:
        """The same sequence cut over groups of `inner` neighbouring ranks.

        Ranks g*inner .. (g+1)*inner - 1 together hold what rank g of the result holds: runs of neighbouring chunks
        are again chunks, `inner` times as long, in the same order.
        """
        if self.size % inner:
            raise ValueError(f"groups of {inner} ranks do not divide {self.size} ranks")
        return SequenceShards(self.tokens, self.length, self.size // inner, self.order)

    @staticmethod
    def _require(tensor: Tensor, dim: int, expected: int) -> None:
        if tensor.shape[dim] != expected:
            raise ValueError(f"dim {dim} of a tensor of shape {tuple(tensor.shape)} must have {expected} entries")
