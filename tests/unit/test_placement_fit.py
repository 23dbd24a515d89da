"""Layouts that do not fit the fast domains: what is said, and what is offered instead."""

from __future__ import annotations

import pytest

from parallax.plugins.topology.description import Cluster, Node, Slot
from parallax.plugins.topology.fit import check_fit, fast_domains
from parallax.plugins.topology.placement import place
from parallax.plugins.topology.rates import Rates
from parallax.plugins.topology.sites import Sites
from parallax.plugins.topology.traffic import ModelShape, traffic_of
from parallax.strategies.layout import Layout
from tests.unit import topologies as topo


def test_tp_over_two_nodes_is_refused_with_the_layout_that_fits() -> None:
    cluster, slots = topo.dealt(topo.node("a", 4), topo.node("b", 4))
    with pytest.raises(
        ValueError, match="tp8: 1 of 1 groups leave the fast domain, the largest of which has 4 dev"
    ) as e:
        check_fit(cluster, slots, Layout.parse("tp8"))
    # 300 GB/s inside; between the nodes one port of 12.5
    assert "`tp4 pp2` stays inside, and a byte of tp takes 24 times as long by prediction" in str(e.value)


def test_the_predicted_loss_is_the_ratio_of_the_predicted_times() -> None:
    cluster, slots = topo.dealt(topo.node("a", 4), topo.node("b", 4))
    model = ModelShape(layers=32, hidden=4096, sequence=4096, parameters=7e9)
    with pytest.warns(UserWarning, match="times as long"):
        (misfit,) = check_fit(cluster, slots, Layout.parse("tp8"), on_misfit="warn", model=model)
    assert misfit.better is not None
    better, asked = misfit.better.resolve(8), Layout.parse("tp8").resolve(8)
    times = [sum(place(cluster, slots, each, traffic_of(each, model)).after.values()) for each in (asked, better)]
    assert misfit.loss == pytest.approx(times[0] / times[1])
    # tp8: 4 all-reduces in each of 32 layers of 33.6 MB, 7/4 of it over each edge, through one port of 12.5 GB/s
    assert times[0] == pytest.approx(7 / 4 * 4 * 32 * 4096 * 4096 * 2 / 12.5e9)


def test_bridged_pairs_hold_tp2_and_no_more() -> None:
    cluster, slots = topo.filled(topo.node("a", 4, {(0, 2): 4, (1, 3): 4}))
    assert check_fit(cluster, slots, Layout.parse("tp2")) == ()
    (misfit,) = check_fit(cluster, slots, Layout.parse("tp4"), on_misfit="allow")
    assert str(misfit.better).startswith("tp2 pp2")


def test_without_links_the_node_is_the_domain() -> None:
    cluster, slots = topo.dealt(topo.node("a", 4, 0), topo.node("b", 4, 0))
    assert check_fit(cluster, slots, Layout.parse("tp4")) == ()
    assert len(check_fit(cluster, slots, Layout.parse("tp8"), on_misfit="allow")) == 1
    bare = Cluster((Node("a", (), ()),))
    assert check_fit(bare, [Slot(0, None)] * 4, Layout.parse("tp4")) == ()


def test_a_node_without_links_beside_nodes_with_links() -> None:
    """It has no fast domain that tp could leave; the smaller one of bridged pairs counts on its own node."""
    cluster, slots = topo.dealt(topo.node("a", 4), topo.node("b", 4, 0))
    assert check_fit(cluster, slots, Layout.parse("tp4")) == ()
    cluster, slots = topo.dealt(topo.node("a", 4), topo.node("b", 4, {(0, 1): 4, (2, 3): 4}))
    (misfit,) = check_fit(cluster, slots, Layout.parse("tp4"), on_misfit="allow")
    assert misfit.groups == (1, 2)


def test_one_left_over_group_is_told() -> None:
    cluster, slots = topo.dealt(topo.node("a", 6), topo.node("b", 6), topo.node("c", 4))
    (misfit,) = check_fit(cluster, slots, Layout.parse("tp4"), on_misfit="allow")
    assert misfit.groups == (1, 4)
    assert misfit.better is not None and misfit.better.tensor_parallel_size == 2


def test_experts_over_nodes_are_told() -> None:
    cluster, slots = topo.filled(topo.node("a", 4), topo.node("b", 4))
    (misfit,) = check_fit(cluster, slots, Layout.parse("dp8 ep8"), on_misfit="allow")
    assert (misfit.axis, misfit.groups) == ("ep", (1, 1))
    assert misfit.better is not None and misfit.better.expert_parallel_size == 4


def test_a_fabric_over_nodes_is_one_domain() -> None:
    nodes = [topo.node(f"n{k}", 4, 18, key=f"clique{k % 2}") for k in range(4)]
    cluster, slots = topo.filled(*nodes)
    assert check_fit(cluster, slots, Layout.parse("tp8")) == ()
    domains = fast_domains(Sites.of(cluster, slots, Rates())).tolist()
    assert [domains[0:4] == domains[8:12], domains[0:4] == domains[4:8]] == [True, False]


def test_a_wrong_mode_is_told() -> None:
    cluster, slots = topo.filled(topo.node("a", 2))
    with pytest.raises(ValueError, match="refuse, warn, allow; got 'no'"):
        check_fit(cluster, slots, Layout.parse("tp2"), on_misfit="no")
