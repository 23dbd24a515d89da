"""Orders of the ranks: against all permutations where there are few, and against the best groups of known machines."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from parallax.plugins.topology.cost import Shape
from parallax.plugins.topology.description import Cluster, Node, Slot
from parallax.plugins.topology.placement import Placement, place, plan_reorder
from parallax.plugins.topology.rates import Rates
from parallax.plugins.topology.search import pack, tiles
from parallax.plugins.topology.traffic import traffic_of
from parallax.strategies.layout import Layout
from tests.unit import topologies as topo

PAIRS = {(0, 3): 4, (1, 2): 4, (4, 6): 4, (5, 7): 4}


def groups(placement: Placement, slots: list[Slot], text: str, axis: str) -> list[list[tuple[int, int | None]]]:
    """(node, device) of the members of each group, sorted."""
    layout = Layout.parse(text).resolve(len(slots))
    at = [(slots[old].node, slots[old].device) for old in placement.slot_of()]
    return sorted(sorted(at[rank] for rank in ranks) for ranks in topo.groups(layout, axis))


@pytest.mark.parametrize("text", ["tp2 pp3", "tp3 dp2", "pp2 cp3", "tp2 dp3 ep3", "pp6", "dp6", "tp2 cp3"])
@pytest.mark.parametrize("which", ["pairs", "uneven", "mixed", "fabric"])
def test_no_order_of_six_is_better(text: str, which: str) -> None:
    """All 720 orders, judged by the second model of `topologies.py`."""
    nodes = {
        "pairs": [topo.node("a", 4, {(0, 2): 4, (1, 3): 4}), topo.node("b", 2, 4)],
        "uneven": [topo.node("a", 3), topo.node("b", 2), topo.node("c", 1)],
        "mixed": [topo.node("a", 6, {(0, 1): 1, (1, 2): 2, (2, 3): 4, (3, 4): 2, (4, 5): 1, (0, 5): 4, (0, 3): 1})],
        "fabric": [topo.node("a", 2, 18, key="k"), topo.node("b", 2, 18), topo.node("c", 2, 18, key="k")],
    }[which]
    cluster, slots = topo.dealt(*nodes)
    layout = Layout.parse(text).resolve(6)
    traffic, rates = traffic_of(layout), Rates()
    found = place(cluster, slots, layout)
    best = min(
        sum(topo.seconds(cluster, slots, layout, traffic, order, rates).values()) for order in permutations(range(6))
    )
    assert sum(found.after.values()) == pytest.approx(best, rel=1e-12)
    own = topo.seconds(cluster, slots, layout, traffic, found.slot_of(), rates)
    assert dict(found.after) == pytest.approx(own)


@pytest.mark.parametrize("seed", range(30))
def test_never_worse_than_the_launchers_order_and_the_same_every_time(seed: int) -> None:
    rng = random.Random(seed)
    world = rng.choice((8, 12, 24))
    text = rng.choice(["tp2 pp2", "tp4", "tp2 cp2", "pp4", "cp2 ep4", "tp4 pp2"])
    cluster, slots = topo.random_cluster(rng, world)
    layout = Layout.parse(text).resolve(world)
    traffic, rates = traffic_of(layout), Rates()
    found = place(cluster, slots, layout)
    assert sorted(found.new_rank_of) == list(range(world))
    before = topo.seconds(cluster, slots, layout, traffic, range(world), rates)
    after = topo.seconds(cluster, slots, layout, traffic, found.slot_of(), rates)
    assert dict(found.before) == pytest.approx(before)
    assert dict(found.after) == pytest.approx(after)
    assert sum(after.values()) <= sum(before.values()) * (1 + 1e-12)
    assert place(cluster, slots, layout) == found


@pytest.mark.parametrize("text", ["tp4", "tp8 pp2", "cp4 ep4"])
def test_a_good_order_is_left_alone(text: str) -> None:
    cluster, slots = topo.filled(topo.node("a", 8), topo.node("b", 8))
    found = place(cluster, slots, Layout.parse(text))
    assert found.new_rank_of == tuple(range(16))
    assert not found.changed
    assert found.speedup == 1.0


def test_dealt_ranks_are_gathered() -> None:
    """Two nodes of four, ranks dealt in turn: tp4 is a node each, and the devices keep their order."""
    cluster, slots = topo.dealt(topo.node("a", 4), topo.node("b", 4))
    found = place(cluster, slots, Layout.parse("tp4"))
    assert found.new_rank_of == (0, 4, 1, 5, 2, 6, 3, 7)
    # before: two rings leave each node over its one port; 300 GB/s inside against 2 rings in 12.5 GB/s
    assert found.before["tp"] / found.after["tp"] == pytest.approx(300 / 6.25)
    assert plan_reorder(cluster, slots, Layout.parse("tp4")) == found.new_rank_of


@pytest.mark.parametrize("seed", range(4))
def test_cube_mesh_halves(seed: int) -> None:
    """tp4 on a DGX-1 is its two fully meshed halves; tp2 its four double links (one group may take another double)."""
    cluster, slots = topo.filled(topo.node("dgx1", 8, topo.DGX1))
    random.Random(seed).shuffle(slots)
    found = place(cluster, slots, Layout.parse("tp4"))
    assert groups(found, slots, "tp4", "tp") == [[(0, i) for i in range(4)], [(0, i) for i in range(4, 8)]]
    doubles = {pair for pair, count in topo.DGX1.items() if count == 2}
    pairs = groups(place(cluster, slots, Layout.parse("tp2 pp2")), slots, "tp2 pp2", "tp")
    assert {(a[1], b[1]) for a, b in pairs} <= doubles


def test_many_cube_meshes() -> None:
    """40 DGX-1 with ranks dealt in turn: the halves again, now from tiles and one search for the kind of node."""
    cluster, slots = topo.dealt(*[topo.node(f"n{k}", 8, topo.DGX1) for k in range(40)])
    found = place(cluster, slots, Layout.parse("tp4 pp4"))
    halves = [[(k, i) for i in range(start, start + 4)] for k in range(40) for start in (0, 4)]
    assert groups(found, slots, "tp4", "tp") == halves


def test_bridged_pairs() -> None:
    cluster, slots = topo.dealt(*[topo.node(f"n{k}", 8, PAIRS) for k in range(3)])
    found = place(cluster, slots, Layout.parse("tp2 pp2"))
    assert groups(found, slots, "tp2 pp2", "tp") == [[(k, a), (k, b)] for k in range(3) for a, b in sorted(PAIRS)]


def test_sixteen_devices_in_four_quads() -> None:
    """Too many for all orders: quads (0, 4, 8, 12), (1, 5, ...) are found by the grouping of the node."""
    quads = {(i, j): 4 for i in range(16) for j in range(i + 1, 16) if i % 4 == j % 4}
    cluster, slots = topo.filled(*[topo.node(f"n{k}", 16, quads) for k in range(5)])
    found = place(cluster, slots, Layout.parse("tp4 dp20"))
    assert groups(found, slots, "tp4", "tp") == [[(k, q + 4 * i) for i in range(4)] for k in range(5) for q in range(4)]


def test_uneven_nodes_break_as_few_groups_as_possible() -> None:
    """6 + 6 + 4 devices and tp4: a whole group in each node; the left-over pairs of the sixes share the fourth."""
    cluster, slots = topo.dealt(topo.node("a", 6), topo.node("b", 6), topo.node("c", 4))
    found = groups(place(cluster, slots, Layout.parse("tp4")), slots, "tp4", "tp")
    assert sorted(len({node for node, _ in group}) for group in found) == [1, 1, 1, 2]


def test_several_nodes_of_one_fabric_are_one_domain() -> None:
    """GB200-like: tp8 over two nodes of four is inside when both are in one clique; cliques are interleaved here."""
    nodes = [topo.node(f"n{k}", 4, 18, key=f"clique{k % 2}") for k in range(8)]
    cluster, slots = topo.filled(*nodes)
    found = place(cluster, slots, Layout.parse("tp8 dp4"))
    assert all(len({node % 2 for node, _ in group}) == 1 for group in groups(found, slots, "tp8", "tp"))
    assert found.before["tp"] > 10 * found.after["tp"]


def test_experts_stay_in_the_node() -> None:
    cluster, slots = topo.dealt(*[topo.node(f"n{k}", 8) for k in range(4)])
    text = "tp2 pp2 dp8 ep4"
    found = place(cluster, slots, Layout.parse(text))
    for axis in ("tp", "ep"):
        assert all(len({node for node, _ in group}) == 1 for group in groups(found, slots, text, axis))


def test_measured_network_decides_between_pp_and_dp() -> None:
    """What a user's own volumes say counts: with little pp and much dp traffic, dp is what stays in the node."""
    from parallax.plugins.topology.traffic import AxisTraffic

    cluster, slots = topo.dealt(topo.node("a", 4), topo.node("b", 4))
    heavy_dp = [AxisTraffic("pp", "chain", 2, 1e6), AxisTraffic("dp", "reduce", 4, 1e9)]
    heavy_pp = [AxisTraffic("pp", "chain", 2, 1e9), AxisTraffic("dp", "reduce", 4, 1e6)]
    layout = Layout.parse("pp2 dp4")
    inside = groups(place(cluster, slots, layout, heavy_dp), slots, "pp2 dp4", "dp")
    assert inside == [[(k, i) for i in range(4)] for k in range(2)]
    stages = groups(place(cluster, slots, layout, heavy_pp), slots, "pp2 dp4", "pp")
    assert all(a[0] == b[0] for a, b in stages)


