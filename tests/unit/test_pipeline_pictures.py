"""`parallax schedule`: numbers, pictures, files and refusals; and a measured step beside its prediction."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from parallax.cli import main
from parallax.plugins.pipeline.actions import Action, Lists
from parallax.plugins.pipeline.catalog import find_schedule, make_lists
from parallax.plugins.pipeline.gantt import Gantt
from parallax.plugins.pipeline.picture_svg import draw
from parallax.plugins.pipeline.picture_text import COLOURS, chart
from parallax.plugins.pipeline.schedule_csv import load_csv, save_csv
from parallax.plugins.pipeline.simulator import Costs, simulate
from parallax.plugins.pipeline.trace import compare, load_trace, save_trace
from parallax.strategies.layout import Layout

SVG = "{http://www.w3.org/2000/svg}"


def lists_of(name: str, ranks: int, count: int) -> Lists:
    return make_lists(find_schedule(name), ranks, count)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["schedule", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_json_has_actions_makespan_bubbles_and_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "1f1b", "--pp", "4", "--microbatches", "8", "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["makespan"], found["ideal"]) == (33, 24)
    assert found["bubble_of_total"] == pytest.approx(3 / 11)  # (p - 1) / (m + p - 1)
    assert found["bubble_of_ideal"] == pytest.approx(3 / 8)
    assert found["peak_in_flight"] == [4, 3, 2, 1] and found["peak_of_1f1b"] == 1
    assert [a["action"] for a in found["actions"][3][:4]] == ["F0@3", "B0@3", "F1@3", "B1@3"]
    assert found["actions"][3][1] == {
        "action": "B0@3", "kind": "B", "microbatch": 0, "stage": 3, "start": 4, "end": 6
    }  # fmt: skip
    assert found["costs"] == {"F": 1, "B": 2, "I": 1, "W": 1, "transfer": 0}


def test_costs_stages_and_transfers_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["interleaved_1f1b", "--pp", "2", "--microbatches", "4", "--virtual-stages", "3", "--costs", "1,3,1.5"]
    found = json.loads(run(capsys, *words, "--json")[1])
    assert (found["stages_per_rank"], found["placement"]) == (3, [0, 1, 0, 1, 0, 1])
    assert found["makespan"] == pytest.approx(4 * 3 * 4 + 4) and found["costs"]["I"] == 1.5
    # One micro-batch on two ranks waits for one transfer forward and one backward.
    found = json.loads(run(capsys, "1f1b", "--pp", "2", "--microbatches", "1", "--transfer", "0.5", "--json")[1])
    assert found["makespan"] == 7


def test_the_terminal_picture_is_to_scale_and_readable_without_colour(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "1f1b", "--pp", "2", "--microbatches", "3")
    assert status == 0 and "\x1b" not in out
    rows = [line.split("  ", 1)[1] for line in out.splitlines() if line.startswith("rank ")]
    assert rows == [
        "F0--F1--········B0------F2--B1------····B2------",
        "····F0--B0------F1--B1------F2--B2------········",
    ]
    assert "bubble 25.0% of the time (33.3% of ideal)" in out
    assert "forward F = 1, backward B = 2 = input half I = 1 + weight half W = 1" in out


def test_the_terminal_picture_fits_and_has_colours() -> None:
    for width in (40, 80, 200):
        for name, ranks, count in (("1f1b", 4, 8), ("zb_v", 4, 64), ("v_min", 16, 40)):
            text = chart(simulate(lists_of(name, ranks, count)), width)
            lines = text.plain.splitlines()
            assert len(lines) == ranks and len({len(line) for line in lines}) == 1 and len(lines[0]) <= width
    used = {str(span.style) for span in chart(simulate(lists_of("zb_v", 2, 4)), 100).spans}
    for kind in ("F", "I", "W"):
        assert all(any(f"on {colour}" in style for style in used) for colour in COLOURS[kind])  # type: ignore[index]


def test_the_svg_has_every_action_where_it_ran() -> None:
    gantt = simulate(lists_of("dualpipe_v", 2, 6), Costs(1, 2.5, 1))
    root = ElementTree.fromstring(draw(gantt, "dualpipe_v", names=True))
    rows = root.findall(f"{SVG}g")
    assert len(rows) == 2
    for rank, row in enumerate(rows):
        blocks = [rect for rect in row.iter(f"{SVG}rect") if (rect.get("class") or "")[:1] in "FBIW"]
        titles = {(rect.findtext(f"{SVG}title") or "").split(":")[0]: float(rect.get("x") or 0) for rect in blocks}
        assert sorted(titles) == sorted(map(str, gantt.lists[rank]))
        scale = (1160 - 70 - 92) / gantt.makespan
        for action, start in zip(gantt.lists[rank], gantt.starts[rank], strict=True):
            assert titles[str(action)] == pytest.approx(start * scale, abs=0.06)


def test_files_are_complete_in_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, html, table = tmp_path / "a.svg", tmp_path / "a.html", tmp_path / "a.csv"
    words = ["v_half", "--pp", "3", "--microbatches", "5"]
    assert run(capsys, *words, "--svg", str(svg), "--html", str(html), "--csv", str(table))[0] == 0
    ElementTree.parse(svg)
    for text in (svg.read_text(), html.read_text()):
        assert not re.search(r"(href|src)=|@import|url\(", text) and "bubble" in text
    assert load_csv(table) == lists_of("v_half", 3, 5)
    assert "too large" in run(capsys, "1f1b", "--pp", "64", "--microbatches", "512", "--svg", str(svg))[2]
    assert "cannot be written" in run(capsys, "1f1b", "--svg", str(tmp_path / "none" / "a.svg"))[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("1f1c", "unknown schedule '1f1c'; did you mean '1f1b'? Valid: 1f1b, dualpipe_v, gpipe"),
        ("zb-h1", "did you mean 'zb_h1'?"),
        ("1f1b --virtual-stages 2", r"schedule 1f1b puts 1 stage\(s\) on each rank, not 2; set stages_per_rank=1"),
        ("interleaved_1f1b --virtual-stages 1", r"puts 2 or more stage\(s\) on each rank, not 1"),
        ("1f1b --microbatches 0", "needs at least 1 of micro-batches, got 0"),
        ("1f1b --pp 0", "needs at least 1 of ranks, got 0"),
        ("1f1b --costs 1,2", "--costs '1,2' must be three numbers"),
        ("1f1b --costs 1,x,1", "--costs '1,x,1' must be three numbers"),
        ("1f1b --costs 1,1,2", "its weight half, which is a part of the backward"),
        ("1f1b --costs 0,0,0", "not all 0"),
        ("", "name a schedule, e.g. 1f1b"),
        ("none.csv", "schedule file 'none.csv' cannot be read"),
        ("no_such_module:f", "module 'no_such_module' cannot be imported"),
        ("json:dumsp", "unknown schedule of json 'dumsp'; did you mean 'dump'"),
        ("--trace none.json", "trace file 'none.json' cannot be read"),
    ],
)
def test_refusals(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *words.split())
    assert status == 2 and not out
    assert re.search(message if "\\" in message else re.escape(message), err)


# A user's own


def reversed_gpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    order = range(num_microbatches)
    return [
        [Action("F", i, rank) for i in order] + [Action("B", i, rank) for i in reversed(order)]
        for rank in range(num_ranks)
    ]


def test_a_users_function_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:reversed_gpipe"
    assert find_schedule(name) is reversed_gpipe
    found = json.loads(run(capsys, name, "--pp", "2", "--microbatches", "3", "--json")[1])
    assert [a["action"] for a in found["actions"][1]] == ["F0@1", "F1@1", "F2@1", "B2@1", "B1@1", "B0@1"]
    path = tmp_path / "own.csv"
    save_csv(reversed_gpipe(2, 3), path)
    assert json.loads(run(capsys, str(path), "--json")[1])["actions"] == found["actions"]
    assert "is for 2 ranks and 3 micro-batches, not 2 and 4" in run(capsys, str(path), "--microbatches", "4")[2]
    for text in (str(path), name):
        layout = Layout.parse(f"pp2 mb3 schedule={text}")
        assert layout.schedule == text and Layout.parse(str(layout)) == layout
    assert Layout.parse(f"pp2 mb3 {path}").schedule == str(path)


def test_torch_reads_and_writes_the_same_files(tmp_path: Path) -> None:
    schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    lists = lists_of("zb_v", 2, 4)
    path = tmp_path / "ours.csv"
    save_csv(lists, path)
    with open(path) as file:
        rows = [[str(schedules._Action.from_str(cell)) for cell in row] for row in csv.reader(file)]
    assert rows == [[f"{a.stage}{a.kind}{a.microbatch}" for a in actions] for actions in lists]
    path.write_text("0F0,0SEND_F0,,0RECV_B0,0B0\n,1RECV_F0,1F0,1B0,1SEND_B0\n\n")  # with torch's transfers and gaps
    assert load_csv(path) == [[Action("F", 0, 0), Action("B", 0, 0)], [Action("F", 0, 1), Action("B", 0, 1)]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; it needs one row of cells such as 0F0"),
        ("0F0,F0\n", r"row 1, cell 2: 'F0' is no action; write stage, kind \(F, B, I or W\) and micro-batch"),
        ("0F0,0B0\n0F0,0B0\n", "virtual stage 0 is on rank 0 and on rank 1"),
        ("0F0,0B0\n2F0,2B0\n", r"runs stages \[0, 2\]; they must be 0 to n - 1"),
        ("0F0,0B0\n1F0\n", "rank 1 never runs B0@1"),
        ("0B0,0F0\n", "rank 0 runs B0@0 before F0@0"),
        ("0F0,0F0,0B0\n", "rank 0 runs F0@0 after F"),
        ("0F0,0I0\n", "rank 0 never runs W0@0"),
        ("0F0,0I0,0B0\n", "rank 0 runs B0@0 after FI"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "deadlocks: rank 0 at B0@0, rank 1 at F1@1"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0\n", "has 3 stages on 2 ranks; all need equally many"),
    ],
)
def test_bad_files_say_what_is_wrong(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    status, _, err = run(capsys, str(path))
    assert status == 2 and re.search(message, err)


# A real step


def test_a_measured_step_beside_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = lists_of("zb_h1", 3, 6)
    costs = Costs(forward=[0.01, 0.01, 0.02], backward=[0.02, 0.02, 0.04], weight=[0.01, 0.01, 0.02], transfer=0.003)
    times = simulate(lists, costs)
    late = 5.0  # the clock's zero does not matter
    measured = Gantt(
        lists, *([[late + time for time in rank] for rank in of] for of in (times.starts, times.ends))
    )
    found = compare(measured)
    assert found.costs.table(3)["F"] == pytest.approx([0.01, 0.01, 0.02])
    assert found.costs.table(3)["I"] == pytest.approx([0.01, 0.01, 0.02])
    assert found.costs.transfer == pytest.approx(0.003)
    assert found.measured.makespan == pytest.approx(times.makespan)
    assert found.measured.bubble == pytest.approx(found.predicted.bubble) == pytest.approx(times.bubble)
    assert found.slowest_stage == 2 and found.stage_seconds == pytest.approx((0.03, 0.03, 0.06))
    path, html = tmp_path / "trace.json", tmp_path / "trace.html"
    save_trace(measured, path)
    assert load_trace(path) == measured
    status, out, _ = run(capsys, "--trace", str(path), "--html", str(html))
    assert status == 0 and out.count("rank 2") == 3
    assert "slowest: stage 2 on rank 2, 60 ms a micro-batch, 1.50 x the mean" in out
    assert html.read_text().count("<svg") == 2
    numbers = json.loads(run(capsys, "--trace", str(path), "--json")[1])
    assert numbers["slowest_stage"] == numbers["slowest_rank"] == 2
    assert numbers["measured"]["bubble_of_total"] == pytest.approx(times.bubble)
