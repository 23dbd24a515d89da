"""Parsers of captured topologies: shared captures, texts in the tools' layouts, spoiled and broken ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallax.plugins.topology.answers import answers, answers_of_text
from parallax.plugins.topology.description import Node
from parallax.plugins.topology.text import CaptureError, read_capture, read_node
from tests.topology_texts import LEGEND, SPOILERS, hard_wrap, nvidia, random_cells, rocm, symmetric

CAPTURES = Path(__file__).parents[2].parent / "shared/data/topology"


def _entries() -> list[Any]:
    index = CAPTURES / "index.yaml"
    if not index.is_file():
        reason = (
            f"the shared captures are not here ({CAPTURES.name}/index.yaml beside the repository, under shared/data)"
        )
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(entry, id=entry["id"]) for entry in yaml.safe_load(index.read_text())]


@pytest.mark.parametrize("entry", _entries())
def test_shared_captures(entry: dict[str, Any]) -> None:
    text = (CAPTURES / entry["file"]).read_text()
    if entry["expect"] == "reject":
        with pytest.raises(CaptureError):
            found = answers_of_text(text)
            if not found["complete"]:
                raise CaptureError("reported as incomplete")
        return
    found = answers_of_text(text)
    if entry["expect"] == "warn":
        assert found["notes"]
    elif entry["expect"] == "fabric":
        assert found["multi_node"] == ("not part of" not in entry["note"] and "no NVSwitch" not in entry["note"])
        assert found["fabric"] == ("pcie" if "no NVSwitch" in entry["note"] else "nvlink")
    else:
        assert {key: found.get(key) for key in entry["answer"]} == entry["answer"]


def _texts() -> Iterator[tuple[str, str]]:
    rng = random.Random(5)
    mesh = symmetric(8, lambda i, j: "NV18")
    sockets, cpus = [str(i // 4) for i in range(8)], ["0-47,96-143" if i < 4 else "48-95" for i in range(8)]
    yield "switch, all columns", nvidia(mesh, cpus, sockets, gpu_numa=True)
    yield "random, two columns", nvidia(random_cells(rng, 6), cpus[1:7], sockets[1:7])
    yield "random, no columns", nvidia(random_cells(rng, 5))
    yield "twelve GPUs", nvidia(random_cells(rng, 12), ["0-7"] * 6 + ["8-15"] * 6)
    ports = random_cells(rng, 4 + 10)
    for row in range(14):
        for column in range(4, 14):
            if row != column:
                ports[row][column] = ports[column][row] = "SYS" if (row + column) % 3 else "PIX"
    yield "ten ports", nvidia(ports, cpus[2:6], sockets[2:6], nics=10, gpu_numa=True)
    yield "one GPU", nvidia([["X"]], ["0-19"], ["0"])
    yield "AMD", rocm(symmetric(8, lambda i, j: "XGMI" if (i ^ j) < 4 else "PCIE"), sockets)
    yield "AMD without NUMA", rocm(symmetric(4, lambda i, j: "XGMI"))


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize(("name", "text"), [pytest.param(n, t, id=n) for n, t in _texts()])
def test_what_spoils_a_text_does_not_change_the_answer(name: str, text: str, spoiler: str) -> None:
    expected = answers_of_text(text)
    assert expected["complete"]
    assert answers_of_text(SPOILERS[spoiler](text)) == expected


@pytest.mark.parametrize("seed", range(10))
def test_matrix_and_columns_are_read_back(seed: int) -> None:
    """Every cell and value of a written matrix, at any width of a terminal."""
    rng = random.Random(seed)
    n = rng.randint(1, 10)
    cells = random_cells(rng, n)
    numa = [rng.choice("0123") for _ in range(n)]
    text = nvidia(cells, [f"{8 * int(v)}-{8 * int(v) + 7}" for v in numa], numa, gpu_numa=bool(seed % 2))
    node = read_node(hard_wrap(text, rng.randint(60, 200)))
    names = [["X" if link is None else link.kind.value + str(link.count or "") for link in row] for row in node.links]
    assert names == cells
    assert [device.numa for device in node.devices] == numa
    assert [device.cpus for device in node.devices] == [f"{8 * int(v)}-{8 * int(v) + 7}" for v in numa]


@pytest.mark.parametrize("seed", range(6))
def test_order_of_rows_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    lines = nvidia(random_cells(rng, 8), ["0-7"] * 8, [str(i % 2) for i in range(8)]).split("\n")
    rows = lines[1:9]
    rng.shuffle(rows)
    assert answers_of_text("\n".join([lines[0], *rows, *lines[9:]])) == answers_of_text("\n".join(lines))


@pytest.mark.parametrize("seed", range(4))
def test_renumbered_gpus_have_renumbered_answers(seed: int) -> None:
    rng = random.Random(seed)
    cells = random_cells(rng, 8)
    order = rng.sample(range(8), 8)
    before = answers_of_text(nvidia(cells))
    after = answers_of_text(nvidia([[cells[i][j] for j in order] for i in order]))
    for key in ("link_domains", "link_cliques"):
        renamed = [sorted(order[i] for i in group) for group in after[key]]
        assert sorted(renamed) == sorted(before[key])
    assert sorted(order[i] for i in after["isolated"]) == before["isolated"]
    assert [after["best_tp"][k]["score"] for k in (2, 4, 8)] == [before["best_tp"][k]["score"] for k in (2, 4, 8)]


@pytest.mark.parametrize("seed", range(3))
def test_a_text_that_is_cut_is_refused_or_says_so(seed: int) -> None:
    """At every length: never a wrong answer without a word."""
    rng = random.Random(seed)
    n, ports = rng.choice([2, 4]), rng.choice([0, 2])
    cells = random_cells(rng, n + ports)
    for i in range(n + ports):
        for k in range(n, n + ports):
            if i != k:
                cells[i][k] = cells[k][i] = "PXB"
    text = nvidia(cells, [f"{i % 2}-9" for i in range(n)], [str(i % 2) for i in range(n)], nics=ports, gpu_numa=True)
    whole = answers_of_text(text)
    refused = 0
    for length in range(text.index("Legend")):
        try:
            found = answers_of_text(text[:length])
        except CaptureError:
            refused += 1
            continue
        assert found == whole or not found["complete"] or found["notes"], text[:length]
    assert refused > text.index("GPU1\t", text.index("GPU1\t") + 1), "not before the last GPU's row has begun"


@pytest.mark.parametrize("seed", range(3))
def test_a_lost_line_or_cell_is_refused_or_says_so(seed: int) -> None:
    rng = random.Random(seed)
    text = nvidia(random_cells(rng, 4), ["0-7"] * 4, ["0", "0", "1", "1"])
    whole = answers_of_text(text)
    lines = text.split("\n")
    for i in range(5):
        with pytest.raises(CaptureError):
            answers_of_text("\n".join(lines[:i] + lines[i + 1 :]))
    for i in range(1, 5):
        words = lines[i].split("\t")
        for k in range(5):
            spoiled = [*lines[:i], "\t".join(words[:k] + words[k + 1 :]), *lines[i + 1 :]]
            try:
                assert answers_of_text("\n".join(spoiled)) == whole
            except CaptureError:
                continue


P2P = nvidia(symmetric(3, lambda i, j: "OK"), legend="")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("GPU0 and GPU1 are joined by NV4", "no topology matrix"),
        ("bash: nvidia-smi: command not found", "did not run"),
        ("No devices were found", "found no devices"),
        (P2P, "topo -p2p"),
        (P2P.replace("OK", "NS"), "topo -p2p"),
        (nvidia([["X", "ERR!"], ["ERR!", "X"]]), "'ERR!', which names no path"),
        (nvidia([["X", "NV0"], ["NV0", "X"]]), "'NV0', which names no path"),
        (nvidia([["SYS", "X"], ["X", "SYS"]]), "columns are shifted"),
        (nvidia([["X", "X"], ["PIX", "X"]]), "columns are shifted"),
        (nvidia([["X", "PIX", "SYS"], ["PIX", "X", "SYS"], ["SYS", "SYS", "X"]]).replace("\tGPU2", "", 1), "GPU2"),
        (nvidia([["X", "PIX"], ["PIX", "X"]]).replace("GPU1\tPIX", "GPU5\tPIX"), "GPU5, which the header lacks"),
        ("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV4\tX\nGPU0\tX\tSYS\nGPU1\tSYS\tX\n", "twice with different cells"),
        ("\tGPU0\tGPU1\nGPU0\tX\tNV4\tSYS\nGPU1\tNV4\tX\tSYS\n", "more cells than the header"),
        ("\tGPU0\tNIC0\tGPU1\nGPU0\tX\tSYS\tNV4\nNIC0\tSYS\tX\tSYS\nGPU1\tNV4\tSYS\tX\n", "out of order"),
        (rocm(symmetric(4, lambda i, j: "XGMI")).split("=== Link")[0], "no table of link types"),
        (rocm(symmetric(2, lambda i, j: "UNKNOWN")), "'UNKNOWN', which names no link"),
        (rocm(symmetric(4, lambda i, j: "XGMI")).rpartition("GPU3")[0], "GPU3 are missing: cut short"),
    ],
)
def test_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message.replace("(", r"\(")):
        answers_of_text(text)


def test_directions_that_differ_are_told_and_the_weaker_taken() -> None:
    cells = symmetric(4, lambda i, j: "NV4")
    cells[1][2], cells[3][0] = "SYS", "NV2"
    found = answers_of_text(nvidia(cells))
    assert found["link_cliques"] == [[0, 1, 3], [0, 2, 3]]
    assert found["best_tp"][4]["score"] == [0, 4 * 4 + 2, 0]
    assert "GPU0-GPU3 (NV4 and NV2), GPU1-GPU2 (SYS and NV4)" in found["notes"][0]


def test_missing_rows_of_ports_leave_the_gpus_whole() -> None:
    text = nvidia([["X", "NV4", "PIX"], ["NV4", "X", "SYS"], ["PIX", "SYS", "X"]], ["0-7"] * 2, nics=1)
    found = answers_of_text("\n".join(text.split("\n")[:3]) + "\n")
    assert (found["link_domains"], found["nics"], found["complete"]) == ([[0, 1]], 1, False)
    assert "NIC0" in found["notes"][0]


def test_a_view_of_pcie_alone_does_not_rule_out_nvlink() -> None:
    text = nvidia(symmetric(4, lambda i, j: "PIX" if i // 2 == j // 2 else "SYS"))
    assert answers_of_text(text)["fabric"] == "pcie"
    for partial in (text.replace("  NV#", "  ..."), "$ nvidia-smi topo -mp\n" + text):
        found = answers_of_text(partial)
        assert (found["fabric"], found["link_domains"], found["complete"]) == ("nvlink", [], False)
    old = LEGEND.replace("SYS ", "SOC ").replace("  NV#", "  ...")
    assert answers_of_text(nvidia(symmetric(2, lambda i, j: "SOC"), legend=old))["fabric"] == "pcie"


def test_two_matrices_in_one_text() -> None:
    first, second = nvidia(symmetric(2, lambda i, j: "NV4")), nvidia(symmetric(2, lambda i, j: "SYS"))
    assert answers_of_text(first + first) == answers_of_text(first)
    assert answers_of_text(P2P + second)["gpus"] == 2, "the capability matrix is passed over"
    found = answers_of_text(first + second)
    assert found["link_domains"] == [[0, 1]]
    assert "2 different matrices" in found["notes"][0]


def test_ports_keep_their_names_and_paths() -> None:
    cells = [
        ["X", "SYS", "PIX", "SYS"],
        ["SYS", "X", "SYS", "PXB"],
        ["PIX", "SYS", "X", "SYS"],
        ["SYS", "PXB", "SYS", "X"],
    ]
    node = read_node(nvidia(cells, nics=2))
    assert [(nic.label, nic.device, [link.kind.value for link in nic.links]) for nic in node.nics] == [
        ("NIC0", "mlx5_0", ["PIX", "SYS"]),
        ("NIC1", "mlx5_1", ["SYS", "PXB"]),
    ]
    named = read_node(nvidia(cells, nics=2).replace("NIC0", "rocep49s0").replace("NIC1", "bnxt_re1"))
    assert [(nic.label, nic.device) for nic in named.nics] == [("rocep49s0", "mlx5_0"), ("bnxt_re1", "mlx5_1")]


def test_sockets_from_ports_when_the_affinity_is_masked() -> None:
    """Four GPUs behind NVSwitch with one list of CPUs; each port is near to two of them."""
    near = {(0, 4), (1, 4), (2, 5), (3, 5)}
    cells = symmetric(6, lambda i, j: "NV18" if j < 4 else "PXB" if (i, j) in near else "SYS")
    found = answers_of_text(nvidia(cells, ["0,64"] * 4, ["0-3"] * 4, nics=2))
    assert found["numa_groups"] == [[0, 1, 2, 3]]
    assert found["socket_groups"] == [[0, 1], [2, 3]]
    told = answers_of_text(nvidia(cells, ["0-7", "0-7", "8-15", "8-15"], nics=2))
    assert "socket_groups" not in told
    blind = answers_of_text(nvidia(symmetric(4, lambda i, j: "SYS"), ["0-7"] * 4))
    assert "socket_groups" not in blind, "SYS everywhere tells nothing"


def test_tiles_of_intel() -> None:
    names = ["GPU 0/0", "GPU 0/1", "GPU 1/0", "GPU 1/1"]
    cells = symmetric(4, lambda i, j: "MDF" if i // 2 == j // 2 else "XL8" if (i + j) % 2 else "XL*")
    lines = ["        " + "|".join(names) + "|CPU Affinity"]
    for i, name in enumerate(names):
        row = "|".join(f"{'S' if cell == 'X' else cell:<7}" for cell in cells[i])
        lines.append(f"{name} |{row}|{'0-7' if i < 2 else '8-15'}")
    found = answers_of_text("\n".join(lines))
    assert (found["gpus"], found["fabric"], found["numa_groups"]) == (4, "xelink", [[0, 1], [2, 3]])
    assert found["best_tp"][2] == {"groups": [[0, 1], [2, 3]], "score": [12, 2, 2]}
    assert found["best_tp"][4]["score"] == [5, 2 + 2 * 8 + 2, 0]


def _amd_smi(kinds: list[list[str]]) -> str:
    names = [f"0000:{16 * i + 5:02x}:00.0" for i in range(len(kinds))]

    def table(title: str, cells: list[list[str]]) -> str:
        lines = [title + ":", " " * 13 + " ".join(names)]
        for name, row in zip(names, cells, strict=True):
            lines.append(name + " " + " ".join(f"{cell:<12}" for cell in row))
        return "\n".join(lines) + "\n\n"

    return (
        table("ACCESS TABLE", [["ENABLED"] * len(names)] * len(names))
        + table("HOPS TABLE", [["0" if c == "SELF" else "1" for c in row] for row in kinds])
        + table("LINK TYPE TABLE", kinds)
        + table("NUMA BW TABLE", [["N/A" if c == "SELF" else "1000-64000" for c in row] for row in kinds])
    )


def test_tables_of_amd_smi() -> None:
    kinds = [["SELF" if i == j else "XGMI" if i // 2 == j // 2 else "PCIE" for j in range(4)] for i in range(4)]
    node = read_node(_amd_smi(kinds))
    assert (node.link_domains(), node.fabric, node.numa_groups()) == ([[0, 1], [2, 3]], "xgmi", None)
    assert node.devices[3].bus_id == "0000:35:00.0"
    assert node.link(0, 1).rate == 64.0


def test_json_of_amds_tools() -> None:
    links = [[{"gpu": j, "link_type": "SELF" if i == j else "XGMI"} for j in range(2)] for i in range(2)]
    listed = json.dumps([{"gpu": i, "bdf": f"0000:0{i}:00.0", "links": links[i]} for i in range(2)])
    assert answers_of_text(listed)["link_domains"] == [[0, 1]]
    with pytest.raises(CaptureError, match="JSON of amd-smi"):
        answers_of_text(listed[:-9])
    system = {f"(Topology) Link type between DRM devices {i} and {j}": "XGMI" for i in range(3) for j in range(i)}
    cards = {f"card{i}": {"(Topology) Numa Node": str(i // 2)} for i in range(3)}
    found = answers_of_text(json.dumps({"system": system, **cards}))
    assert (found["link_domains"], found["numa_groups"]) == ([[0, 1, 2]], [[0, 1], [2]])


def test_numa_of_amd_falls_back_to_the_affinity() -> None:
    text = rocm(symmetric(2, lambda i, j: "XGMI"), ["0", "1"])
    assert answers_of_text(text.replace("Numa Node: 1", "Numa Node: -1"))["numa_groups"] == [[0], [1]]
    assert answers_of_text(text.replace(": 0\n", ": -1\n").replace(": 1\n", ": -1\n"))["numa_groups"] is None


def _section(state: str, clique: str, cluster: str, indent: str = "    ") -> str:
    fields = {"State": state, "Status": state, "CliqueId": clique, "ClusterUUID": cluster}
    lines = "".join(f"{indent}    {name:<34}: {value}\n" for name, value in fields.items())
    return f"GPU 00000000:01:00.0\n{indent}Product : none\n{indent}Fabric\n{lines}{indent}Processes : None\n"


RACK = "0a1b2c3d-0000-4000-8000-00000000abcd"
ZERO = "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("text", "fabric", "domains", "note"),
    [
        (_section("Completed", "7", RACK) * 2, "nvlink", {f"{RACK}/7": [0, 1]}, "part of a multi-node"),
        (_section("Completed", "0", ZERO), "nvlink", {}, "not part of"),
        (_section("In Progress", "N/A", "N/A"), "nvlink", {}, "ask again"),
        (_section("In Progress", "7", RACK), "nvlink", {}, "ask again"),
        (_section("N/A", "N/A", "N/A"), "pcie", {}, "no NVSwitch"),
        (f"index, fabric.clusterUuid, fabric.cliqueId\n0, {RACK}, 3\n2, {RACK}, 4\n", "nvlink",
         {f"{RACK}/3": [0], f"{RACK}/4": [2]}, "part of a multi-node"),
        ("index, fabric.cliqueId\n0, [N/A]\n1, [N/A]\n", "pcie", {}, "no NVSwitch"),
        ("index, fabric.state, fabric.cliqueId\n0, Completed, 5\n", "nvlink", {"?/5": [0]}, "which one is not told"),
    ],
)  # fmt: skip
def test_fabric(text: str, fabric: str, domains: dict[str, list[int]], note: str) -> None:
    found = answers_of_text(text)
    assert (found["fabric"], found["fabric_domains"]) == (fabric, domains)
    assert note in found["note"]
    assert found["multi_node"] == bool(domains)


def test_fabric_beside_a_matrix_gives_the_devices_their_domain() -> None:
    text = nvidia(symmetric(2, lambda i, j: "NV18")) + _section("Completed", "7", RACK.upper()) * 2
    found = read_capture(text)
    assert isinstance(found, Node)
    assert {device.domain_key for device in found.devices} == {f"{RACK}/7"}
    with pytest.raises(CaptureError, match="no matrix"):
        read_node(_section("Completed", "7", RACK))


def test_answers_are_plain_values() -> None:
    found = answers(read_node(nvidia(symmetric(4, lambda i, j: "NV2"))))
    assert json.loads(json.dumps(found))["best_tp"]["4"] == {"groups": [[0, 1, 2, 3]], "score": [5, 12, 0]}
