"""Bandwidth and latency between real ranks over gloo."""

from __future__ import annotations

from itertools import combinations

from parallax.plugins.topology.measure import Sample, TorchTransport, measure, plan_rounds
from tests.procs import run_ranks


def _measure(rank: int, world: int) -> list[Sample]:
    return measure(TorchTransport(), plan_rounds([0, 1, 0, 1]), nbytes=2**16)


def test_four_ranks_on_two_nodes() -> None:
    """All ranks know all samples: both pairs inside, and the network between the first ranks."""
    results = run_ranks(4, _measure)
    assert all(result == results[0] for result in results)
    assert sorted((sample.a, sample.b) for sample in results[0]) == [(0, 1), (0, 2), (1, 3)]
    for sample in results[0]:
        assert sample.latency > 0 and 0 < sample.rate < float("inf")  # how fast is the machine's business


def _together(rank: int, world: int) -> list[Sample]:
    return measure(TorchTransport(), plan_rounds([0] * world), nbytes=2**12, limit=0.0)


def test_a_limit_of_nothing_is_one_round() -> None:
    results = run_ranks(4, _together)
    assert all(result == results[0] for result in results)
    pairs = [(sample.a, sample.b) for sample in results[0]]
    assert len(pairs) == 2 and set(pairs) < set(combinations(range(4), 2))
