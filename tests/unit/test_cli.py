"""The command line, and that a script run through it sees what `python script.py` shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallax.cli import main

SHOW = """
import json, pickle, sys
def f(x: int): ...
class Thing:
    pass
pickle.loads(pickle.dumps(Thing()))
print(json.dumps({
    "name": __name__, "file": __file__, "spec": __spec__ and __spec__.name, "doc": __doc__, "package": __package__,
    "argv": sys.argv, "path0": sys.path[0], "main": sys.modules["__main__"].__dict__ is globals(),
    "annotation": repr(f.__annotations__["x"]), "loader": type(__loader__).__name__,
}))
import atexit
atexit.register(lambda: print(json.dumps({"at exit": sys.modules["__main__"].Thing.__name__})))
sys.exit(int(sys.argv[-1]))
"""


def _python(*arguments: str, cwd: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("how", [["sub/show.py"], ["-m", "sub.show"], ["folder"]])
def test_a_script_sees_what_python_shows_it(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("show.py", "__main__.py"):
        (tmp_path / "sub" / name).write_text(SHOW)
    how = [str(tmp_path / "sub")] if how == ["folder"] else how  # a relative one becomes absolute in argv[0]
    plain = _python(*how, "--lr", "0.1", "plugins", "3", cwd=tmp_path)
    ours = _python("-m", "parallax", *how, "--lr", "0.1", "plugins", "3", cwd=tmp_path)
    assert plain[0] == 3 and '"__main__"' in plain[1]
    if how == ["sub/show.py"]:
        assert ours == plain
        return
    # runpy gives the main module back at the end: only what happens at exit differs
    assert ours[0] == 3
    assert json.loads(ours[1].splitlines()[0]) == json.loads(plain[1].splitlines()[0])


def test_the_strategy_is_known_to_a_script_that_does_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from lightning.pytorch.strategies import StrategyRegistry as known\n"
        "print('parallax_4d' in known and (known.get('parallax_4d').requested_layout.tensor_parallel_size, __name__))\n"
    )
    assert _python("train.py", cwd=tmp_path) == (0, "False\n")
    assert _python("-m", "parallax", "--layout=tp2", "train.py", cwd=tmp_path) == (0, "(2, '__main__')\n")


def test_errors_of_the_script_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text("raise ValueError('mine')\n")
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(ValueError, match="^mine$"):
        main([str(tmp_path / "script.py")])


def test_plugins_as_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["plugins", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert {"group": "parallax.schedules", "name": "gpipe", "distribution": "lightning-parallax"}.items() <= next(
        row for row in rows if row["name"] == "gpipe"
    ).items()
    assert status == int(any(row["error"] for row in rows))
    assert main(["plugins"]) == status
    table = capsys.readouterr().out
    for row in rows:
        assert any(row["name"] in line and row["target"] in line for line in table.splitlines())


def test_a_plugin_that_fails_is_shown_and_sets_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[parallax.probes]\nbroken = no_such_module_here:x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plugins"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "broken" in line]
    assert "ModuleNotFoundError" in line


def test_layout_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "tp2", "pp2 zero1", "--world", "8"]) == 0
    out = capsys.readouterr().out
    for part in ("data_parallel_size: 2", "num_microbatches: 2", "data_engine: auto (deepspeed)", "on 8 ranks"):
        assert part in out
    assert main(["layout", "tp2 pp2 ep4"]) == 0  # the fewest ranks that fit
    assert "tp2 pp2 ep4 dp4 1f1b mb2 on 16 ranks" in capsys.readouterr().out


def test_bad_layout_is_an_error_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "tp2 pp2", "--world", "6"]) == 2
    assert "nearest: `tp2 dp3`" in capsys.readouterr().err
    assert main(["layout", "tq2"]) == 2
    assert "did you mean 'tp2'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["plugin"], ["'plugin'", "did you mean 'plugins'", "layout"]),
        (["trian.py", "--lr", "1"], ["no script 'trian.py'"]),
        (["some/where"], ["no script 'some/where'"]),
        (["-m"], ["name of a module"]),
        (["--layout"], ["--layout needs a value"]),
        (["--layout", "tp2", "plugins"], ["--layout is for a script or module"]),
        (["--layout=tp2", "--help"], ["--layout is for a script or module"]),
        (["--jsn"], ["--jsn"]),
    ],
)
def test_typos(arguments: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
               capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    for part in parts:
        assert part in err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, part in ((["--help"], "-m parallax train.py"), ([], "plugins"), (["--version"], "parallax 0.")):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert part in capsys.readouterr().out
