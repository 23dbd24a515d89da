"""Probes: NVML through pynvml itself, tools as real programs on PATH, /sys as a folder, machines by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from parallax.plugins import registry
from parallax.plugins.topology.answers import answers
from parallax.plugins.topology.description import LinkKind, Node
from parallax.plugins.topology.probes import ProbeError, find_probe, probe_node, sysfs
from parallax.plugins.topology.probes.base import GROUP, Probe
from parallax.plugins.topology.probes.cpu import CpuProbe
from parallax.plugins.topology.probes.nvml import NvmlProbe
from parallax.plugins.topology.probes.synthetic import MODELS, SyntheticProbe, synthetic_cluster, synthetic_node
from parallax.plugins.topology.probes.text import AmdProbe, CaptureProbe, IntelProbe, NvidiaSmiProbe
from tests.topology_texts import nvidia, rocm, symmetric

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed (extra 'topology')")
from tests.fake_nvml import FakeGpu, FakeLib, installed  # noqa: E402

DONE = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED


def bus(i: int) -> str:
    return f"00000000:{i + 16:02X}:00.0"


def nvml_node(library: FakeLib, **environ: str) -> Node:
    with installed(library):
        return NvmlProbe(environ=environ, sys_root=Path("/nonexistent")).probe()


def hgx(n: int = 8) -> FakeLib:
    return FakeLib(
        [FakeGpu(bus(i), ["switch"] * 18, [i // 4], range(i // 4 * 8, i // 4 * 8 + 8), state=DONE) for i in range(n)],
        level=lambda i, j: pynvml.NVML_TOPOLOGY_NODE if i // 4 == j // 4 else pynvml.NVML_TOPOLOGY_SYSTEM,
    )


def test_gpus_behind_a_switch_are_one_domain_of_their_host() -> None:
    node = nvml_node(hgx())
    found = answers(node)
    assert (found["gpus"], found["fabric"], found["all_to_all"]) == (8, "nvlink", True)
    assert found["numa_groups"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert node.link(0, 7).count == 18
    assert node.link(0, 7).rate == 450.0
    assert {device.domain_key for device in node.devices} == {None}, "a cluster UUID of zeros is no rack"
    assert node.devices[4].cpus == "8-15"
    assert Node.from_dict(node.to_dict()) == node


def test_gpus_of_a_rack_carry_its_key() -> None:
    cluster = bytes(range(16))
    gpus = [FakeGpu(bus(i), ["switch"] * 18, cluster=cluster, clique=32766, state=DONE) for i in range(4)]
    keys = {device.domain_key for device in nvml_node(FakeLib(gpus)).devices}
    assert keys == {"00010203-0405-0607-0809-0a0b0c0d0e0f/32766"}
    gpus[0].state = pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS
    assert nvml_node(FakeLib(gpus)).devices[0].domain_key is None


def test_links_are_counted_by_the_gpu_at_the_other_end() -> None:
    ends = [[bus(1)] * 4, [bus(0)] * 4, [bus(3)] * 4, [bus(2)] * 4]
    levels = {frozenset((0, 2)): pynvml.NVML_TOPOLOGY_SINGLE, frozenset((1, 3)): pynvml.NVML_TOPOLOGY_MULTIPLE}
    library = FakeLib(
        [FakeGpu(bus(i), links) for i, links in enumerate(ends)],
        level=lambda i, j: levels.get(frozenset((i, j)), pynvml.NVML_TOPOLOGY_HOSTBRIDGE),
    )
    node = nvml_node(library)
    assert answers(node)["link_domains"] == [[0, 1], [2, 3]]
    assert (node.link(0, 1).kind, node.link(0, 1).count) == (LinkKind.NVLINK, 4)
    assert [node.link(0, 2).kind, node.link(1, 3).kind, node.link(0, 3).kind] == [
        LinkKind.PIX,
        LinkKind.PXB,
        LinkKind.PHB,
    ]


def test_an_old_driver_tells_less_but_enough() -> None:
    """Without the type of the remote device, GPU ends are still found by address, and there is no fabric to ask for."""
    gpus = [FakeGpu(bus(0), [bus(1)] * 2), FakeGpu(bus(1), [bus(0)] * 2)]
    gone = {"nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetMigMode"}
    gone |= {"nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetCpuAffinityWithinScope", "nvmlDeviceGetFieldValues"}
    node = nvml_node(FakeLib(gpus, without=frozenset(gone)))
    assert (node.link(0, 1).kind, node.link(0, 1).count, node.link(0, 1).rate) == (LinkKind.NVLINK, 2, None)
    assert node.numa_groups() is None


def test_pcie_cards_have_paths_only() -> None:
    node = nvml_node(FakeLib([FakeGpu(bus(i)) for i in range(2)], level=lambda i, j: pynvml.NVML_TOPOLOGY_INTERNAL))
    assert (node.fabric, node.link(0, 1).kind) == ("pcie", LinkKind.PIX)


def test_links_without_peer_access_do_not_count() -> None:
    library = hgx(2)
    library.p2p = lambda i, j: pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY
    node = nvml_node(library)
    assert node.link(0, 1).kind is LinkKind.NODE
    assert any("fabric manager" in note for note in node.notes)


def test_links_of_which_some_are_down_are_told() -> None:
    ends = [[bus(1)] * 4, [bus(0)] * 3]
    node = nvml_node(FakeLib([FakeGpu(bus(i), links) for i, links in enumerate(ends)]))
    assert node.link(0, 1).count == node.link(1, 0).count == 3
    assert node.notes == ("GPU 0 has 4 NVLinks to GPU 1, but 3 lead back: the fewer are taken; some are down",)
    library = hgx(3)
    library.gpus[2].links = ["switch"] * 17
    node = nvml_node(library)
    assert (node.link(0, 1).count, node.link(0, 2).count) == (18, 17)
    assert node.notes == ("GPU 2 has fewer than 18 active links to the switch: some are down",)


def test_a_gpu_cut_into_instances_is_out_of_the_domain() -> None:
    library = hgx(3)
    library.gpus[1].mig = True
    node = nvml_node(library)
    assert (node.link_domains(), node.isolated()) == ([[0, 2]], [1])
    assert any("GPU 1 is cut into MIG instances" in note for note in node.notes)


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        ("2,0", [2, 0]),
        ("3", [3]),
        ("0,1,-1,2", [0, 1]),
        ("0,9,1", [0]),
        ("1,1,2", [1]),
        ("GPU-00000002,GPU-00000001-0000", [2, 1]),
        (" 0 , 1", [0, 1]),
    ],
)
def test_cuda_visible_devices_selects_in_its_order(value: str, indices: list[int]) -> None:
    node = nvml_node(hgx(4), CUDA_VISIBLE_DEVICES=value)
    assert [device.index for device in node.devices] == indices
    assert len(node.links) == len(indices)


@pytest.mark.parametrize(
    ("value", "message"), [("", "hides all 4 GPUs"), ("-1", "hides all 4 GPUs"), ("MIG-0", "MIG instance")]
)
def test_cuda_visible_devices_that_leaves_nothing_is_refused(value: str, message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        nvml_node(hgx(4), CUDA_VISIBLE_DEVICES=value)


def test_several_models_are_a_reason_to_fix_cudas_order() -> None:
    library = hgx(2)
    library.gpus[1].name = "Another GPU"
    assert any("CUDA_DEVICE_ORDER" in note for note in nvml_node(library).notes)
    assert nvml_node(library, CUDA_DEVICE_ORDER="PCI_BUS_ID").notes == ()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVIDIA_DRIVER_CAPABILITIES"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "does not start"),
    ],
)
def test_nvml_that_does_not_start_says_why(code: int, message: str) -> None:
    with installed(FakeLib([], start=code)):
        assert message in (NvmlProbe().problem() or "")
        with pytest.raises(ProbeError, match=message):
            NvmlProbe().probe()


def test_a_driver_without_gpus_is_not_used() -> None:
    with installed(FakeLib([])):
        assert "no GPU is visible" in (NvmlProbe().problem() or "")
        with pytest.raises(ProbeError, match="no GPU is visible"):
            NvmlProbe(environ={}).probe()


Tool = Callable[[str, str], dict[str, str]]


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    """Puts a program on a PATH of its own: it is a shell script of the given body."""

    def make(name: str, body: str) -> dict[str, str]:
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        return {"PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"}

    return make


def test_nvidia_smi_is_run_and_its_gpus_identified(tool: Tool, tmp_path: Path) -> None:
    cells = symmetric(4, lambda i, j: "NV12" if i // 2 == j // 2 else "SYS")
    (tmp_path / "matrix.txt").write_text(nvidia(cells, ["0-3"] * 4, ["0"] * 4))
    rows = "".join(f"{i}, GPU-{i}-x, 00000000:{i:02X}:00.0\\n" for i in range(4))
    environ = tool("nvidia-smi", f'if [ "$1" = topo ]; then cat {tmp_path}/matrix.txt; else printf "{rows}"; fi')
    node = NvidiaSmiProbe(environ={**environ, "CUDA_VISIBLE_DEVICES": "GPU-3,2"}).probe()
    assert [(d.index, d.uuid, d.bus_id) for d in node.devices] == [
        (3, "GPU-3-x", "00000000:03:00.0"),
        (2, "GPU-2-x", "00000000:02:00.0"),
    ]
    assert (node.source, node.link_domains()) == ("text", [[0, 1]])


def test_rocm_smi_is_run(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "topo.txt").write_text(rocm(symmetric(4, lambda i, j: "XGMI"), ["0", "0", "1", "1"]))
    environ = tool("rocm-smi", f"cat {tmp_path}/topo.txt")
    node = AmdProbe(environ={**environ, "HIP_VISIBLE_DEVICES": "0,2"}).probe()
    assert (node.fabric, len(node.devices), node.numa_groups()) == ("xgmi", 2, [[0], [1]])


def test_a_tool_that_fails_is_quoted(tool: Tool) -> None:
    environ = tool("nvidia-smi", "echo 'Failed to initialize NVML: Unknown Error' >&2; exit 255")
    with pytest.raises(ProbeError, match=r"status 255.*Failed to initialize NVML"):
        NvidiaSmiProbe(environ=environ).probe()
    environ = tool("nvidia-smi", "echo 'No devices were found'")
    with pytest.raises(ProbeError, match="hidden from this process"):
        NvidiaSmiProbe(environ=environ).probe()


def test_a_mask_that_is_not_understood_is_told(tool: Tool) -> None:
    environ = tool(
        "xpu-smi", 'printf "        GPU 0/0|GPU 0/1|CPU Affinity\\nGPU 0/0|S|MDF|0-3\\nGPU 0/1|MDF|S|0-3\\n"'
    )
    assert IntelProbe(environ=environ).probe().complete
    node = IntelProbe(environ={**environ, "ZE_AFFINITY_MASK": "0.0"}).probe()
    assert not node.complete
    assert any("ZE_AFFINITY_MASK" in note for note in node.notes)


@pytest.mark.parametrize(
    ("mask", "hierarchy", "indices"),
    [
        ("0", None, [0]),
        ("3,1", "FLAT", [1, 3]),
        (" 2 ,3,9", "COMBINED", [2, 3]),
        ("1", "COMPOSITE", [2, 3]),
        ("0.1,1.0", "COMPOSITE", [1, 2]),
        ("", None, [0, 1, 2, 3]),
    ],
)
def test_intels_mask_names_tiles_or_cards(tool: Tool, mask: str, hierarchy: str | None, indices: list[int]) -> None:
    environ = {**two_cards(tool), "ZE_AFFINITY_MASK": mask}
    if hierarchy is not None:
        environ["ZE_FLAT_DEVICE_HIERARCHY"] = hierarchy
    node = IntelProbe(environ=environ).probe()
    assert [device.name for device in node.devices] == [f"GPU{i // 2}/{i % 2}" for i in indices]
    assert node.complete


def test_intels_mask_may_hide_all(tool: Tool) -> None:
    with pytest.raises(ProbeError, match="ZE_AFFINITY_MASK='7' hides all 4 tiles"):
        IntelProbe(environ={**two_cards(tool), "ZE_AFFINITY_MASK": "7"}).probe()


def two_cards(tool: Tool) -> dict[str, str]:
    """`xpu-smi` on a machine with two cards of two tiles."""
    names = [f"GPU {card}/{tile}" for card in range(2) for tile in range(2)]
    rows = ["        " + "|".join(names) + "|CPU Affinity"]
    for i, name in enumerate(names):
        cells = ["S" if i == j else "MDF" if i // 2 == j // 2 else "XL16" for j in range(4)]
        rows.append("|".join([name, *cells, "0-3"]))
    return tool("xpu-smi", "printf '" + "\\n".join(rows) + "\\n'")


def test_no_tool_is_a_reason() -> None:
    assert AmdProbe(environ={"PATH": "/nonexistent"}).problem() == "none of amd-smi, rocm-smi is installed"


def test_a_saved_capture(tmp_path: Path) -> None:
    path = tmp_path / "box.txt"
    assert "there is no file" in (CaptureProbe(path).problem() or "")
    path.write_text(nvidia(symmetric(2, lambda i, j: "PIX")))
    assert CaptureProbe(path).probe().host == "box"
    path.write_text("nothing of use")
    with pytest.raises(ProbeError, match=r"box\.txt: no topology matrix"):
        CaptureProbe(path).probe()


def test_cpus_are_counted_by_numa_node(tmp_path: Path) -> None:
    for name, cpus in (("node0", "0-3,8-11"), ("node10", "4-7"), ("node2", ""), ("nodes", "0")):
        folder = tmp_path / "devices/system/node" / name
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    node = CpuProbe(sys_root=tmp_path).probe()
    assert (node.cpus, node.devices, node.fabric) == ((8, 4), (), "none")
    assert CpuProbe(sys_root=tmp_path / "nothing").probe().cpus == (os.cpu_count(),)


@pytest.mark.parametrize(("text", "found"), [("1\n", "1"), ("-1\n", None), (None, None)])
def test_numa_node_of_a_device(tmp_path: Path, text: str | None, found: str | None) -> None:
    folder = tmp_path / "bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "numa_node").write_text(text)
    assert sysfs.numa_node_of("00000000:1B:00.0", tmp_path) == found


def test_lists_are_written_as_the_kernel_writes_them() -> None:
    assert sysfs.format_list([3, 1, 2, 8]) == "1-3,8"
    assert sysfs.format_list([]) is None
    assert sysfs.parse_list("1-3,8") == [1, 2, 3, 8]
    assert sysfs.bits([0b101, 1]) == [0, 2, 64]


def test_every_built_in_probe_is_found() -> None:
    rows = registry.available(GROUP)
    assert {row.name: row.error for row in rows if row.distribution == "lightning-parallax"} == dict.fromkeys(
        ["amd", "amdsmi", "cpu", "hwloc", "intel", "nvml", "synthetic", "text"]
    )
    for row in rows:
        probe = registry.load(GROUP, row.name)()
        assert isinstance(probe, Probe)
        assert probe.name == row.name


def test_the_best_probe_that_works_is_chosen() -> None:
    with installed(hgx(2)):
        assert find_probe().name == "nvml"
    with installed(FakeLib([], start=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)):
        assert find_probe().name != "nvml"
        assert find_probe("nvml").name == "nvml"
    with pytest.raises(ValueError, match="nvm"):
        find_probe("nvm")
    assert probe_node("cpu").source == "cpu"


@pytest.mark.parametrize(
    ("name", "gpus", "cliques", "fabric"),
    [
        ("dgx1-v100", 8, [[0, 1, 2, 3], [4, 5, 6, 7], [0, 4], [1, 5], [2, 6], [3, 7]], "nvlink"),
        ("dgx2", 16, [list(range(16))], "nvlink"),
        ("dgx-h100", 8, [list(range(8))], "nvlink"),
        ("summit", 6, [[0, 1, 2], [3, 4, 5]], "nvlink"),
        ("mi300x", 8, [list(range(8))], "xgmi"),
        ("pvc-tiles", 4, [[0, 1, 2, 3]], "xelink"),
        ("pcie-bridged-8", 8, [[0, 1], [2, 3], [4, 5], [6, 7]], "nvlink"),
        ("pcie-8", 8, [], "pcie"),
    ],
)
def test_named_machines(name: str, gpus: int, cliques: list[list[int]], fabric: str) -> None:
    node = SyntheticProbe(name).probe()
    assert (len(node.devices), node.link_cliques(), node.fabric) == (gpus, cliques, fabric)


def test_each_gpu_of_the_cube_mesh_has_six_links() -> None:
    node = synthetic_node("dgx1-v100")
    totals = [sum(node.link(i, j).count for j in range(8) if j != i) for i in range(8)]
    assert totals == [6] * 8


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_named_machine_survives_json(name: str) -> None:
    node = synthetic_node(name)
    assert Node.from_dict(node.to_dict()) == node


def test_clusters_by_name() -> None:
    cluster = synthetic_cluster("36x gb200-nvl72, 1x pcie-8, dgx-h100")
    assert [node.host for node in cluster.nodes][-1] == "node37"
    assert sorted(map(len, cluster.domains()), reverse=True)[:4] == [72, 72, 8, 1]
    for spec, message in (("4y dgx", "COUNTx MODEL"), ("0x dgx2", "COUNTx MODEL"), ("2x dgx-h10", "dgx-h100")):
        with pytest.raises(ValueError, match=message):
            synthetic_cluster(spec)
