"""NVML through the system's loader: pynvml finds `libnvidia-ml.so.1` on LD_LIBRARY_PATH, a library of a few lines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SOURCE = r"""
#include <string.h>
struct fabric { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; };
static const char *bus[] = {"00000000:1B:00.0", "00000000:43:00.0"};
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "not here"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **gpu) { *gpu = (void *)(bus + i); return 0; }
int nvmlDeviceGetName(void *gpu, char *text, unsigned n) { strncpy(text, "Stub", n); return 0; }
int nvmlDeviceGetUUID(void *gpu, char *text, unsigned n) { strncpy(text, *(char **)gpu, n); return 0; }
int nvmlDeviceGetPciInfo_v3(void *gpu, char *pci) { strcpy(pci + 16 + 5 * 4, *(char **)gpu); return 0; }
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, int *active) { *active = link < 4; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *gpu, unsigned link, int *type) { *type = 2; return 0; }
int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status) { *status = 0; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *gpu, struct fabric *info) {
    memset(info->cluster, 0xab, 16); info->clique = 7; info->state = 3; return 0;
}
"""
ASK = (
    "import json; from parallax.plugins.topology.probes.nvml import NvmlProbe\n"
    "probe = NvmlProbe({}); print(json.dumps([probe.problem(), probe.probe().to_dict()]))"
)

COMPILER = next((tool for tool in ("cc", "gcc", "clang") if shutil.which(tool)), None)


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C compiler and Linux's loader")
@pytest.mark.skipif(find_spec("pynvml") is None, reason="nvidia-ml-py is not installed (extra 'topology')")
def test_a_library_on_the_loaders_path_is_used(tmp_path: Path) -> None:
    (tmp_path / "stub.c").write_text(SOURCE)
    library = tmp_path / "libnvidia-ml.so.1"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", "-o", library, tmp_path / "stub.c"], check=True, timeout=60)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ASK], env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    problem, node = json.loads(done.stdout.splitlines()[-1])
    assert problem is None
    assert node["links"][0][1][:2] == ["NV", 4]
    assert [device["bus_id"] for device in node["devices"]] == ["00000000:1b:00.0", "00000000:43:00.0"]
    assert node["devices"][0]["domain_key"] == "abababab-abab-abab-abab-abababababab/7"
