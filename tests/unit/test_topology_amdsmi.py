"""AMD's library through the package `amdsmi` itself, with only the C library replaced."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from parallax.plugins.topology.answers import answers
from parallax.plugins.topology.description import LinkKind, Node
from parallax.plugins.topology.probes import ProbeError
from parallax.plugins.topology.probes.amdsmi import AmdSmiProbe
from tests.fake_amdsmi import DRIVER_NOT_LOADED, FakeRocm, installed

pytestmark = pytest.mark.skipif(
    find_spec("amdsmi") is None, reason="the package amdsmi is not installed (extra 'test')"
)


def read(library: FakeRocm, **environ: str) -> Node:
    with installed(library):
        return AmdSmiProbe(environ, sys_root=Path("/nonexistent")).probe()


def test_eight_gpus_in_a_hive() -> None:
    node = read(FakeRocm(8))
    found = answers(node)
    assert (found["gpus"], found["fabric"], found["all_to_all"], found["complete"]) == (8, "xgmi", True, True)
    assert found["numa_groups"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (node.link(0, 7).count, node.link(0, 7).rate) == (1, 50.0)
    assert (node.devices[3].bus_id, node.devices[3].uuid) == ("0000:23:00.0", "uuid-3")
    assert node.devices[0].name == "Made-up GPU"
    assert Node.from_dict(node.to_dict()) == node


def test_cards_and_pairs() -> None:
    node = read(FakeRocm(4, link=lambda i, j: "XGMI" if i // 2 == j // 2 else "PCIE"))
    assert node.link_domains() == [[0, 1], [2, 3]]
    assert (node.link(0, 2).kind, node.link(0, 2).rate) == (LinkKind.PCIE, None)
    assert read(FakeRocm(2, link=lambda i, j: "PCIE")).fabric == "pcie"


def test_partitions_of_one_gpu_reach_each_other() -> None:
    assert read(FakeRocm(2, link=lambda i, j: "INTERNAL")).all_to_all()


@pytest.mark.parametrize("kind", ["UNKNOWN", "NOT_APPLICABLE"])
def test_a_link_that_is_not_told_is_unknown(kind: str) -> None:
    node = read(FakeRocm(3, link=lambda i, j: kind if {i, j} == {0, 2} else "XGMI"))
    assert (node.link(2, 0).kind, node.complete) == (LinkKind.UNKNOWN, False)
    assert node.notes == ("the link of GPU 0 and GPU 2 is not told",)


def test_links_without_peer_access_do_not_count() -> None:
    node = read(FakeRocm(2, peer=lambda i, j: False))
    assert node.link(0, 1).kind is LinkKind.PCIE
    assert any("no peer access" in note for note in node.notes)


def test_two_directions_that_differ_are_told() -> None:
    node = read(FakeRocm(2, link=lambda i, j: "XGMI" if i < j else "PCIE"))
    assert node.link(0, 1) == node.link(1, 0) and node.link(0, 1).kind is LinkKind.PCIE
    assert any("the two directions differ for GPU0-GPU1" in note for note in node.notes)


def test_what_is_not_supported_is_left_out() -> None:
    gone = frozenset(
        {
            "amdsmi_get_gpu_topo_numa_affinity",
            "amdsmi_get_minmax_bandwidth_between_processors",
            "amdsmi_is_P2P_accessible",
            "amdsmi_get_gpu_asic_info",
            "amdsmi_get_gpu_device_uuid",
        }
    )
    node = read(FakeRocm(2, without=gone))
    assert (node.link(0, 1).kind, node.link(0, 1).rate) == (LinkKind.XGMI, None)
    assert [(d.name, d.numa, d.uuid) for d in node.devices] == [("GPU0", None, None), ("GPU1", None, None)]


def test_hidden_gpus() -> None:
    node = read(FakeRocm(8), HIP_VISIBLE_DEVICES="5,4")
    assert [device.index for device in node.devices] == [5, 4]
    with pytest.raises(ProbeError, match="hides all 8 GPUs"):
        read(FakeRocm(8), ROCR_VISIBLE_DEVICES="")


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (None, "libamd_smi.so is not here"),
        (FakeRocm(0), "no GPU is visible"),
        (FakeRocm(2, start=DRIVER_NOT_LOADED), r"is the amdgpu driver loaded.*DRIVER_NOT_LOADED"),
        (FakeRocm(2, absent=frozenset({"amdsmi_get_link_metrics"})), "older than the package"),
    ],
)
def test_a_library_that_cannot_be_used_says_why(
    library: FakeRocm | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with installed(library):
        with pytest.raises(ProbeError, match=message):
            AmdSmiProbe({}).probe()
        assert AmdSmiProbe({}).problem() is not None
    assert capsys.readouterr().out == "", "the package prints what it does not find"
