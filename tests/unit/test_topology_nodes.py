"""Descriptions of nodes and clusters, groups by exact search, and the joining of ranks' views."""

from __future__ import annotations

import json
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import networkx as nx
import pytest
from torch.distributed import TCPStore

from parallax.plugins.topology.description import Cluster, Device, Link, LinkKind, Nic, Node, Slot
from parallax.plugins.topology.gather import gather_cluster, join_views, store_exchange
from parallax.plugins.topology.graph import components, maximal_cliques
from parallax.plugins.topology.grouping import best_groups, score_groups
from parallax.plugins.topology.probes.synthetic import synthetic_cluster, synthetic_node


def random_node(rng: random.Random, n: int, linked: float = 0.5) -> Node:
    def path() -> Link:
        if rng.random() < linked:
            kind = rng.choice([LinkKind.MDF, LinkKind.NVLINK, LinkKind.XGMI, LinkKind.XELINK])
            return Link(kind, rng.randint(1, 4))
        return Link(rng.choice([kind for kind in LinkKind if not kind.is_link]))

    chosen = {pair: path() for pair in combinations(range(n), 2)}
    links = tuple(tuple(None if i == j else chosen[min(i, j), max(i, j)] for j in range(n)) for i in range(n))
    numa = rng.choice([None, "01", "0123"])
    devices = tuple(Device(i, f"GPU{i}", numa=rng.choice(numa) if numa else None) for i in range(n))
    return Node("box", devices, links)


