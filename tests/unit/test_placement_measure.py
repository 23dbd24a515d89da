"""The plan of a measurement, its bound in time, and what becomes of the result. Real ranks: `tests/ranks`."""

from __future__ import annotations

import time
from itertools import combinations
from typing import Any

import pytest

from parallax.plugins.topology.description import Cluster, Link, Node, Slot
from parallax.plugins.topology.measure import Sample, correct, measure, plan_rounds, rate_of
from parallax.plugins.topology.rates import Rates
from tests.unit import topologies as topo


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 15, 16])
def test_every_pair_of_a_node_meets_once(ranks: int) -> None:
    rounds = plan_rounds([0] * ranks)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(ranks), 2))
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


@pytest.mark.parametrize("nodes", [2, 3, 5, 128])
def test_every_node_is_seen_over_the_network(nodes: int) -> None:
    node_of = [rank % nodes for rank in range(nodes * 8)]  # dealt
    rounds = plan_rounds(node_of)
    across = [(a, b) for pairs in rounds for a, b in pairs if node_of[a] != node_of[b]]
    assert {node_of[rank] for pair in across for rank in pair} == set(range(nodes))
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


def test_rounds_do_not_grow_with_the_nodes() -> None:
    assert len(plan_rounds([rank // 8 for rank in range(1024)])) == 7 + 6
    assert len(plan_rounds([rank // 8 for rank in range(16384)])) == 7 + 6


class Slow:
    """A communicator of one rank whose every exchange takes 10 ms."""

    rank = 0
    pings = 0

    def ping(self, peer: int, first: bool, nbytes: int) -> None:
        self.pings += 1
        time.sleep(0.01)

    def largest(self, value: float) -> float:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_no_round_begins_after_the_limit() -> None:
    transport = Slow()
    samples = measure(transport, [((0, peer),) for peer in range(1, 50)], repeats=2, limit=0.12)
    assert 2 <= len(samples) <= 3  # 50 ms each: one to warm up, two for the latency, two for the rate
    assert transport.pings == 5 * len(samples)
    assert samples[0].latency == pytest.approx(0.005, rel=0.5)


def test_measured_network_replaces_the_assumed_one() -> None:
    cluster, slots = topo.filled(topo.node("a", 2), topo.node("b", 2))
    samples = [Sample(0, 2, 0.011, 1e-4), Sample(1, 3, 0.013, 1e-4), Sample(0, 1, 3.0, 1e-5)]
    same, rates, notes = correct(cluster, slots, samples, devices=False)
    assert same == cluster and notes == ()
    assert rates == Rates(network=0.012, ports=1)


def test_a_link_that_is_slower_than_its_label_is_believed() -> None:
    cluster, slots = topo.filled(topo.node("a", 4))
    samples = [Sample(a, b, 240.0, 1e-6) for a, b in combinations(range(4), 2) if (a, b) != (1, 3)]
    found, rates, notes = correct(cluster, slots, [*samples, Sample(1, 3, 20.0, 1e-6)], devices=True)
    assert rates == Rates()
    assert notes == ("a: devices 1 and 3 reach 20 GB/s, other NV12 pairs 240",)
    assert [found.nodes[0].links[1][j] for j in (0, 3)] == [Link(topo.NV, 12, 240.0), Link(topo.NV, 12, 20.0)]
    assert found.nodes[0].links[3][1] == Link(topo.NV, 12, 20.0)


def test_ranks_without_devices_measure_the_host() -> None:
    cluster = Cluster((Node("a", (), ()),))
    slots = [Slot(0, None)] * 2
    assert correct(cluster, slots, [Sample(0, 1, 7.0, 1e-6)], devices=False)[1] == Rates(host=7.0)


def test_noise_is_not_an_unlimited_rate() -> None:
    assert rate_of(1_000_000, 2e-3, 1e-3) == pytest.approx(1.0)
    assert rate_of(65_536, 1e-4, 1.2e-4) == pytest.approx(65_536 / 1e-5 / 1e9)  # latency above the whole time
    assert rate_of(65_536, 1e-4, 0.0) == pytest.approx(65_536 / 1e-4 / 1e9)
