"""hwloc's XML: links that end at GPUs and at switches, the tree of bridges, and files that must be refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallax.plugins.topology.answers import answers
from parallax.plugins.topology.description import LinkKind, Node
from parallax.plugins.topology.probes import ProbeError
from parallax.plugins.topology.probes.hwloc import HwlocProbe
from parallax.plugins.topology.text import CaptureError, read_capture, read_node
from parallax.plugins.topology.text.hwloc import read_hwloc
from tests.hwloc_xml import NVSWITCH, Machine, bridge, gpu, pci, port

CUBE = {(0, 1): 1, (0, 2): 1, (1, 3): 1, (2, 3): 2, (0, 3): 2, (1, 2): 2}


def square(n: int, cells: dict[tuple[int, int], int], diagonal: int = 1000000) -> list[list[int]]:
    return [[diagonal if i == j else cells.get((min(i, j), max(i, j)), 0) for j in range(n)] for i in range(n)]


def switched(gpus: int, switches: int, each: int = 25000) -> Machine:
    """Like a DGX-2: each half of the GPUs has a link to each of its half of the switches, and trunks are not told."""
    machine = Machine(version="3.0")
    for half in range(2):
        mine = range(half * gpus // 2, (half + 1) * gpus // 2)
        theirs = range(50 + half * switches // 2, 50 + (half + 1) * switches // 2)
        machine.hang(half, *(bridge(gpu(i)) for i in mine), *(bridge(pci(s, NVSWITCH)) for s in theirs))
    ends = [f"OSDev:{200 + i}" for i in range(gpus)] + [f"PCIDev:{150 + s}" for s in range(switches)]
    cells = {
        (i, gpus + s): each for i in range(gpus) for s in range(switches) if i // (gpus // 2) == s // (switches // 2)
    }
    return machine.matrix("NVLinkBandwidth", ends, square(gpus + switches, cells, 0))


def test_gpus_whose_links_end_at_switches_are_one_domain() -> None:
    node = read_hwloc(switched(16, 12).xml())
    found = answers(node)
    assert (found["gpus"], found["fabric"], found["all_to_all"], found["complete"]) == (16, "nvlink", True, True)
    assert (node.link(0, 15).count, node.link(0, 15).rate) == (6, 150.0)
    assert [device.switch_links for device in node.devices] == [6] * 16
    assert found["numa_groups"] == [list(range(8)), list(range(8, 16))]


def test_one_gpu_with_a_switch_is_in_a_fabric_all_the_same() -> None:
    """A container with one GPU: nothing to link to, but ranks that see the other GPUs may join it to them."""
    node = read_hwloc(Machine(1, "3.0").hang(0, gpu(0), pci(50, NVSWITCH)).matrix(
        "NVLinkBandwidth", ["OSDev:200", "PCIDev:150"], [[0, 50000], [50000, 0]]).xml())  # fmt: skip
    assert (node.fabric, node.devices[0].switch_links, node.isolated()) == ("nvlink", 2, [0])


def test_direct_links_are_counted_by_their_bandwidth() -> None:
    machine = Machine().hang(0, *(bridge(bridge(gpu(i))) for i in range(2)))
    machine.hang(1, *(bridge(bridge(gpu(i))) for i in (2, 3)))
    cells = {pair: 25000 * count for pair, count in CUBE.items()}
    node = read_hwloc(machine.matrix("NVLinkBandwidth", [f"OSDev:{200 + i}" for i in range(4)], square(4, cells)).xml())
    assert {pair: node.link(*pair).count for pair in CUBE} == CUBE
    assert node.link(0, 3).rate == 50.0
    assert node.devices[3].uuid == "GPU-3" and node.devices[3].bus_id == "0000:13:00.0"
    assert Node.from_dict(node.to_dict()) == node


def test_links_to_the_cpu_join_no_gpus() -> None:
    """As on a POWER machine: 40 GB/s between two GPUs, and from each to its own socket."""
    machine = Machine().hang(0, gpu(0), gpu(1)).hang(1, gpu(2), gpu(3))
    ends = [f"OSDev:{200 + i}" for i in range(4)] + ["Package:900", "Package:901"]
    cells = {(0, 1): 40000, (2, 3): 40000, (0, 4): 40000, (1, 4): 40000, (2, 5): 40000, (3, 5): 40000}
    node = read_hwloc(machine.matrix("NVLinkBandwidth", ends, square(6, cells)).xml())
    assert node.link_domains() == [[0, 1], [2, 3]]
    assert (node.link(0, 1).count, node.link(0, 2).kind) == (2, LinkKind.SYS)


def test_amds_links_are_xgmi() -> None:
    machine = Machine().hang(0, gpu(0, "rsmi", "1002"), gpu(1, "rsmi", "1002"))
    machine.tail.append(
        '<distances2 type="OSDev" nbobjs="2" kind="9" name="XGMIBandwidth" indexing="gp">'
        "<indexes>200 201 </indexes><u64values>0 100000 100000 0 </u64values></distances2>"
    )
    node = read_hwloc(machine.xml())
    assert (node.fabric, node.link(0, 1).kind, node.link(0, 1).rate) == ("xgmi", LinkKind.XGMI, 100.0)
    assert node.complete


def test_paths_are_read_from_the_tree() -> None:
    machine = Machine().hang(
        0, bridge(bridge(gpu(0)), bridge(gpu(1)), bridge(port(9, "mlx5_0")), bridge(bridge(gpu(2))))
    )
    machine.hang(0, bridge(gpu(3))).hang(1, bridge(gpu(4)), gpu(5))
    node = read_hwloc(machine.xml())
    kinds = [node.link(0, j).kind for j in range(1, 6)]
    assert kinds == [LinkKind.PIX, LinkKind.PXB, LinkKind.NODE, LinkKind.SYS, LinkKind.SYS]
    assert node.link(4, 5).kind is LinkKind.PHB
    assert [link.kind for link in node.nics[0].links[:4]] == [LinkKind.PIX, LinkKind.PIX, LinkKind.PXB, LinkKind.NODE]
    assert (node.nics[0].device, node.host, node.cpus) == ("mlx5_0", "box", (4, 4))
    assert [device.cpus for device in node.devices] == ["0-3"] * 4 + ["4-7"] * 2


def test_two_directions_that_differ_are_told() -> None:
    machine = Machine().hang(0, gpu(0), gpu(1))
    node = read_hwloc(machine.matrix("NVLinkBandwidth", ["OSDev:200", "OSDev:201"], [[0, 50000], [25000, 0]]).xml())
    assert node.link(0, 1) == node.link(1, 0)
    assert (node.link(1, 0).count, node.link(1, 0).rate) == (1, 25.0)
    assert any("the two directions differ" in note for note in node.notes)


def test_gpus_without_a_backend_are_found_but_their_links_are_not() -> None:
    machine = Machine().hang(0, gpu(0, ""), gpu(1, "")).hang(1, pci(2, 'pci_type="0300 [1002:515e] [0000:0000] 00 00"'))
    node = read_hwloc(machine.xml())
    assert (len(node.devices), node.fabric, node.complete) == (2, "pcie", False)
    assert any("without the backend for NVIDIA" in note for note in node.notes)


def test_a_machine_without_gpus() -> None:
    node = read_hwloc(Machine(version="2.0").xml(), "here")
    assert (node.devices, node.fabric, node.host, node.complete) == ((), "none", "here", True)


def test_a_saved_file_is_recognised_among_captures() -> None:
    node = read_capture(switched(4, 2).xml(), "box")
    assert isinstance(node, Node) and (node.source, node.all_to_all()) == ("text", True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda xml: xml[:-40], "cut off or damaged"),
        (lambda xml: xml.replace('version="3.0"', ""), "XML of hwloc 1"),
        (lambda xml: xml.replace('nbobjs="6"', 'nbobjs="7"'), "6 objects and 36 values, not 7 x 7"),
        (lambda xml: xml.replace("25000 0", "25000 zero", 1), "cannot be read"),
        (lambda xml: xml.replace("<topology", '<!DOCTYPE topology [<!ENTITY a "b">]><topology', 1), "entities"),
    ],
)
def test_damaged_files_are_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CaptureError, match=message):
        read_hwloc(change(switched(4, 2).xml()))


def lstopo(folder: Path, body: str) -> dict[str, str]:
    program = folder / "lstopo-no-graphics"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"}


def test_the_tool_is_run(tmp_path: Path) -> None:
    (tmp_path / "box.xml").write_text(switched(4, 2).xml())
    environ = lstopo(tmp_path, f'[ "$1 $2" = "--of xml" ] && cat "{tmp_path}/box.xml"')
    assert HwlocProbe(environ).problem() is None
    node = HwlocProbe({**environ, "CUDA_VISIBLE_DEVICES": "3,1"}).probe()
    assert ([device.index for device in node.devices], node.source) == ([3, 1], "hwloc")


def test_a_tool_that_sees_no_gpu_is_not_chosen(tmp_path: Path) -> None:
    (tmp_path / "box.xml").write_text(Machine().xml())
    assert HwlocProbe(lstopo(tmp_path, f'cat "{tmp_path}/box.xml"')).problem() == "hwloc sees no GPU here"
    assert "status 3" in (HwlocProbe(lstopo(tmp_path, "exit 3")).problem() or "")
    with pytest.raises(ProbeError, match="cut off or damaged"):
        HwlocProbe(lstopo(tmp_path, "echo '<topology version=\"2.0\">'")).probe()
    assert "none of lstopo-no-graphics" in (HwlocProbe({"PATH": "/nonexistent"}).problem() or "")


def test_read_node_takes_it_too() -> None:
    assert read_node(switched(2, 2).xml()).link(0, 1).kind is LinkKind.NVLINK
