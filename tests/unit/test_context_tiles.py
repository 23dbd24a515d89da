"""Cutting a sequence, packed documents, and the plan of what is computed: exact, balanced, and no more than needed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from parallax.plugins.context.base import AttentionSpec, Documents, SequenceShards
from parallax.plugins.context.choose import pairs
from parallax.plugins.context.scores import scoring_of
from parallax.plugins.context.tiles import Blocking, Tile, Visible, plan
from tests.attention_reference import seen
from tests.context_cases import document_ids

# Shards


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [0, 1, 7, 24, 25])
def test_shards_cut_and_join(tokens: int, size: int, order: str) -> None:
    shards = SequenceShards.of(tokens, size, order)
    assert tokens <= shards.length < tokens + SequenceShards.multiple_of(size, order)
    whole = shards.pad(torch.arange(2 * tokens).view(2, tokens), 1, value=-1)
    parts = [shards.take(whole, rank, 1) for rank in range(size)]
    assert all(part.shape == (2, shards.local_length) for part in parts)
    assert torch.equal(shards.join(parts, 1), whole)
    assert torch.equal(whole[:, :tokens], torch.arange(2 * tokens).view(2, tokens))
    held = torch.cat([shards.positions(rank) for rank in range(size)])
    assert torch.equal(held.sort().values, torch.arange(shards.length))
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole[:, shards.positions(rank)])


def test_zigzag_is_chunk_and_mirrored_chunk() -> None:
    assert [SequenceShards.of(24, 3).ranges(rank) for rank in range(3)] == [
        ((0, 4), (20, 24)), ((4, 8), (16, 20)), ((8, 16),),
    ]  # fmt: skip


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_a_group_of_neighbours_holds_what_its_rank_holds(order: str) -> None:
    shards = SequenceShards.of(41, 6, order)
    for inner in (1, 2, 3, 6):
        grouped = shards.grouped(inner)
        for group in range(6 // inner):
            of_ranks = torch.cat([shards.positions(group * inner + i) for i in range(inner)])
            assert torch.equal(of_ranks.sort().values, grouped.positions(group))


def test_shards_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of 8, e.g. 24"):
        SequenceShards(20, 20, 4)
    with pytest.raises(ValueError, match="zigzag or contiguous, not 'zagzig'"):
        SequenceShards.of(8, 2, "zagzig")
    with pytest.raises(ValueError, match=r"\(2, 20\) must have 24 entries"):
        SequenceShards.of(20, 4).take(torch.zeros(2, 20), 0, 1)


# Balance


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zigzag_balances_causal_work(size: int) -> None:
    """Within 3 % (the issue's number), where contiguous shards differ by a factor of nearly 2 size."""
    spec, tokens = AttentionSpec(), 4096

    def work(order: str) -> list[int]:
        shards = SequenceShards.of(tokens, size, order)
        return [pairs(shards.ranges(rank), shards.whole, tokens, spec) for rank in range(size)]

    zigzag, contiguous = work("zigzag"), work("contiguous")
    assert sum(zigzag) == sum(contiguous) == tokens * (tokens + 1) // 2
    assert max(zigzag) <= 1.03 * min(zigzag)
    assert max(contiguous) > 2.9 * min(contiguous)


def test_pairs_are_counted_as_one_by_one() -> None:
    draw = random.Random(0)
    for _ in range(300):
        spec = AttentionSpec(causal=draw.random() < 0.5, window=draw.choice([None, 1, 3, 6]))
        shards = SequenceShards.of(draw.randrange(1, 20), draw.choice([1, 2, 3]), draw.choice(["zigzag", "contiguous"]))
        visible = seen(shards.length, spec.causal, spec.window, tokens=shards.tokens)[0, 0]
        for rank in range(shards.size):
            counted = int(visible[shards.positions(rank)].sum())
            assert pairs(shards.ranges(rank), shards.whole, shards.tokens, spec) == counted


# Documents


def test_documents_from_what_users_have() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert Documents.from_positions(positions).ids.tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
    valid = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
    assert Documents.from_positions(positions, valid).ids.tolist() == [[0, 0, 0, 1, 1, -1], [-1, 0, 0, 0, 0, 0]]
    empty_one = torch.tensor([0, 3, 3, 5])
    assert Documents.from_cu_seqlens(empty_one, 7).ids.tolist() == [[0, 0, 0, 2, 2, -1, -1]]
    assert Documents.from_mask(torch.tensor([[0, 1, 1, 2]])).ids.tolist() == [[-1, 1, 1, 2]]
    with pytest.raises(ValueError, match=r"integers \[batch, length\], got torch.float32 \(4,\)"):
        Documents(torch.zeros(4))


# Tiles


def _painted(tiles: tuple[Tile, ...], spec: AttentionSpec, rows: int, columns: int, batch: int) -> Tensor:
    """How often each score is computed and not masked out: [batch, rows, columns]."""
    count = torch.zeros(batch, rows, columns, dtype=torch.int64)
    for tile in tiles:
        height, width = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
        bias = scoring_of(tile, spec, torch.zeros(batch, 1, height, 4)).bias
        shown = torch.ones(1, 1, height, width, dtype=torch.bool) if bias is None else bias > float("-inf")
        if tile.kind == "causal":
            assert height == width
            shown = shown.tril()
        count[:, slice(*tile.q), slice(*tile.k)] += shown[:, 0].long()
    return count


def test_tiles_show_exactly_what_the_mask_shows() -> None:
    """Every score a query may see is computed once, no other ever, for random cuts, masks and blockings."""
    draw = random.Random(1)
    for _ in range(150):
        tokens, size = draw.randrange(1, 40), draw.choice([1, 2, 3, 4])
        shards = SequenceShards.of(tokens, size, draw.choice(["zigzag", "contiguous"]))
        kind = draw.choice([None, "packed", "padding", "single", "nothing"])
        documents = None if kind is None else Documents(document_ids(kind, 2, shards.length))
        spec = AttentionSpec(draw.random() < 0.6, draw.choice([None, 1, 4, 9]), documents=documents)
        plain = spec.window is None and documents is None and draw.random() < 0.5
        blocking = None if plain else Blocking(draw.choice([1, 3, 8]), draw.choice([2, 5, 64]))
        visible = seen(shards.length, spec.causal, spec.window, None if documents is None else documents.ids, tokens)
        see = Visible(spec.causal, spec.window)
        for queries, keys in itertools.product(range(size), repeat=2):
            tiles = plan(shards.ranges(queries), shards.ranges(keys), tokens, see, documents, blocking)
            n = shards.local_length
            right = visible[:, 0][:, shards.positions(queries)][:, :, shards.positions(keys)].expand(2, n, n)
            assert torch.equal(_painted(tiles, spec, n, n, 2), right.long())
            if blocking is not None:
                assert all(t.q[1] - t.q[0] <= blocking.rows and t.k[1] - t.k[0] <= blocking.columns for t in tiles)


def test_a_causal_zigzag_step_is_one_kernel_call() -> None:
    shards, causal = SequenceShards.of(64, 4), Visible(True, None)

    def tiles(queries: int, keys: int) -> list[tuple[tuple[int, int], tuple[int, int], str]]:
        found = plan(shards.ranges(queries), shards.ranges(keys), 64, causal, None, None)
        return [(tile.q, tile.k, tile.kind) for tile in found]

    assert tiles(1, 1) == [((0, 16), (0, 16), "causal")]
    assert tiles(2, 1) == [((0, 16), (0, 8), "full")]  # of an earlier rank: its first half, for all queries
    assert tiles(1, 2) == [((8, 16), (0, 16), "full")]  # of a later rank: all of it, for the second half of the queries


def test_documents_cost_what_they_hold() -> None:
    """Packed documents of 1/8 of the sequence take about 1/8 of its work, not all of it."""
    length = 4096
    ids = (torch.arange(length) // (length // 8)).unsqueeze(0)
    tiles = plan(((0, length),), ((0, length),), length, Visible(True, None), Documents(ids), Blocking(256, 2048))
    area = sum((tile.q[1] - tile.q[0]) * (tile.k[1] - tile.k[0]) for tile in tiles)
    assert length**2 / 2 / 8 < area < 1.6 * length**2 / 2 / 8