def test_ranks_without_devices() -> None:
    """CPU nodes: only the node counts."""
    cluster = Cluster((Node("a", (), ()), Node("b", (), ())))
    slots = [Slot(rank % 2, None) for rank in range(8)]
    assert place(cluster, slots, Layout.parse("tp4")).new_rank_of == (0, 4, 1, 5, 2, 6, 3, 7)


def test_work_does_not_grow_faster_than_the_ranks() -> None:
    """The number of orders judged depends on the layout and the kinds of nodes, not on how many nodes there are."""

    def judged(nodes: int) -> int:
        one = topo.node("n", 8, topo.DGX1)
        cluster, slots = topo.dealt(*[one] * nodes)
        return place(cluster, slots, Layout.parse("tp4 pp4")).judged

    assert judged(64) == judged(512) < 100


def test_bad_slots_are_told() -> None:
    cluster, slots = topo.filled(topo.node("a", 2))
    with pytest.raises(ValueError, match="rank 2 uses device 2 of a, which shows 2 devices"):
        place(cluster, [*slots, Slot(0, 2), Slot(0, 1)], Layout.parse("tp2"))
    with pytest.raises(ValueError, match="needs a multiple of 4 ranks"):
        place(cluster, slots, Layout.parse("tp4"))
    with pytest.raises(ValueError, match="at least 1 rank"):
        place(cluster, [], Layout.parse("dp1"))


