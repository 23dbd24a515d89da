"""Every schedule against what its paper says, against torch's own order, and up to 64 ranks and 512 micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from parallax.plugins import registry
from parallax.plugins.pipeline.actions import Action, placement, splits_backward
from parallax.plugins.pipeline.catalog import find_schedule, make_lists, stages_of
from parallax.plugins.pipeline.gantt import Gantt
from parallax.plugins.pipeline.schedules.basic import forward_only
from parallax.plugins.pipeline.simulator import Costs, check, simulate

NAMES = registry.names("parallax.schedules")
V_SHAPED = ["zb_v", "v_half", "v_min", "dualpipe_v"]
SPLIT = ["zb_h1", "zb_h2", *V_SHAPED]
EQUAL = Costs(forward=1, backward=2, weight=1)


def lists_of(name: str, ranks: int, count: int, stages: int | None = None) -> list[list[Action]]:
    return make_lists(find_schedule(name), ranks, count, stages)


def bubble(found: Gantt) -> float:
    """Idle time of the busiest rank's own span."""
    return found.span - found.ideal


def test_all_are_there() -> None:
    assert set(NAMES) == {"1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", *SPLIT}


@pytest.mark.parametrize("name", NAMES)
def test_complete_ordered_and_free_of_deadlock_at_every_size(name: str) -> None:
    stages = stages_of(find_schedule(name))
    for ranks in (1, 2, 3, 4, 5, 8):
        for count in (*range(1, 10), 2 * ranks - 1, 2 * ranks + 1, 31):
            for each in sorted({stages.default, stages.default if stages.most else 3}):
                lists = lists_of(name, ranks, count, each)  # checks them
                if ranks > 1:
                    assert splits_backward(lists) == (name in SPLIT)
                loop = tuple(s % ranks for s in range(ranks * each))
                turn = tuple(min(s, 2 * ranks - 1 - s) for s in range(ranks * each))
                assert placement(lists) == (turn if name in V_SHAPED else loop)
                check(forward_only(placement(lists), count), count, backward=False)


