"""Layouts: how they are written, refused and resolved; the nearest valid ones against brute force."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError

from parallax.strategies.layout import Layout
from parallax.strategies.layout_nearest import nearest_layouts

FULL = Layout(
    tensor_parallel_size=2,
    pipeline_parallel_size=4,
    context_parallel_size=2,
    expert_parallel_size=2,
    data_parallel_size=2,
    zero_stage=1,
    schedule="gpipe",
    num_microbatches=8,
)


@pytest.mark.parametrize(
    "text",
    [
        "tp2 pp4 cp2 ep2 dp2 zero1 mb8 gpipe",
        "gpipe mb8 dp2 ep2 zero1 cp2 tp2 pp4",
        "tp2xpp4xcp2xep2xdp2 z1 m8 gpipe",
        "tp2 x pp4 x cp2 * ep2 * dp2, z1, m8, GPipe",
        "TP2*PP4*cp2*ep2*dp2*zero1*mb8*gpipe",
        "tp=2 pp=4 context_parallel_size=2 ep=2 dp=2 zero_stage=1 num_microbatches=8 schedule=gpipe",
        "tp2 tp2 tensor_parallel_size=2 pp4 cp2 ep2 dp2 zero1 mb8 gpipe",
    ],
)
def test_parse_reads_every_way_of_writing(text: str) -> None:
    assert Layout.parse(text) == FULL


@pytest.mark.parametrize("text", ["", "  ", "auto"])
def test_parse_of_nothing_is_the_default(text: str) -> None:
    assert Layout.parse(text) == Layout()


def test_parse_reads_the_data_engine() -> None:
    assert Layout.parse("deepspeed").data_engine == "deepspeed"
    assert Layout.parse("data_engine=auto dp=auto").data_engine == "auto"


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("tp2 sp1", True),
        ("sp0 tp2", False),
        ("tp=2 sp=off", False),
        ("tp2 sequence_parallel=true", True),
        ("tp2 sp=auto", None),
        ({"tp": 2, "sp": True}, True),
        ({"tp": 2, "sp": None}, None),
    ],
)
def test_a_switch_is_on_off_or_open(source: Any, value: bool | None) -> None:
    layout = Layout.from_any(source)
    assert layout.sequence_parallel is value
    assert Layout.parse(str(layout)) == layout and Layout(**layout.to_dict()) == layout
    assert str(layout) == "tp2" + {None: "", True: " sp1", False: " sp0"}[value]


def test_a_switch_takes_nothing_else_and_needs_its_axis() -> None:
    for text in ("tp2 sp2", "tp2 sp=perhaps"):
        with pytest.raises(ValueError, match="sequence_parallel must be on or off"):
            Layout.parse(text)
    with pytest.raises(ValueError, match="'sp' in a layout needs a number right after it, e.g. 'sp1'"):
        Layout.parse("tp2 sp")
    with pytest.raises(ValueError, match="sequence_parallel=True .* tensor_parallel_size is 1; set it to 2"):
        Layout.parse("sp1").resolve(2)
    with pytest.raises(ValueError, match="there are 3; nearest"):
        Layout.parse("tp2 sp1").resolve(3)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tq2", ["'tq2'", "'tp2'", "pp<n>"]),
        ("gpip", ["'gpip'", "'gpipe'", "1f1b"]),
        ("pp2 1f1", ["'1f1'", "'1f1b'"]),
        ("tp", ["'tp'", "tp2"]),
        ("tensor_paralel_size=2", ["'tensor_paralel_size'", "'tensor_parallel_size'"]),
        ("schedule=gpip", ["schedule 'gpip'", "'gpipe'"]),
        ("data_engine=dpp", ["data engine 'dpp'", "'ddp'", "auto"]),
        ("tp2 tp4", ["tensor_parallel_size", "twice", "2", "4"]),
        ("zero1 z2", ["zero_stage", "twice"]),
        ("gpipe 1f1b", ["schedule", "'gpipe'", "'1f1b'"]),
        ("tp0", ["tensor_parallel_size", "at least 1", "0"]),
        ("zero4", ["zero_stage", "0 to 3", "4"]),
        ("mb0", ["num_microbatches", "at least 1"]),
        ("v2", ["stages_per_rank 2", "pipeline_parallel_size is 1"]),
        ("stage", ["recompute", "pipeline_parallel_size is 1"]),
        ("pp2 v0", ["stages_per_rank", "at least 1"]),
        ("tp=two", ["tensor_parallel_size", "'two'"]),
        ("tp=-2", ["tensor_parallel_size", "-2"]),
        ("ep3 dp4", ["expert_parallel_size 3", "4 x 1 = 4", "1, 2, 4"]),
        ("tp4 etp3", ["expert_tensor_parallel_size 3", "tensor_parallel_size 4", "1, 2, 4"]),
        ("tp4 etp2 ep3 dp2", ["expert_parallel_size 3", "2 x 1 x 2 = 4", "1, 2, 4"]),
        ("tp2pp2", ["'tp2pp2'"]),
    ],
)
def test_parse_refuses(text: str, parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Layout.parse(text)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [True, 2.0, "2", 0, -1])
def test_sizes_are_whole_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size must be a whole number, at least 1"):
        Layout(tensor_parallel_size=value)


def test_required_sizes_may_not_be_null() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        Layout.from_any({"tp": None})


def test_from_any_takes_everything(tmp_path: Path) -> None:
    want = Layout(tensor_parallel_size=2, zero_stage=1, num_microbatches=4)
    file = tmp_path / "layout.yaml"
    file.write_text("tp: 2\nzero_stage: 1\nnum_microbatches: 4\ndp: auto\nschedule: 1f1b\n")
    short = {"tp": 2, "zero": 1, "mb": 4}
    structured = OmegaConf.merge(OmegaConf.structured(Layout), {"tensor_parallel_size": 2, "zero_stage": 1})

    assert Layout.from_any() == Layout.from_any(None) == Layout()
    assert Layout.from_any("tp2 zero1 mb4") == want
    assert Layout.from_any(short) == want
    assert Layout.from_any(OmegaConf.create(short)) == want
    assert Layout.from_any(str(file)) == want
    assert Layout.from_any(file) == want
    assert Layout.from_any(want) == want
    assert Layout.from_any(structured, num_microbatches=4) == want
    assert Layout.from_any(**short) == want
    assert Layout.from_any("tp2", zero=1, num_microbatches=4) == want
    assert Layout.from_any(Layout(tensor_parallel_size=2), zero=1, mb=4) == want
    assert Layout.from_any("tp2 zero1", num_microbatches=4, zero_stage=1) == want


def test_from_any_refuses_contradictions_and_the_unknown(tmp_path: Path) -> None:
    for source in ("tp2", {"tp": 2}, {"tensor_parallel_size": 2}, Layout(tensor_parallel_size=2)):
        with pytest.raises(ValueError, match="tensor_parallel_size is set twice, to 2 and to 4"):
            Layout.from_any(source, tp=4)
    with pytest.raises(ValueError, match="set twice"):
        Layout.from_any({"tp": 2, "tensor_parallel_size": 4})
    with pytest.raises(ValueError, match="unknown layout key 'tpp'; did you mean 'tp'"):
        Layout.from_any({"tpp": 2})
    with pytest.raises(ValueError, match="unknown layout key 'num_microbatch'; did you mean 'num_microbatches'"):
        Layout.from_any(num_microbatch=2)
    with pytest.raises(ValueError, match="unknown schedule 'gpip'"):
        Layout.from_any(schedule="gpip")
    with pytest.raises(ValueError, match="no layout file '.*nowhere.yaml'"):
        Layout.from_any(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(ValueError, match="got int"):
        Layout.from_any(8)
    for content in ("- tp2\n", "tp: [\n", "tp: ???\n"):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(ValueError, match=r"bad\.yaml|incomplete"):
            Layout.from_any(str(tmp_path / "bad.yaml"))


def test_it_is_an_omegaconf_schema() -> None:
    schema = OmegaConf.structured(Layout)
    merged = OmegaConf.merge(schema, OmegaConf.from_dotlist(["tensor_parallel_size=2", "data_parallel_size=3"]))
    assert OmegaConf.to_object(merged) == Layout(tensor_parallel_size=2, data_parallel_size=3)
    with pytest.raises(ValidationError):
        OmegaConf.merge(schema, {"zero_stage": "much"})
    with pytest.raises(ConfigKeyError):
        OmegaConf.merge(schema, {"tensor_size": 2})


def test_to_dict_is_the_layout() -> None:
    assert Layout(**FULL.to_dict()) == FULL  # type: ignore[arg-type]
    assert Layout.from_any(FULL.to_dict()) == FULL


@pytest.mark.parametrize(
    ("text", "world", "written"),
    [
        ("tp2 pp2 dp2 zero1 1f1b mb4", 8, "tp2 pp2 dp2 zero1 1f1b mb4"),
        ("zero1 pp2 tp2", 8, "tp2 pp2 dp2 zero1 1f1b mb2"),
        ("gpipe tp1 pp3 mb1", 3, "pp3 gpipe mb1"),
        ("", 4, "dp4"),
        ("", 1, "dp1"),
        ("tp2 mb4", 2, "tp2 mb4"),
        ("cp2 ep4 deepspeed zero3", 4, "cp2 ep4 dp2 zero3 deepspeed"),
    ],
)
def test_short_form_of_a_resolved_layout(text: str, world: int, written: str) -> None:
    layout = Layout.parse(text).resolve(world)
    assert str(layout) == written
    assert Layout.parse(written).resolve(world) == layout


def test_resolve_fills_what_was_open() -> None:
    layout = Layout.parse("tp2 pp4 cp2").resolve(64)
    assert (layout.data_parallel_size, layout.num_microbatches, layout.world_size) == (4, 4, 64)
    assert layout.axis_sizes() == {"pp": 4, "dp": 4, "cp": 2, "tp": 2}
    assert list(layout.axis_sizes()) == ["pp", "dp", "cp", "tp"]
    assert layout.resolve(64) == layout
    assert Layout.parse("mb6 pp2").resolve(2).num_microbatches == 6


@pytest.mark.parametrize(("engine", "stage", "resolved"), [
    ("auto", 0, "ddp"), ("auto", 1, "deepspeed"), ("auto", 2, "deepspeed"), ("auto", 3, "deepspeed"),
    ("deepspeed", 0, "deepspeed"),
])  # fmt: skip
def test_resolved_data_engine(engine: str, stage: int, resolved: str) -> None:
    assert Layout(data_engine=engine, zero_stage=stage).resolved_data_engine == resolved


def test_resolve_accepts_exactly_what_brute_force_does() -> None:
    for tp, pp, cp, ep, etp in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), (None, 1, 2)):
        if tp % (etp or tp):
            continue
        asked = Layout(tp, pp, cp, ep, etp)
        beside = cp * tp // (etp or tp)
        for world in range(1, 17):
            fits = any(tp * pp * cp * dp == world and (dp * beside) % ep == 0 for dp in range(1, world + 1))
            try:
                asked.resolve(world)
                accepted = True
            except ValueError:
                accepted = False
            assert accepted == fits, (tp, pp, cp, ep, etp, world)
        assert asked.ranks_needed == next(
            w for w in itertools.count(1) if w % (tp * pp * cp) == 0 and w // (tp * pp * cp) * beside % ep == 0
        )


@pytest.mark.parametrize(
    ("text", "world", "parts"),
    [
        (
            "tp2 pp2",
            6,
            ["`tp2 pp2` needs a multiple of 4 ranks", "there are 6", "`tp2 dp3`, `pp2 dp3`", "4 or 8 ranks"],
        ),
        ("tp2 pp2 zero1", 3, ["multiple of 4", "there are 3", "`dp3 zero1`", "run with 4 ranks"]),
        ("tp2 pp2 dp2", 6, ["exactly 8 ranks", "there are 6", "run with 8 ranks"]),
        ("tp8", 4, ["`tp4`, `tp2 dp2`"]),
        ("tp2 ep4", 4, ["multiple of 8", "ep4 must divide dp x cp", "`tp2 ep2 dp2`"]),
        ("tp2 ep8 etp1", 4, ["multiple of 8", "ep8 must divide dp x cp x tp/etp", "`tp2 ep4 dp2 etp1`"]),
        ("", 0, ["at least 1 rank", "0"]),
    ],
)
def test_resolve_says_what_would_fit(text: str, world: int, parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Layout.parse(text).resolve(world)
    for part in parts:
        assert part in str(caught.value)


def _brute_force_cost(asked: dict[str, int | None], sizes: dict[str, int]) -> tuple[int, int, Fraction]:
    changes = [(old, sizes[a], a) for a, old in asked.items() if old is not None and old != sizes[a]]
    risky = sum(1 for old, new, axis in changes if axis != "dp" and old % new != 0)
    return len(changes), risky, math.prod((Fraction(max(o, n), min(o, n)) for o, n, _ in changes), start=Fraction(1))


@pytest.mark.parametrize(
    "asked",
    [
        {"tp": 2, "pp": 2, "cp": 1, "dp": None, "ep": 1},
        {"tp": 4, "pp": 3, "cp": 2, "dp": 2, "ep": 1},
        {"tp": 3, "pp": 1, "cp": 2, "dp": None, "ep": 4},
    ],
)
@pytest.mark.parametrize("world", [1, 2, 7, 12, 16])
def test_nearest_layouts_are_the_cheapest_of_all_valid_ones(asked: dict[str, int | None], world: int) -> None:
    everything = []
    for tp, pp, cp, dp, ep in itertools.product(range(1, world + 1), repeat=5):
        if tp * pp * cp * dp == world and (dp * cp) % ep == 0 and (ep == 1 or asked["ep"] != 1):
            everything.append({"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep})
    cheapest = sorted(_brute_force_cost(asked, sizes) for sizes in everything)[:4]

    found = nearest_layouts(asked, world, limit=4)

    assert all(sizes in everything for sizes in found)
    assert len({tuple(sizes.items()) for sizes in found}) == len(found) == min(4, len(everything))
    assert [_brute_force_cost(asked, sizes) for sizes in found] == cheapest
