"""Records to tables, CSV, pictures and a page; the numbers in them are those of the records."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from parallax.cli import main
from parallax.plugins.sweep import figures
from parallax.plugins.sweep.page import write_page
from parallax.plugins.sweep.results import axes_of, read_runs, sort_runs
from parallax.strategies.layout import Layout

MIB = 2**20


def write(folder: Path, words: str, seconds: float | None, memory: int = 100, **overrides: str) -> None:
    layout = Layout.parse(words).resolve(8)
    record = {"layout": words, "layout_keys": layout.to_dict(), "ranks": 8, "seconds": 9.0,
              "overrides": [f"layout={words}", *(f"{k}={v}" for k, v in overrides.items())]}  # fmt: skip
    if seconds is None:
        record |= {"status": "oom", "reason": "rank 3: CUDA <out of memory>"}
    else:
        record |= {"status": "ok", "step_time_s": seconds, "step_time_spread_s": [seconds - 0.1, seconds + 0.2],
                   "step_times_s": [seconds], "tokens_per_s": 100 / seconds, "steps": 1,
                   "peak_memory_bytes": [MIB, memory * MIB], "bytes_per_step": {"tp": 3 * MIB, "data": MIB},
                   "bubble": 0.25, "loss": 4.5, "versions": {"torch": "2"}, "host": "2 cores"}  # fmt: skip
    name = "_".join([words.replace(" ", "_"), *overrides.values()])
    (folder / name).mkdir(parents=True)
    (folder / name / "record.json").write_text(json.dumps(record))


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    folder = tmp_path / "swept"
    for model, factor in (("small", 1.0), ("large", 3.0)):
        write(folder, "dp8", 1.0 * factor, memory=400, model=model)
        write(folder, "tp2 dp4", 0.8 * factor, memory=300, model=model)
        write(folder, "tp2 pp2 dp2", 2.0 * factor, memory=200, model=model)
        write(folder, "pp8", None, model=model)
    return folder


def test_runs_are_sorted_and_named_by_what_differs(swept: Path) -> None:
    runs = sort_runs(read_runs(swept))
    assert [run.series for run in runs] == ["model=large"] * 4 + ["model=small"] * 4
    assert [run.layout for run in runs[4:]] == ["tp2 dp4", "dp8", "tp2 pp2 dp2", "pp8"]
    by_rate = sort_runs(read_runs(swept), "tokens_per_s")
    assert [run.layout for run in by_rate[4:7]] == ["tp2 dp4", "dp8", "tp2 pp2 dp2"]  # more is better
    by_memory = sort_runs(read_runs(swept), "memory_mib")
    assert [run.value("memory_mib") for run in by_memory[4:7]] == [200, 300, 400]  # of the largest rank
    assert set(axes_of(runs)) == {"tp", "pp", "dp", "mb"}  # as many micro-batches as stages
    with pytest.raises(ValueError, match="unknown column 'step_time'; did you mean 'step_time_s'"):
        sort_runs(runs, "step_time")


def test_csv_holds_every_number(swept: Path) -> None:
    write_page(swept)
    rows = list(csv.DictReader((swept / "results.csv").open()))
    (row,) = [row for row in rows if row["series"] == "model=small" and row["layout"] == "tp2 dp4"]
    assert float(row["step_time_s"]) == 0.8 and float(row["spread_s"]) == pytest.approx(0.3)
    assert float(row["sent_mib"]) == 4 and row["bytes_tp"] == str(3 * MIB)
    assert (row["tensor_parallel_size"], row["data_parallel_size"], row["zero_stage"]) == ("2", "4", "0")
    (failed,) = [row for row in rows if row["series"] == "model=small" and row["status"] == "oom"]
    assert failed["step_time_s"] == "" and failed["pipeline_parallel_size"] == "8" and "CUDA" in failed["reason"]


def test_page_needs_nothing_else(swept: Path) -> None:
    page = write_page(swept).read_text()
    assert page.count('<img alt=') == page.count("data:image/png;base64,") == 3
    assert "http" not in page and "<script" not in page and "src=\"d" in page
    assert "CUDA &lt;out of memory&gt;" in page  # text stays text
    assert "Fastest: model=large: tp2 dp4, 2.4 s a step; model=small: tp2 dp4, 0.8 s a step." in page
    assert page.count("<tr class=\"best\">") == 2 and page.count("<tr class=\"failed\">") == 2
    assert all((swept / name).read_bytes()[:4] == b"\x89PNG" for name in ("bars.png", "heatmap.png", "memory.png"))


def test_pictures_show_the_records(swept: Path) -> None:
    runs = sort_runs(read_runs(swept))
    small = figures.bars(runs).axes[1]
    assert [bar.get_width() for bar in small.patches] == [0.8, 1.0, 2.0]
    assert [label.get_text() for label in small.get_yticklabels()] == ["tp2 dp4", "dp8", "tp2 pp2 dp2"]
    assert any("pp8 (oom)" in text.get_text() for text in small.texts)
    heat = figures.heat_map(runs, "tp", "pp").axes[1]
    grid = heat.images[0].get_array()
    assert grid.shape == (3, 2)  # pp 1, 2, 8 x tp 1, 2
    assert grid[0].tolist() == [1.0, 0.8] and grid.mask.tolist() == [[False, False], [True, False], [True, True]]
    assert "oom" in [text.get_text() for text in heat.texts]
    points = figures.memory_against_time(runs).axes[1]
    assert sorted(tuple(c.get_offsets()[0]) for c in points.collections) == [(0.8, 300), (1.0, 400), (2.0, 200)]
    assert figures.pareto([(1, 5), (2, 5), (2, 3), (3, 4), (4, 1)]) == [(1, 5), (2, 3), (4, 1)]
    with pytest.raises(ValueError, match="unknown axis of the heat map 'zero'.*Valid: "):
        figures.heat_map(runs, "zero", "pp")


def test_load_of_experts_is_drawn_for_the_fastest_run_of_each_series(swept: Path) -> None:
    for path in swept.glob("*_small/record.json"):
        record = json.loads(path.read_text())
        if record["layout"] != "pp8":
            path.write_text(json.dumps(record | {"expert_load": {"layers.1": [2, 6, 4, 4], "layers.3": [0, 3]}}))
    page = write_page(swept).read_text()
    assert page.count("<img alt=") == 4 and '<h2>Load of experts: model=small, tp2 dp4</h2><img alt="Load' in page
    ((run, figure),) = figures.expert_loads(sort_runs(read_runs(swept)))
    assert run.layout == "tp2 dp4"
    grid = figure.axes[0].images[0].get_array()
    assert grid[0].tolist() == [0.5, 1.5, 1.0, 1.0] and grid[1, :2].tolist() == [0.0, 2.0] and grid.mask[1, 2:].all()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["layers.1", "layers.3"]


def test_one_layout_makes_no_heat_map_and_no_run_no_page(tmp_path: Path) -> None:
    write(tmp_path / "one", "dp8", 1.0)
    assert write_page(tmp_path / "one") is not None and not (tmp_path / "one" / "heatmap.png").exists()
    write(tmp_path / "failed", "dp8", None)
    assert "1 runs, 1 failed" in write_page(tmp_path / "failed").read_text()
    (tmp_path / "none").mkdir()
    assert write_page(tmp_path / "none") is None


def test_command(swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["results", str(swept), "--table-only"]) == 1
    out = capsys.readouterr().out
    assert "8 runs, 2 failed" in out and "tp2 pp2 dp2" in out and not (swept / "results.html").exists()
    assert main(["results", str(swept), "--out", str(tmp_path / "out"), "--x", "dp", "--y", "tp"]) == 1
    assert (tmp_path / "out" / "results.html").exists() and "results.csv" in capsys.readouterr().out
    for arguments, part in (
        ([str(tmp_path / "nowhere")], "there is no folder"),
        ([str(swept), "--sort", "tokens"], "did you mean 'tokens_per_s'"),
        ([str(swept), "--x", "tpp"], "did you mean 'tp'"),
    ):
        assert main(["results", *arguments]) == 2
        assert part in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["results", str(tmp_path / "empty")]) == 2
    assert "there is no record.json" in capsys.readouterr().err
    (tmp_path / "empty" / "record.json").write_text("{")
    assert main(["results", str(tmp_path / "empty")]) == 2
    assert "is no record" in capsys.readouterr().err