@pytest.mark.parametrize("seed", range(30))
def test_domains_and_cliques_against_networkx(seed: int) -> None:
    rng = random.Random(seed)
    node = random_node(rng, rng.randint(1, 12), rng.random())
    n = len(node.devices)
    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from((i, j) for i, j in combinations(range(n), 2) if node.link(i, j).kind.is_link)
    parts = sorted(sorted(part) for part in nx.connected_components(graph))
    cliques = [sorted(clique) for clique in nx.find_cliques(graph)]
    assert node.link_domains() == [part for part in parts if len(part) > 1]
    assert node.isolated() == sorted(part[0] for part in parts if len(part) == 1)
    expected = sorted((c for c in cliques if len(c) > 1), key=lambda c: (-len(c), c))
    assert node.link_cliques() == expected
    assert node.all_to_all() == (n > 1 and graph.number_of_edges() == n * (n - 1) // 2)
    assert components(node.neighbours()) == parts
    assert maximal_cliques(node.neighbours()) == sorted(cliques)


def every_grouping(rest: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    """All ways to make as many groups of `size` as fit, in no useful order."""
    if len(rest) < size:
        yield []
        return
    for others in combinations(rest[1:], size - 1):
        left = tuple(i for i in rest[1:] if i not in others)
        yield from ([(rest[0], *others), *more] for more in every_grouping(left, size))
    if len(rest) % size:
        yield from every_grouping(rest[1:], size)


def plain_score(node: Node, groups: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """The score from its definition."""
    numa = node.numa_groups()
    worst = sum(min(node.link(i, j).kind.rank for i, j in combinations(group, 2)) for group in groups)
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    inside = sum(node.link(i, j).count for i, j in pairs if node.link(i, j).kind.is_link)
    together = sum(any(set(group) <= set(part) for part in numa) for group in groups) if numa else 0
    return worst, inside, together


@pytest.mark.parametrize("seed", range(25))
def test_best_groups_against_all_groupings(seed: int) -> None:
    rng = random.Random(seed)
    node = random_node(rng, rng.randint(2, 8), rng.choice([0.2, 0.6, 1.0]))
    for size in range(2, len(node.devices) + 1):
        choices = list(every_grouping(tuple(range(len(node.devices))), size))
        best = max(plain_score(node, groups) for groups in choices)
        first = min(groups for groups in choices if plain_score(node, groups) == best)
        found = best_groups(node, size)
        assert (found.score, list(found.groups), found.exact) == (best, first, True)
        assert score_groups(node, found.groups) == best


def test_sixteen_devices_are_searched_in_seconds() -> None:
    node = random_node(random.Random(0), 16)
    start = time.perf_counter()
    for size in (2, 4, 8):
        assert best_groups(node, size).exact
    assert time.perf_counter() - start < 20


def test_a_rack_in_one_host_is_grouped_by_its_links() -> None:
    """Above the exact limit: 72 devices, all linked; 32 in scattered islands of four."""
    all_linked = tuple(tuple(None if i == j else Link(LinkKind.NVLINK, 18) for j in range(72)) for i in range(72))
    found = best_groups(Node("rack", tuple(Device(i, "g") for i in range(72)), all_linked), 8)
    assert (found.score[0], len(found.groups), found.exact) == (5 * 9, 9, False)
    islands = tuple(
        tuple(
            None if i == j else Link(LinkKind.NVLINK, 4) if (i - j) % 8 == 0 else Link(LinkKind.SYS) for j in range(32)
        )
        for i in range(32)
    )
    found = best_groups(Node("big", tuple(Device(i, "g") for i in range(32)), islands), 4)
    assert found.groups == tuple((i, i + 8, i + 16, i + 24) for i in range(8))


@pytest.mark.parametrize("size", [0, 1, 9])
def test_sizes_that_do_not_fit_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {size} from 8 devices"):
        best_groups(synthetic_node("pcie-8"), size)


@pytest.mark.parametrize("seed", range(5))
def test_a_node_survives_json(seed: int) -> None:
    rng = random.Random(seed)
    node = random_node(rng, 5)
    nic = Nic("NIC0", "mlx5_0", tuple(Link(LinkKind.PIX, rate=12.5) for _ in range(5)))
    node = replace(node, nics=(nic,), notes=("a", "b"), complete=False, machine="m", cpus=(4, 4))
    assert Node.from_dict(json.loads(json.dumps(node.to_dict()))) == node
    cluster = Cluster((node, node), (Slot(0, 1), Slot(1, None)), ("n",))
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


@pytest.mark.parametrize("data", [{}, {"format": 99}, {"format": 1}, {"format": 1, "nodes": [{}]}])
def test_what_is_not_a_recording_is_refused(data: dict[str, Any]) -> None:
    for kind in (Node, Cluster):
        with pytest.raises(ValueError, match="not a recorded"):
            kind.from_dict(data)


def test_a_matrix_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="2 x 2 for 2 devices"):
        Node("box", (Device(0, "a"), Device(1, "b")), ((None,),))


def test_kinds_are_ordered_by_speed() -> None:
    order = [LinkKind.SYS, LinkKind.NODE, LinkKind.PHB, LinkKind.PXB, LinkKind.PIX, LinkKind.NVLINK, LinkKind.MDF]
    assert sorted(random.Random(0).sample(order, len(order))) == order
    assert LinkKind.XGMI.rank == LinkKind.NVLINK.rank == LinkKind.XELINK.rank
    assert Link(LinkKind.NVLINK, 4).weaker(Link(LinkKind.NVLINK, 2)).count == 2


def test_domains_cross_hosts_by_their_key_only() -> None:
    rack = synthetic_cluster("2x gb200-nvl72")
    assert [len(domain) for domain in rack.domains()] == [8]
    nodes = [replace(node, devices=tuple(replace(d, domain_key=None) for d in node.devices)) for node in rack.nodes]
    assert [len(domain) for domain in Cluster(tuple(nodes)).domains()] == [4, 4]
    assert Cluster((synthetic_node("pcie-4"),)).domains() == [[(0, i)] for i in range(4)]


class Ranks:
    """Threads that play ranks; their all-gather passes everything through pickle."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._box: list[bytes] = [b""] * size
        self.size = size

    def run(self, function: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            def exchange(value: Any) -> list[Any]:
                self._box[rank] = pickle.dumps(value)
                self._barrier.wait()
                got = [pickle.loads(data) for data in self._box]
                self._barrier.wait()
                return got

            try:
                results[rank] = function(rank, exchange)
            except ValueError as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def test_every_rank_gets_the_same_cluster() -> None:
    """Two hosts, ranks dealt round-robin."""
    nodes = [synthetic_node("hgx-a100-4", f"h{k}", f"m{k}") for k in range(2)]
    found = Ranks(8).run(lambda rank, exchange: gather_cluster(nodes[rank % 2], exchange, rank // 2))
    assert all(cluster == found[0] for cluster in found)
    assert found[0].nodes == tuple(nodes)
    assert found[0].slots == tuple(Slot(rank % 2, rank // 2) for rank in range(8))
    assert found[0].notes == ()


def test_a_torch_store_carries_the_exchange() -> None:
    """A real store on the loopback interface, one client for each rank."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = [synthetic_node("hgx-a100-4", f"h{k}", f"m{k}") for k in range(2)]

    def rank_main(rank: int, _: object) -> Cluster:
        exchange = store_exchange(TCPStore("127.0.0.1", server.port, is_master=False), rank, 4)
        return gather_cluster(nodes[rank // 2], exchange, rank % 2)

    found = Ranks(4).run(rank_main)
    assert found[0].nodes == tuple(nodes)
    assert all(cluster == found[0] for cluster in found)


def test_one_rank_without_a_node_fails_all_with_its_reason() -> None:
    node = synthetic_node("pcie-4")
    found = Ranks(3).run(
        lambda rank, exchange: gather_cluster(node if rank != 1 else None, exchange, rank, "the driver is gone")
    )
    assert {str(error) for error in found} == {"rank 1 could not describe its node: the driver is gone"}


def test_a_device_that_is_not_there_or_taken_is_refused() -> None:
    node = synthetic_node("pcie-4")
    with pytest.raises(ValueError, match="rank 1 on node0 would use device 4, but sees 4"):
        join_views([node, node], [0, 4])
    with pytest.raises(ValueError, match="ranks 0 and 2 both use GPU 3 of node0"):
        join_views([node] * 3, [3, 1, 3])
    assert join_views([node] * 2, [None, None]).slots == (Slot(0, None), Slot(0, None))


def test_hosts_of_one_name_and_of_different_sizes() -> None:
    nodes = [
        synthetic_node("pcie-4", "gpu", "a"),
        synthetic_node("dgx-h100", "gpu", "b"),
        synthetic_node("pcie-4", "x", "c"),
    ]
    cluster = join_views(nodes, [0, 0, 0])
    assert [node.host for node in cluster.nodes] == ["gpu", "gpu#2", "x"]
    assert "several machines are called gpu" in cluster.notes[0]
    assert "gpu 4, gpu#2 8, x 4" in cluster.notes[1]
    assert "gpu pcie, gpu#2 nvlink, x pcie" in cluster.notes[2]


def one_gpu(index: int, switch: int) -> Node:
    """What a rank sees that is shown one GPU, as GPU 0."""
    device = Device(0, "g", uuid=f"GPU-{index}", bus_id=f"0000:{index:02x}:00.0", switch_links=switch)
    return Node("box", (device,), ((None,),), fabric="nvlink" if switch else "pcie", machine="m")


def test_views_of_one_gpu_each_are_joined() -> None:
    """By identity, in PCI order; links that no rank sees follow from the switch, or stay unknown."""
    views = [one_gpu(i, 18) for i in (3, 1, 2)]
    cluster = join_views(views, [0, 0, 0])
    (node,) = cluster.nodes
    assert [device.uuid for device in node.devices] == ["GPU-1", "GPU-2", "GPU-3"]
    assert cluster.slots == (Slot(0, 2), Slot(0, 0), Slot(0, 1))
    assert (node.all_to_all(), node.complete, node.link(0, 2).count) == (True, True, 18)
    (node,) = join_views([one_gpu(1, 0), one_gpu(2, 0)], [0, 0]).nodes
    assert (node.link(0, 1).kind, node.complete) == (LinkKind.UNKNOWN, False)
    assert "paths of 1 pairs are not known" in node.notes[0]