@pytest.mark.parametrize("name", NAMES)
def test_64_ranks_and_512_microbatches(name: str) -> None:
    found = simulate(lists_of(name, 64, 512), EQUAL)  # no schedule idles more than 1F1B
    assert 0 <= found.bubble <= 63 / (512 + 63) + 1e-12


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_interleaved_1f1b_has_the_papers_bubble_for_any_number_of_microbatches(stages: int) -> None:
    for ranks in (2, 3, 4, 8):
        for count in range(ranks, 4 * ranks + 2):
            lists = lists_of("interleaved_1f1b", ranks, count, stages)
            for costs in (Costs(1, 1), Costs(1, 2), Costs(1, 3.5)):
                # Narayanan et al. 2021, section 2.2.2: (p - 1) / (v m) of the ideal time.
                assert simulate(lists, costs).bubble_of_ideal == pytest.approx((ranks - 1) / (stages * count))
            held = simulate(lists).peak_in_flight
            largest = -(-count // (count // ranks))
            want = [2 * (ranks - r - 1) + (stages - 1) * largest + 1 for r in range(ranks)]
            assert held == tuple(min(n, stages * count) for n in want)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_breadth_first(stages: int) -> None:
    for ranks, count in ((2, 2), (2, 5), (4, 4), (4, 9), (8, 16)):
        found = simulate(lists_of("looped_bfs", ranks, count, stages))
        assert found.bubble_of_ideal == pytest.approx((ranks - 1) / (stages * count))
        assert found.peak_in_flight == (stages * count,) * ranks


@pytest.mark.parametrize(("forward", "inputs", "weight"), [(1, 1, 1), (1, 1.25, 0.75), (1.2, 1, 1), (2, 2.2, 1.8)])
def test_zb_h1_and_h2_have_the_papers_bubble_and_memory(forward: float, inputs: float, weight: float) -> None:
    costs = Costs(forward, inputs + weight, weight)
    for ranks in (1, 2, 3, 4, 8):
        for count in (2 * ranks - 1, 2 * ranks, 4 * ranks + 1):
            h1 = simulate(lists_of("zb_h1", ranks, count), costs)
            h2 = simulate(lists_of("zb_h2", ranks, count), costs)
            # Qi et al. 2023, table 2: (p - 1)(TF + TB - TW) and (p - 1)(TF + TB - 2 TW); p and 2p - 1 activations.
            assert bubble(h1) == pytest.approx((ranks - 1) * (forward + inputs - weight))
            assert bubble(h2) == pytest.approx((ranks - 1) * (forward + inputs - 2 * weight))
            assert set(h1.peak_in_flight) == {min(ranks, count)}
            assert set(h2.peak_in_flight) == {min(2 * ranks - 1, count)}


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 16, 24, 64])
def test_v_schedules_have_the_papers_memory_and_bubble(ranks: int) -> None:
    count = 2 * ranks + 3
    one = simulate(lists_of("1f1b", ranks, count), Costs(2, 4, 2))  # a rank's two stages as one
    assert bubble(one) == 6 * (ranks - 1)
    found = {name: simulate(lists_of(name, ranks, count), EQUAL) for name in ("zb_v", "v_half", "v_min")}
    # Qi et al. 2024: p, (p + 2) // 2 and (p + 4) // 3 whole micro-batches; here in stages, two of which make a rank.
    limits = {"zb_v": ranks, "v_half": (ranks + 2) // 2, "v_min": (ranks + 4) // 3}
    assert {name: max(s.peak_in_flight) for name, s in found.items()} == {n: 2 * limit for n, limit in limits.items()}
    # And: no bubble, about 1/2 and about 2/3 of 1F1B's.
    assert bubble(found["zb_v"]) == 0
    if ranks > 2:
        assert bubble(found["v_half"]) == 3 * ranks - (4 if ranks % 2 else 5)
        assert bubble(found["v_min"]) == 4 * ranks - 5
    assert bubble(found["v_half"]) <= bubble(one) / 2
    assert bubble(found["v_min"]) <= bubble(one) * 2 / 3


def test_dualpipe_v_has_at_most_the_published_bubble_and_memory() -> None:
    for ranks in (2, 4, 8):
        for count in (2 * ranks, 3 * ranks + 1):
            for forward, inputs, weight in ((1, 1, 1), (1, 1.25, 0.75), (2, 2.2, 1.8)):
                found = simulate(lists_of("dualpipe_v", ranks, count), Costs(forward, inputs + weight, weight))
                backward = inputs + weight
                # DeepSeek's table, a forward and a backward together as long as one after the other; p + 1 activations.
                assert bubble(found) <= (ranks - 1) * (forward + backward + backward - 3 * weight) + 1e-9
                assert set(found.peak_in_flight) == {2 * ranks + 1}


def torch_lists(name: str, ranks: int, count: int, stages: int) -> list[list[Action]]:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}

    def action(found: Any) -> Action:
        kind: Any = kinds[found.computation_type.name]
        return Action(kind, found.microbatch_index, found.stage_index)

    return [
        [action(part) for cell in rank if cell is not None for part in (cell.sub_actions or (cell,))]
        for rank in visualizer.get_schedule_ops(name, ranks, count, stages)
    ]


def all_of(actions: list[list[Action]]) -> list[list[Action]]:
    return actions


def without_weights(lists: list[list[Action]]) -> list[list[Action]]:
    return [[action for action in actions if action.kind != "W"] for actions in lists]


@pytest.mark.parametrize(
    ("name", "theirs", "compared"),
    [
        ("interleaved_1f1b", "Interleaved1F1B", all_of),
        ("looped_bfs", "LoopedBFS", all_of),
        ("dualpipe_v", "DualPipeV", all_of),
        ("zb_v", "ZBVZeroBubble", without_weights),  # where weights' halves fill gaps differs, the bubble does not
    ],
)
def test_the_order_is_torchs(name: str, theirs: str, compared: Callable[..., Any]) -> None:
    for ranks, count in ((2, 4), (2, 8), (3, 9), (4, 8), (4, 12), (8, 32)):
        ours, torchs = lists_of(name, ranks, count), torch_lists(theirs, ranks, count, 2)
        assert compared(ours) == compared(torchs)
        assert simulate(ours, EQUAL).makespan == simulate(torchs, EQUAL).makespan


def test_zb_h1_is_written_as_in_the_paper() -> None:
    first, last = lists_of("zb_h1", 2, 3)
    assert " ".join(map(str, first)) == "F0@0 F1@0 I0@0 W0@0 F2@0 I1@0 W1@0 I2@0 W2@0"
    assert " ".join(map(str, last)) == "F0@1 I0@1 F1@1 I1@1 W0@1 F2@1 I2@1 W1@1 W2@1"
