"""Which rectangles of the score matrix need work, and which of them need a mask.

It is: a plan, made on the CPU from positions (and, for packed documents, from their ids), as a short list of `Tile`. It
is not: computation, and it holds nothing per token. A plan is made once and kept: per shape in a cache, with documents
in the `Documents` of the batch.

Without window, documents and bias a tile is as large as can be and goes to a kernel whole: under a causal mask a
zigzag rank's own block is one causal tile, the block of an earlier rank a full tile of its first half, that of a later
rank a full tile of the second half of the queries. Otherwise tiles have at most `Blocking` rows and columns, so that a
mask is never larger than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from parallax.plugins.context.base import Documents
from parallax.plugins.context.shards import Ranges


class Blocking(NamedTuple):
    """Largest tile that may need a mask: rows (queries) and columns (keys)."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Visible:
    """What of an `AttentionSpec` decides which keys a query sees, documents aside."""

    causal: bool
    window: int | None


@dataclass(frozen=True)
class Tile:
    """Rows `q` against columns `k`.

    Attributes:
        q, k: [start, stop) in the local tensors.
        kind: "full" (every query sees every key), "causal" (row i sees columns 0..i; as many rows as columns), or
            "masked" (see `scores.py`).
        at: global positions of the first row and the first column. Rows and columns of a masked or biased tile are
            consecutive positions.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    kind: Literal["full", "causal", "masked"]
    at: tuple[int, int]


class _Piece(NamedTuple):
    """Consecutive positions [start, stop) that begin at `local` in the tensor."""

    local: int
    start: int
    stop: int

    def part(self, start: int, stop: int) -> _Piece:
        return _Piece(self.local + start - self.start, start, stop)


def plan(
    queries: Ranges, keys: Ranges, tokens: int, visible: Visible, documents: Documents | None, blocking: Blocking | None
) -> tuple[Tile, ...]:
    """Tiles of the queries at `queries` against the keys at `keys`; positions from `tokens` on are left out.

    `blocking` None makes tiles as large as can be; it must be given with a window or documents.
    """
    if documents is None:
        return _plan(queries, keys, tokens, visible, blocking)
    key = (queries, keys, tokens, visible, blocking)
    if key not in documents.plans:
        assert blocking is not None
        documents.plans[key] = tuple(_blocked(queries, keys, tokens, visible, documents.host, blocking))
    return documents.plans[key]


@lru_cache(maxsize=1024)
def _plan(
    queries: Ranges, keys: Ranges, tokens: int, visible: Visible, blocking: Blocking | None
) -> tuple[Tile, ...]:
    if blocking is not None:
        return tuple(_blocked(queries, keys, tokens, visible, None, blocking))
    assert visible.window is None
    return _whole(queries, keys, tokens, visible.causal)


@lru_cache(maxsize=1024)
def sees(queries: Ranges, keys: Ranges, tokens: int, visible: Visible) -> bool:
    """Whether any query sees any key, documents aside."""
    for q in _pieces(queries, tokens):
        for k in _pieces(keys, tokens):
            low, high = _span(q.start, q.stop, visible)
            if max(low, k.start) < min(high, k.stop):
                return True
    return False


def _pieces(ranges: Ranges, tokens: int) -> list[_Piece]:
    pieces, local = [], 0
    for start, stop in ranges:
        if start < tokens:
            pieces.append(_Piece(local, start, min(stop, tokens)))
        local += stop - start
    return pieces


# As large as can be


def _whole(queries: Ranges, keys: Ranges, tokens: int, causal: bool) -> tuple[Tile, ...]:
    rows, columns = _pieces(queries, tokens), _pieces(keys, tokens)
    if not rows or not columns:
        return ()
    if causal and rows == columns:  # positions ascend in both, so row i sees columns 0..i whatever the gaps
        height = rows[-1].local + rows[-1].stop - rows[-1].start
        return (Tile((0, height), (0, height), "causal", (rows[0].start, columns[0].start)),)
    if causal:  # cut where the others begin and end: two pieces are then the same or apart
        cuts = sorted({edge for piece in rows + columns for edge in (piece.start, piece.stop)})
        rows, columns = _cut(rows, cuts), _cut(columns, cuts)
    tiles: list[Tile] = []
    for q in rows:
        for k in columns:
            if not causal or k.stop <= q.start:
                tiles.append(_tile(q, k, "full"))
            elif k.start == q.start:
                tiles.append(_tile(q, k, "causal"))
    return _merge(tiles)


def _cut(pieces: list[_Piece], cuts: list[int]) -> list[_Piece]:
    out = []
    for piece in pieces:
        edges = [piece.start, *(c for c in cuts if piece.start < c < piece.stop), piece.stop]
        out += [piece.part(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    return out


def _tile(q: _Piece, k: _Piece, kind: Literal["full", "causal", "masked"]) -> Tile:
    return Tile((q.local, q.local + q.stop - q.start), (k.local, k.local + k.stop - k.start), kind, (q.start, k.start))


def _merge(tiles: list[Tile]) -> tuple[Tile, ...]:
    """Full tiles of the same rows and adjoining columns as one, then those of the same columns and adjoining rows."""
    merged: list[Tile] = []
    for tile in tiles:
        last = merged[-1] if merged else tile
        if last.kind == tile.kind == "full" and last.q == tile.q and last.k[1] == tile.k[0]:
            merged[-1] = replace(last, k=(last.k[0], tile.k[1]))
        else:
            merged.append(tile)
    out: list[Tile] = []
    for tile in merged:
        above = next((t for t in out if t.kind == tile.kind == "full" and t.k == tile.k and t.q[1] == tile.q[0]), None)
        if above is not None:
            out[out.index(above)] = replace(above, q=(above.q[0], tile.q[1]))
        else:
            out.append(tile)
    return tuple(out)


# In blocks


def _blocked(
    queries: Ranges, keys: Ranges, tokens: int, visible: Visible, ids: torch.Tensor | None, blocking: Blocking
) -> Iterator[Tile]:
    columns = _pieces(keys, tokens)
    for piece in _pieces(queries, tokens):
        for start in range(piece.start, piece.stop, blocking.rows):
            q = piece.part(start, min(start + blocking.rows, piece.stop))
            low, high = _span(q.start, q.stop, visible)
            for k in columns:
                if max(low, k.start) < min(high, k.stop):
                    yield from _row(q, k.part(max(low, k.start), min(high, k.stop)), visible, ids, blocking.columns)


def _span(start: int, stop: int, visible: Visible) -> tuple[int, int]:
    """The positions [low, high) that queries [start, stop) see at most."""
    far = 1 << 62
    low = 0 if visible.window is None else max(0, start - visible.window + 1)
    high = stop if visible.causal else far if visible.window is None else stop + visible.window - 1
    return low, high


def _row(q: _Piece, k: _Piece, visible: Visible, ids: torch.Tensor | None, width: int) -> Iterator[Tile]:
    """Tiles of one block of rows against the keys `k`, which all lie within its span."""
    if ids is not None:
        found = _same_document(q, k, ids)
        if found is None:
            return
        k = found
    for start in range(k.start, k.stop, width):
        part = k.part(start, min(start + width, k.stop))
        full = _all_seen(q, part, visible) and (ids is None or _one_document(q, part, ids))
        yield _tile(q, part, "full" if full else "masked")


def _all_seen(q: _Piece, k: _Piece, visible: Visible) -> bool:
    behind, ahead = q.stop - 1 - k.start, k.stop - 1 - q.start  # the farthest a key is behind, and ahead of, a query
    if visible.causal and ahead > 0:
        return False
    return visible.window is None or max(behind, ahead) < visible.window


def _same_document(q: _Piece, k: _Piece, ids: torch.Tensor) -> _Piece | None:
    """The keys from the first to the last whose document may be that of a query, in any row of the batch."""
    asked, there = ids[:, q.start : q.stop], ids[:, k.start : k.stop]
    low, high = asked.amin(1, keepdim=True), asked.amax(1, keepdim=True)
    hits = ((there >= low) & (there <= high) & (there >= 0)).any(0).nonzero()
    if not len(hits):
        return None
    return k.part(k.start + int(hits[0]), k.start + int(hits[-1]) + 1)


def _one_document(q: _Piece, k: _Piece, ids: torch.Tensor) -> bool:
    asked, there = ids[:, q.start : q.stop], ids[:, k.start : k.stop]
    first = asked[:, :1]
    return bool((asked == first).all() & (there == first).all() & (first >= 0).all())
