"""Bytes of the axes against formulas by hand, and predicted times against a second model in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from parallax.plugins.topology.cost import Shape, groups_of, predict
from parallax.plugins.topology.placement import shape_of
from parallax.plugins.topology.rates import Rates
from parallax.plugins.topology.sites import Sites
from parallax.plugins.topology.traffic import AxisTraffic, ModelShape, traffic_of
from parallax.strategies.layout import Layout
from tests.unit import topologies as topo

MODEL = ModelShape(layers=32, hidden=4096, sequence=8192, parameters=8e9, kv_hidden=1024, moe_layers=16, top_k=2)


def edges(text: str, world: int, model: ModelShape = MODEL) -> dict[str, float]:
    return {t.axis: t.edge_bytes for t in traffic_of(Layout.parse(text).resolve(world), model)}


def test_bytes_by_hand() -> None:
    # one activation: 8192 tokens x 4096 x 2 bytes = 67,108,864
    assert edges("tp4", 4) == {"tp": 2 * 3 / 4 * 4 * 67_108_864 * 32}
    assert edges("pp4 mb8", 4) == {"pp": 8 * 67_108_864}
    assert edges("tp2 pp2 mb4", 4) == {"tp": 2 * 1 / 2 * 4 * 67_108_864 * 16 * 4, "pp": 4 * 67_108_864}
    # gradients of 8e9 / 4 parameters of 2 bytes, all-reduced over 4; three passes instead of two with ZeRO-3
    assert edges("tp2 pp2 dp4", 16)["dp"] == pytest.approx(2 * 3 / 4 * 4e9)
    assert edges("dp4 zero3", 4)["dp"] == pytest.approx(3 * 3 / 4 * 16e9)
    # K and V of 8192/4 tokens x 1024 x 2 bytes each: 8,388,608; 3 rotations forward, 2 x 3 backward, 32 layers
    assert edges("cp4", 4)["cp"] == 9 * 8_388_608 * 32
    assert edges("cp4 tp2", 8)["cp"] == 9 * 8_388_608 * 32 / 2
    # 4 all-to-alls of 2 experts' copies in each of 16 layers; each pair sees a quarter
    assert edges("dp4 ep4", 4)["ep"] == 4 * 67_108_864 * 2 * 16 / 4


def test_an_axis_of_one_rank_moves_nothing() -> None:
    assert traffic_of(Layout.parse("dp1").resolve(1)) == ()
    assert [t.axis for t in traffic_of(Layout.parse("tp2 pp2").resolve(8))] == ["tp", "pp", "dp"]


def test_dp_counts_the_ranks_of_cp() -> None:
    (data,) = [t for t in traffic_of(Layout.parse("cp2 dp3").resolve(6), MODEL) if t.axis == "dp"]
    assert data.size == 6


def test_model_words() -> None:
    text = "layers=32,hidden=4096,sequence=8192,parameters=8e9,kv_hidden=1024,moe_layers=16,top_k=2"
    assert ModelShape.parse(text) == MODEL
    with pytest.raises(ValueError, match="no 'width'"):
        ModelShape.parse("width=3")
    with pytest.raises(ValueError, match="hidden, sequence, parameters must be given"):
        ModelShape.parse("layers=3")


@pytest.mark.parametrize("text", ["tp2 pp3 cp2 dp2 ep2", "tp2 cp2 dp4 ep4", "dp6 ep3 tp2", "tp3 pp2 dp2"])
def test_groups_are_the_meshs(text: str) -> None:
    layout = Layout.parse(text)
    layout = layout.resolve(layout.ranks_needed)
    traffic = [AxisTraffic(axis, "reduce", 2, 1.0) for axis in ("tp", "pp", "cp", "ep", "dp")]
    for each in groups_of(shape_of(layout), traffic):
        assert sorted(map(tuple, each.members.tolist())) == topo.groups(layout, each.traffic.axis)


def test_one_ring_by_hand() -> None:
    """tp4 over two nodes of two: 300 GB/s inside, one port of 12.5 GB/s; all four edges carry the same."""
    cluster, slots = topo.filled(topo.node("a", 2), topo.node("b", 2))
    traffic = [AxisTraffic("tp", "reduce", 4, 25e9)]
    sites = Sites.of(cluster, slots, Rates())
    found = predict(sites, groups_of(Shape(1, 1, 1, 4), traffic), torch.arange(4)[None])
    assert found.seconds.tolist() == [[2.0]]


@pytest.mark.parametrize("seed", range(40))
def test_times_against_the_second_model(seed: int) -> None:
    rng = random.Random(seed)
    text = rng.choice(
        ["tp2 pp2 dp3", "tp4 pp3", "cp3 tp2 dp2 ep2", "dp12", "tp6 dp2", "cp2 dp6 ep4", "pp4 tp3", "tp12"]
    )
    layout = Layout.parse(text).resolve(12)
    cluster, slots = topo.random_cluster(rng, 12)
    rates = Rates(network=rng.choice((1.0, 12.5, 40.0)))
    traffic = traffic_of(layout, rng.choice((None, MODEL)))
    orders = [rng.sample(range(12), 12) for _ in range(3)]
    found = predict(Sites.of(cluster, slots, rates), groups_of(shape_of(layout), traffic), torch.tensor(orders))
    for order, row in zip(orders, found.seconds.tolist(), strict=True):
        assert list(topo.seconds(cluster, slots, layout, traffic, order, rates).values()) == pytest.approx(
            row, rel=1e-12
        )


@pytest.mark.parametrize("text", ["tp8", "tp4 pp2", "tp2 cp2 dp2 ep4"])
def test_times_in_a_fabric_of_several_nodes(text: str) -> None:
    """Four nodes of two: three in one fabric, one apart."""
    nodes = [topo.node(f"n{k}", 2, 18, nics=1, key="clique" if k < 3 else None) for k in range(4)]
    cluster, slots = topo.dealt(*nodes)
    layout = Layout.parse(text).resolve(8)
    traffic = traffic_of(layout)
    for seed in range(5):
        order = random.Random(seed).sample(range(8), 8)
        found = predict(
            Sites.of(cluster, slots, Rates()), groups_of(shape_of(layout), traffic), torch.tensor(order)[None]
        )
        expected = topo.seconds(cluster, slots, layout, traffic, order, Rates())
        assert list(expected.values()) == pytest.approx(found.seconds[0].tolist(), rel=1e-12)
