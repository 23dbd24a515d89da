"""Texts in the layout of vendors' tools, written from a matrix: input for the tests of topology parsers.

It is: renderers and the ways in which people and terminals spoil what was printed. It is not: captured output.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""

Matrix = list[list[str]]


def symmetric(n: int, cell: Callable[[int, int], str]) -> Matrix:
    """Cells of a symmetric matrix; `cell(i, j)` is asked for i < j."""
    return [["X" if i == j else cell(min(i, j), max(i, j)) for j in range(n)] for i in range(n)]


def nvidia(
    cells: Matrix,
    cpus: Sequence[str] | None = None,
    numa: Sequence[str] | None = None,
    *,
    nics: int = 0,
    gpu_numa: bool = False,
    legend: str = LEGEND,
) -> str:
    """`nvidia-smi topo -m`: `cells` has the GPUs first and then `nics` network ports."""
    gpus = len(cells) - nics
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{k}" for k in range(nics)]
    heads = [h for h, on in (("CPU Affinity", cpus), ("NUMA Affinity", numa), ("GPU NUMA ID", gpu_numa)) if on]
    lines = ["\t" + "\t".join(names + heads)]
    for i, row in enumerate(cells):
        line = names[i] + "\t" + "\t".join(" X " if cell == "X" else cell for cell in row)
        if i < gpus:
            line += f"\t{cpus[i]}" if cpus else ""
            line += f"\t{numa[i]}" if numa else ""
            line += "\t\tN/A" if gpu_numa else ""
        elif heads:
            line += "\t" * len(heads)
        lines.append(line)
    ports = "".join(f"\n  NIC{k}: mlx5_{k}" for k in range(nics))
    return "\n".join(lines) + "\n" + legend + (f"\nNIC Legend:\n{ports}\n" if nics else "")


def rocm(kinds: Matrix, numa: Sequence[str] | None = None) -> str:
    """`rocm-smi --showtopo`: weights, hops, types, NUMA nodes; `kinds` has "X" on the diagonal."""
    n = len(kinds)
    names = [f"GPU{i}" for i in range(n)]

    def table(title: str, cell: Callable[[str], str]) -> str:
        lines = [f" {title} ".center(78, "="), "       " + "".join(f"{name:<13}" for name in names)]
        for name, row in zip(names, kinds, strict=True):
            lines.append(f"{name:<7}" + "".join(f"{cell(kind):<13}" for kind in row))
        return "\n".join(lines) + "\n\n"

    text = " ROCm System Management Interface ".center(78, "=") + "\n"
    text += table("Weight between two GPUs", lambda kind: {"X": "0", "XGMI": "15"}.get(kind, "52"))
    text += table("Hops between two GPUs", lambda kind: {"X": "0", "XGMI": "1"}.get(kind, "3"))
    text += table("Link Type between two GPUs", lambda kind: "0" if kind == "X" else kind)
    if numa:
        text += " Numa Nodes ".center(78, "=") + "\n"
        for i, node in enumerate(numa):
            text += f"GPU[{i}]\t\t: (Topology) Numa Node: {node}\nGPU[{i}]\t\t: (Topology) Numa Affinity: {node}\n"
    return text + " End of ROCm SMI Log ".center(78, "=") + "\n"


def hard_wrap(text: str, width: int) -> str:
    """What a terminal of `width` columns shows when it is copied: tabs are spaces, words are cut anywhere."""
    lines = []
    for line in text.split("\n"):
        line = line.expandtabs()
        lines += [line[k : k + width] for k in range(0, len(line), width)] or [""]
    return "\n".join(lines)


def soft_wrap(text: str, width: int) -> str:
    """What an editor makes of it: lines cut between words, spaces at the cut lost."""
    lines = []
    for line in text.split("\n"):
        line = line.expandtabs()
        while len(line) > width and " " in line[1:width].strip():
            cut = line.rindex(" ", 0, width)
            lines.append(line[:cut].rstrip())
            line = line[cut:].lstrip()
        lines.append(line)
    return "\n".join(lines)


SPOILERS: dict[str, Callable[[str], str]] = {
    "as printed": lambda text: text,
    "spaces": lambda text: text.expandtabs(),
    "one space": lambda text: re.sub(r"[ \t]+", " ", text),
    "stripped": lambda text: "\n".join(line.strip() for line in text.split("\n")),
    "first tab lost": lambda text: text.lstrip(),
    "quoted": lambda text: "\n".join("> " + line for line in text.split("\n")),
    "fenced": lambda text: f"We ran it:\n```text\n{text}```\nand GPU0 was fine, GPU1 too.\n",
    "indented": lambda text: "\n".join("      " + line for line in text.split("\n")),
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "colours": lambda text: "\x1b[0m" + text.replace("GPU0", "\x1b[4mGPU0\x1b[24m", 1) + "\x1b[0m",
    "logged": lambda text: "\n".join(f"2024-05-01 10:00:00,123 INFO node07: {line}" for line in text.split("\n")),
    "tagged by mpirun": lambda text: "\n".join(f"[1,0]<stdout>: {line}" for line in text.split("\n")),
    "table": lambda text: "\n".join(
        "|" + "|".join(line.split("\t")) + "|" if "\t" in line else line for line in text.split("\n")
    ),
    "html": lambda text: "<pre>" + text.replace("\t", "&#9;").replace("<", "&lt;") + "</pre>",
    "blank lines": lambda text: text.replace("\n", "\n\n"),
    "prompt and prose": lambda text: (
        f"user@host:~$ nvidia-smi topo -m\n{text}\nGPU 0: some card (UUID: GPU-1)\nGPU0 and GPU1 share a switch.\n"
    ),
    "lower case": lambda text: text.lower(),
    "hard wrap 80": lambda text: hard_wrap(text, 80),
    "hard wrap 53": lambda text: hard_wrap(text, 53),
    "hard wrap 100": lambda text: hard_wrap(text, 100),
    "soft wrap 80": lambda text: soft_wrap(text, 80),
    "soft wrap 60": lambda text: soft_wrap(text, 60),
}


def random_cells(rng: random.Random, n: int) -> Matrix:
    """A symmetric matrix of any paths: not a machine that exists."""
    kinds = ["NV1", "NV2", "NV12", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"]
    chosen = {(i, j): rng.choice(kinds) for i in range(n) for j in range(i + 1, n)}
    return symmetric(n, lambda i, j: chosen[i, j])
