"""`parallax topo` on machines by name and on captures."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parallax.cli import main

PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tSYS\tNV3\tSYS\t0-31
GPU1\tSYS\t X \tSYS\tNV3\t0-31
GPU2\tNV3\tSYS\t X \tSYS\t32-63
GPU3\tSYS\tNV3\tSYS\t X \t32-63
"""
DGX = "synthetic:2x dgx-h100"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["topo", *arguments])
    return status, *capsys.readouterr()


def test_a_capture_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "box.txt").write_text(PAIRS)
    status, out, err = run(capsys, "--from-file", str(tmp_path / "box.txt"), "--json", "--layout", "tp2")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found["link_domains"] == [[0, 2], [1, 3]]
    assert found["best_tp"]["2"]["groups"] == [[0, 2], [1, 3]]
    assert found["placement"]["new_rank_of"] == [0, 2, 1, 3]
    assert [seat["after"] for seat in found["placement"]["ranks"]] == [
        {"dp": 0, "tp": 0},
        {"dp": 1, "tp": 0},
        {"dp": 0, "tp": 1},
        {"dp": 1, "tp": 1},
    ]


def test_a_refused_capture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cut.txt").write_text(PAIRS[:90])
    status, out, err = run(capsys, "--from-file", str(tmp_path / "cut.txt"), "--json")
    assert (status, out) == (2, "")
    assert err.startswith("parallax topo: ") and len(err) > 30
    status, out, err = run(capsys, "--from-file", str(tmp_path / "none.txt"))
    assert (status, out) == (2, "") and "none.txt: No such file" in err


def test_tables_name_the_order_and_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--probe", DGX, "--dealt", "--layout", "tp8")
    assert status == 0
    assert "NV18 x 28" in out and "node0 ... node1" in out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert ["node1", "0", "1", "dp0 tp1", "8", "dp1 tp0"] in rows
    (tp,) = [row for row in rows if row[0] == "tp"]
    # two rings through eight ports of 12.5 GB/s of each node, before; 450 GB/s inside, after
    assert float(tp[3]) == pytest.approx(450 / 50, rel=1e-2)


def test_the_launchers_order_may_be_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the launcher's order is kept" in run(capsys, "--probe", DGX, "--layout", "tp8")[1]


def test_a_misfit_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--probe", DGX, "--layout", "tp16")[1]
    assert "warning: tp16: 1 of 1 groups leave the fast domain" in out and "`tp8 pp2` stays inside" in out


def test_recorded_json_is_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = run(capsys, "--probe", DGX, "--json")[1]
    (tmp_path / "cluster.json").write_text(first)
    assert json.loads(run(capsys, "--from-file", str(tmp_path / "cluster.json"), "--json")[1]) == json.loads(first)


def test_the_page_needs_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    run(capsys, "--probe", DGX, "--dealt", "--layout", "tp4 pp2", "--html", str(path))
    text = path.read_text()
    seen: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: seen.extend(  # type: ignore[method-assign]
        [tag, *(name for name, _ in attrs if name in ("src", "href", "srcset"))]
    )
    parser.feed(text)
    assert not {"src", "href", "srcset", "script", "link", "img"} & set(seen)
    before, after = (
        ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in text.split("<svg")[1:]
    )
    name = "{http://www.w3.org/2000/svg}"
    for picture in (before, after):
        circles = list(picture.iter(f"{name}circle"))
        assert len(circles) == 16 and len({circle.get("fill") for circle in circles}) == 4
    assert {circle.get("class") for circle in before.iter(f"{name}circle")} == {"split"}
    assert {circle.get("class") for circle in after.iter(f"{name}circle")} == {"whole"}
    ranks = [text.text for text in after.iter(f"{name}text") if text.get("class") == "rank"]
    assert sorted(map(int, filter(None, ranks))) == list(range(16))


def test_a_model_makes_times_absolute(capsys: pytest.CaptureFixture[str]) -> None:
    model = "layers=32,hidden=4096,sequence=8192,parameters=8e9"
    found = json.loads(run(capsys, "--probe", DGX, "--layout", "tp8", "--model", model, "--json")[1])["placement"]
    # 4 all-reduces in each of 32 layers of 67 MB, 7/4 of it over each edge, at 450 GB/s
    assert found["predicted_seconds"]["after"]["tp"] == pytest.approx(4 * 32 * 8192 * 4096 * 2 * 7 / 4 / 450e9)
    assert found["notes"] == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--html", "x.html"], "give a --layout"),
        (["--measure"], "mpirun -n N python -m parallax topo --measure"),
        (["--probe", "synthetic:4x dgx"], "unknown machine 'dgx'"),
        (["--probe", DGX, "--layout", "tp3"], "needs a multiple of 3 ranks"),
        (["--probe", DGX, "--layout", "tp2", "--model", "layers=2"], "hidden, sequence, parameters"),
        (["--probe", DGX, "--network", "0"], "network must be a rate in GB/s above 0"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and reason in err
    assert "{" not in run(capsys, *arguments, "--json")[1]
