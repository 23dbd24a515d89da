"""The parts of a sweep, one by one: places, failures, commands, the folder, progress, and what setup refuses."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from parallax.conf import CONF_DIR
from parallax.plugins.launch.watchdog import Limits
from parallax.plugins.sweep.filter import Filter, Point
from parallax.plugins.sweep.folder import SweepFolder, read_record, write_json
from parallax.plugins.sweep.job import Job, Program, failure, job_arguments, job_command
from parallax.plugins.sweep.launcher import Options, SweepLauncher
from parallax.plugins.sweep.places import Places
from parallax.plugins.sweep.progress import Progress, _span
from parallax.strategies.layout import Layout

LIMITS = Limits(5.0, None)


def point(words: str = "tp2", **config: object) -> Point:
    made = OmegaConf.create({"layout": words, **config})
    return Point((f"layout={words}",), made, (f"layout={words}",), Layout.parse(words).resolve(2), 2, "abc")


def test_jobs_share_slots_and_devices() -> None:
    places = Places(slots=4, devices=("a", "b", "c", "d"), most=3)
    assert places.take(0, 2) == ("a", "b")
    assert places.take(1, 4) is None  # not beside the first
    assert places.take(1, 1) == ("c",)
    assert places.take(2, 1) == ("d",)
    assert places.take(3, 1) is None  # three jobs, and no slot
    places.give_back(0)
    assert places.take(3, 1) == ("a",)
    for job in (1, 2, 3):
        places.give_back(job)
    assert places.take(4, 8) == ("a", "b", "c", "d")  # larger than the machine: alone
    assert places.take(5, 1) is None
    one = Places(slots=64)
    assert one.take(0, 1) == () and one.take(1, 1) is None  # one at a time unless asked


FIRST = "parallax launch: the job has failed\nfirst error: rank 1 on node at 10:00:00: {}\n    Traceback ...\n"


@pytest.mark.parametrize(
    ("status", "log", "kind", "reason"),
    [
        (124, "whatever", "timeout", "time limit of 5 s"),
        (1, FIRST.format("torch.OutOfMemoryError: CUDA out of memory. Tried to"), "oom", "rank 1 on node"),
        (1, FIRST.format("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory"), "oom", "allocate"),
        (1, "RuntimeError: out of memory\n" + FIRST.format("ValueError: shape"), "error", "ValueError: shape"),
        (137, FIRST.format("ended by signal 9 (SIGKILL)"), "killed", "when memory runs out"),
        (1, FIRST.format("ValueError: no"), "error", "rank 1 on node at 10:00:00: ValueError: no"),
        (2, "usage: x\nx: error: bad\n", "error", "x: error: bad"),
        (0, "fine\n", "error", "left no record"),
        (1, "", "error", "it printed nothing"),
    ],
)
def test_failures_are_told_apart(status: int, log: str, kind: str, reason: str) -> None:
    found = failure(status, log, LIMITS)
    assert found[0] == kind and reason in found[1]


def test_the_script_is_started_again_with_the_points_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "it's, here"
    program = Program(["train.py"], ["--config-name", "other"])
    arguments = job_arguments(program, point(output_dir=None), folder)
    assert arguments[:4] == ["train.py", "--config-name", "other", "layout=tp2"]
    with initialize_config_dir(CONF_DIR, version_base="1.3"):
        conf = compose("train_llama", overrides=arguments[3:], return_hydra_config=True)
    assert conf.output_dir == folder and conf.hydra.run.dir == str(folder)
    assert not [a for a in job_arguments(program, point(), folder) if a.startswith("output_dir")]


def test_commands_of_both_starters(tmp_path: Path) -> None:
    command, variables = job_command(Program(["t.py"]), point(cluster={"threads": 3}), tmp_path, LIMITS)
    assert "-n" in command and command[command.index("-n") + 1] == "2" and "mpirun" in command[0]
    assert variables["OMP_NUM_THREADS"] == "3"
    command, _ = job_command(Program(["t.py"]), point(cluster={"starter": "torchrun"}), tmp_path, LIMITS)
    assert command[1:3] == ["-m", "torch.distributed.run"] and command[command.index("--nproc-per-node") + 1] == "2"
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=1\ntwo slots=4\n")
    command, _ = job_command(Program(["t.py"]), point(cluster={"hostfile": str(hosts)}), tmp_path, LIMITS)
    assert command[command.index("--host") + 1] == "one:1,two:1"


def test_a_job_that_takes_too_long_is_ended_with_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    limits = Limits(15.0, None)
    job = Job(0, point(cluster={"starter": "torchrun"}), tmp_path / "job", Program([str(script)]), limits)
    try:
        deadline = time.monotonic() + 100
        while job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        job.end()
    assert failure(job.poll(), (tmp_path / "job" / "log.txt").read_text(), limits)[0] == "timeout"
    assert (tmp_path / "job" / "config.yaml").read_text().startswith("layout: tp2")


def test_a_job_that_is_ended_early_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(600)\n")
    job = Job(0, point(cluster={"starter": "torchrun"}), tmp_path / "job", Program([str(script)]), Limits())
    assert job.poll() is None
    job.end()  # the rules of every test then look for what is left
    assert job.poll() not in (None, 0)


def test_a_folder_belongs_to_one_sweep_and_one_process(tmp_path: Path) -> None:
    first = SweepFolder(tmp_path / "s", {"script": "a.py", "arguments": ["x=1,2"]})
    with pytest.raises(ValueError, match=r"is being run by process \d+: wait for it, or .*hydra.sweep.dir"):
        SweepFolder(tmp_path / "s", {"script": "a.py", "arguments": ["x=1,2"]})
    first.close()
    with pytest.raises(ValueError, match=r"holds another sweep \(a.py x=1,2\), this one is a.py x=3: give each"):
        SweepFolder(tmp_path / "s", {"script": "a.py", "arguments": ["x=3"]})
    again = SweepFolder(tmp_path / "s", {"script": "a.py", "arguments": ["x=1,2"]})
    folder = again.job(point("tp2"))
    assert folder == tmp_path / "s" / "jobs" / "tp2-abc" and read_record(folder) is None
    folder.mkdir()
    write_json(folder / "record.json", {"status": "ok"})
    assert read_record(folder) == {"status": "ok"}
    again.close()


def test_progress_is_a_few_lines_with_the_time_left() -> None:
    out = io.StringIO()
    progress = Progress(out, clock=lambda: 0.0)
    points = [point("tp2"), point("pp2"), point("dp2")]
    points[2].dropped = "because"
    progress.dropped(points)
    progress.left, progress.running = 1, 1
    progress.started(0, points[0])
    progress.done = 1
    record = {"status": "ok", "seconds": 90.0, "step_time_s": 0.25, "tokens_per_s": 4096.0}
    progress.ended(0, points[0], record, parallel=1)
    progress.left = progress.running = 0
    progress.ended(1, points[1], {"status": "oom", "seconds": 30.0, "reason": "CUDA out of memory"}, parallel=1)
    said = out.getvalue().splitlines()
    assert said[:3] == ["sweep: 3 points, 1 dropped, 2 to run", "  dropped 1: because", "      layout=dp2"]
    assert said[3] == "[  0] start    tp2"
    assert said[4] == "[  0] ok       tp2: 0.25 s a step, 4,096 tokens/s (1 min 30 s)"
    assert said[5].startswith("      done 1, running 1, left 1, about 3 min 00 s more, end at ")
    assert said[6] == "[  1] oom      pp2: CUDA out of memory (30 s)"
    assert said[7] == "      done 1, running 0, left 0"
    assert (_span(59.6), _span(3661)) == ("1 min 00 s", "1 h 01 min")


def setup(folder: Path, *overrides: str, options: Options | None = None) -> tuple[SweepLauncher, DictConfig]:
    """What Hydra does before a sweeper reads its arguments."""
    launcher = SweepLauncher(options or Options())
    with initialize_config_dir(CONF_DIR, version_base="1.3", job_name="train_llama"):
        first = [text for text in overrides if "," not in text or text.startswith("hydra")]
        config = compose("train_llama", overrides=[*first, f"hydra.sweep.dir='{folder}'", "hydra.mode=MULTIRUN"],
                         return_hydra_config=True)  # fmt: skip
        OmegaConf.set_readonly(config, False)
        with_sweeps = [text for text in overrides if not text.startswith("hydra")]
        OmegaConf.update(config, "hydra.overrides.task", with_sweeps, force_add=True)
        launcher.setup(GlobalHydra.instance().config_loader(), config)
    return launcher, config


def test_impossible_values_leave_the_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher, config = setup(tmp_path / "s", "layout=tp2,tp3,dp2,tp8", "model.num_layers=2,4", "cluster.ranks=2")
    assert list(config.hydra.overrides.task) == ["model.num_layers=2,4", "cluster.ranks=2", "layout=choice(tp2,dp2)"]
    assert "8 points, 4 dropped, 4 to run" in capsys.readouterr().out
    launcher.close()


REFUSED = {
    "nothing is left": (["layout=tp3,tp5", "cluster.ranks=2"], "the sweep is empty: every point was dropped"),
    "interpolation": (["layout=tp2,dp2", "data.path=${nowhere}/x"], "the sweep is empty"),
    "output_dir": (["layout=tp2,dp2", "output_dir=/x"], "leave it out, and set hydra.sweep.dir"),
    "working directory": (["layout=tp2,dp2", "data.path=texts", "hydra.job.chdir=true"],
                          r"data.path=texts is relative, and hydra.job.chdir=True .* write data.path=/"),
    "no hostfile": (["layout=tp2,dp2", "cluster.hostfile=/nowhere"], "hostfile /nowhere: No such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_swept_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, expected = REFUSED[name]
    with pytest.raises(ValueError, match=expected):
        setup(tmp_path / "s", *overrides)
    if name == "interpolation":
        assert "data.path: an interpolation leads nowhere" in capsys.readouterr().out
    assert not (tmp_path / "s").exists()


def test_a_missing_mpirun_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="there is no mpirun beside .* nor on PATH"):
        setup(tmp_path / "s", "layout=tp2,dp2")


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="hydra.launcher.jobs=0 must be at least 1"):
        Options(jobs=0)


def test_filter_of_another_scripts_configuration() -> None:
    """A configuration without our schema needs a layout, in any form, and nothing else."""
    points = [Point(("layout=tp2 dp2",), OmegaConf.create({"layout": "tp2 dp2"})),
              Point(("layout=x",), OmegaConf.create({"lr": 1.0}))]  # fmt: skip
    assert Filter().sift(points) == points[:1] and points[0].ranks == 4
    assert "has no `layout`" in points[1].dropped
