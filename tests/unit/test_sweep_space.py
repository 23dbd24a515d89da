"""Which points a sweep starts: every layout against brute force, the impossible and the repeated ones dropped."""

from __future__ import annotations

from itertools import product

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from parallax.conf import CONF_DIR
from parallax.plugins import registry
from parallax.plugins.sweep.filter import Filter, Point, reasons
from parallax.plugins.sweep.layouts import as_choice, in_words, layouts, normal
from parallax.plugins.sweep.space import space
from parallax.strategies.layout import Layout


def brute_force(world: int) -> set[tuple[int, int, int, int, int]]:
    """(tp, pp, cp, dp, ep) of every layout of `world` ranks, by trying all numbers."""
    found = set()
    for tp in range(1, world + 1):
        for pp in range(1, world // tp + 1):
            for cp in range(1, world // (tp * pp) + 1):
                dp, left = divmod(world, tp * pp * cp)
                if not left:
                    found |= {(tp, pp, cp, dp, ep) for ep in range(1, dp * cp + 1) if dp * cp % ep == 0}
    return found


def sizes(layout: Layout) -> tuple[int, int, int, int, int]:
    assert layout.data_parallel_size is not None
    return (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size,
            layout.data_parallel_size, layout.expert_parallel_size)  # fmt: skip


def test_every_layout_of_1_to_64_ranks_and_no_other() -> None:
    for world in range(1, 65):
        found = [sizes(layout) for layout in layouts(world, ["tp", "pp", "cp", "ep", "dp"])]
        assert len(found) == len(set(found)) and set(found) == brute_force(world)


def test_axes_that_are_not_given_stay_1_and_other_keys_multiply() -> None:
    found = list(layouts(8, ["tp", "dp"]))
    assert {sizes(layout) for layout in found} == {(t, 1, 1, 8 // t, 1) for t in (1, 2, 4, 8)}
    with_zero = list(layouts(8, ["tp", "dp"], {"zero_stage": [0, 1]}))
    assert {(sizes(layout)[3], layout.zero_stage) for layout in with_zero} == {
        *((dp, 0) for dp in (1, 2, 4, 8)),
        *((dp, 1) for dp in (2, 4, 8)),  # one data rank has nothing to shard
    }
    assert list(layouts(3, ["pp"], {"mb": [3, 6]})) == [normal(Layout.parse(f"pp3 mb{n}"), 3) for n in (3, 6)]


def test_words_lead_back_to_the_layout() -> None:
    vary = {"zero_stage": [0, 1, 2, 3], "num_microbatches": [None, 1, 8], "schedule": ["1f1b", "gpipe"]}
    count = 0
    for layout in layouts(8, ["tp", "pp", "dp"], vary):
        assert normal(Layout.parse(in_words(layout)), 8) == layout
        count += 1
    assert count > 100
    assert in_words(normal(Layout.parse("tp2 zero1"), 8)) == "tp2 dp4 zero1"
    assert in_words(normal(Layout.parse("pp2 mb2"), 4)) == "pp2 dp2"
    folded = [in_words(layout) for layout in layouts(2, ["tp", "ep"], {"etp": [None, 1]})]
    assert folded == ["tp2", "tp2 etp1", "tp2 ep2 etp1"], "experts fold over tp as far as etp says"


def test_choice_for_hydra() -> None:
    sweep = OmegaConf.create({"ranks": 4, "sizes": ["tp", "dp"], "vary": {}})
    assert sorted(as_choice(sweep).split(",")) == ["dp4", "tp2 dp2", "tp4"]
    with pytest.raises(ValueError, match=r"4 ranks cannot be divided over ep with vary=.*add an axis to sweep.sizes"):
        as_choice({"ranks": 4, "sizes": ["ep"]})
    with pytest.raises(ValueError, match="unknown schedule"):
        as_choice({"ranks": 4, "sizes": ["pp"], "vary": {"schedule": ["nothing_like_it"]}})


def point(**keys: object) -> Point:
    config = OmegaConf.create({"layout": keys, "cluster": {"ranks": None}})
    return Point(tuple(f"{k}={v}" for k, v in keys.items()), config)


def test_filter_keeps_each_possible_layout_once() -> None:
    """All products of given sizes on 1 to 64 ranks, most of them impossible or said twice, against plain arithmetic."""
    served = {registry.load("parallax.parallelism", name).axis for name in registry.names("parallax.parallelism")}
    assert {"tp", "pp"} <= served
    choices = {"tp": [1, 2, 3, 8], "pp": [1, 2, 5], "dp": [None, 2, 7], "zero": [0, 1]}
    for world in range(1, 65):
        points = []
        for values in product(*choices.values()):
            keys = dict(zip(choices, values, strict=True))
            points.append(point(**keys))
            points[-1].config.cluster.ranks = world
        kept = Filter().sift(points)
        expected = set()
        for tp, pp, dp, zero in product(*choices.values()):
            rest, left = divmod(world, tp * pp)
            if not left and dp in (None, rest):
                expected.add((tp, pp, rest, zero if rest > 1 else 0))
        found = [(*sizes(p.layout)[:2], sizes(p.layout)[3], p.layout.zero_stage) for p in kept]
        assert len(found) == len(set(found)) and set(found) == expected, world
        assert all(p.dropped for p in points if p not in kept)


def test_reasons_say_what_to_change() -> None:
    points = [point(tp=2), point(tp=3), point(tp=2, dp=2), point(tp=1, dp=4, data_engine="ddp", zero=1)]
    for each in points:
        each.config.cluster.ranks = 4
    assert Filter().sift(points) == points[:1]
    assert "`tp3` needs a multiple of 3 ranks, there are 4; nearest: `dp4`" in points[1].dropped
    assert points[2].dropped == "does the same as tp=2"
    assert "ddp" in points[3].dropped and "zero" in points[3].dropped.lower()
    assert [len(same) for same in reasons(points).values()] == [1, 1, 1]


def composed(*overrides: str) -> Point:
    with initialize_config_dir(CONF_DIR, version_base="1.3"):
        return Point(overrides, compose("train_llama", overrides=list(overrides)))


def test_model_and_batch_are_checked_without_processes_or_memory() -> None:
    base = ("cluster.ranks=8",)
    points = [
        composed("layout=tp2 dp4", *base),
        composed("layout=tp8", *base),
        composed("layout=pp8", *base),
        composed("layout=dp8", "data.global_batch_size=12", *base),
        composed("layout=tp8", "model=llama3_70b", *base),
        composed("layout=tp8 dp2", "model=llama3_70b", *base),
        composed("layout=dp8", "model.num_experts=4", *base),
        composed("layout=dp8", "+trainer.max_stepz=4", *base),
    ]
    kept = Filter().sift(points)
    assert [p.words for p in kept] == ["tp2 dp4", "tp8"] and kept[1] is points[4]
    expected = [
        "num_attention_heads=4 is not divisible by tensor_parallel_size=8; valid sizes for this model: 1, 2, 4",
        "has 4; use pipeline_parallel_size <= 4",
        "data.global_batch_size=12 does not divide over dp8 x mb1 = 8; use 8 or 16",
        "needs exactly 16 ranks, there are 8",
        "model.num_experts=4 is of no use to family 'llama'",
        "did you mean 'max_steps'",
    ]
    dropped = [p.dropped for p in points if p.dropped]
    assert len(dropped) == len(expected)
    for reason, part in zip(dropped, expected, strict=True):
        assert part in reason


def test_points_that_differ_in_anything_else_stay() -> None:
    kept = Filter().sift([composed("layout=dp2"), composed("layout=dp2", "model.num_layers=2"),
                          composed("layout=dp2", "output_dir=/elsewhere")])  # fmt: skip
    assert len(kept) == 2



def test_space_is_the_product_of_the_arguments_and_narrows() -> None:
    found = space({"layout": "'tp2 dp4',dp8"}, ["model.num_layers=2,4,8", "+sweep=layouts_8", "seed=1"], None)
    points = found.points()
    assert len(points) == 6 and points[0] == ("layout='tp2 dp4'", "model.num_layers=2", "+sweep=layouts_8", "seed=1")
    assert found.varied(points[0]) == ("layout='tp2 dp4'", "model.num_layers=2")
    kept = [p for p in points if "layout=dp8" in p and "model.num_layers=8" not in p]
    assert found.narrowed(kept) == {"layout": "layout=choice(dp8)", "model.num_layers": "model.num_layers=choice(2,4)"}
    assert found.narrowed(points) == {}
    assert space({}, ["optim.lr=interval(0.1,0.2)", "seed=1,2"], None).points() == [
        ("optim.lr=0.1", "seed=1"),
        ("optim.lr=0.1", "seed=2"),
    ]
    assert space({}, [f"seed=range(0,{20_000})"], None).points() == []