def test_tiles_fill_a_node_and_start_with_tp() -> None:
    found = tiles(Shape(pp=4, dp=2, cp=1, tp=4), 8)
    inside = [dict(digits[:4]) for digits in found]
    assert inside[0] == {"tp": 4, "cp": 1, "dp": 2, "pp": 1}
    assert {tuple(each.values()) for each in inside} == {
        (4, 1, 2, 1),
        (4, 1, 1, 2),
        (2, 1, 2, 2),
        (2, 1, 1, 4),
        (1, 1, 2, 4),
    }


def test_pack_joins_left_overs() -> None:
    line = pack([[0, 1, 2], [3], [4, 5, 6], [7]], (("tp", 4), ("pp", 2)))
    assert sorted(map(sorted, (line[:4], line[4:]))) in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 7], [3, 4, 5, 6]])


@pytest.mark.parametrize("which", ["cube", "pairs", "dealt", "uneven"])
@pytest.mark.parametrize("text", ["tp4", "tp2 dp4"])
def test_no_order_of_eight_is_better(which: str, text: str) -> None:
    """All orders but for names: tp indices and dp indices mean nothing, so the first group of either is ascending."""
    nodes = {
        "cube": [topo.node("a", 8, topo.DGX1)],
        "pairs": [topo.node("a", 8, PAIRS)],
        "dealt": [topo.node("a", 4), topo.node("b", 4, nics=4)],
        "uneven": [topo.node("a", 5, 4), topo.node("b", 3, {(0, 1): 2, (1, 2): 6})],
    }[which]
    cluster, slots = topo.dealt(*nodes)
    layout = Layout.parse(text).resolve(8)
    traffic, tp = traffic_of(layout), layout.tensor_parallel_size
    orders = [
        order
        for order in permutations(range(8))
        if order[0] == 0 and list(order[:tp]) == sorted(order[:tp]) and list(order[::tp]) == sorted(order[::tp])
    ]
    assert len(orders) == {4: 210 * 4, 2: 840}[tp]
    times = [sum(topo.seconds(cluster, slots, layout, traffic, order, Rates()).values()) for order in orders]
    assert sum(place(cluster, slots, layout).after.values()) == pytest.approx(min(times), rel=1e-12)
