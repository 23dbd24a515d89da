"""Checkpoints at the same layout: a folder with one file per rank.

It is: `save`, `load` and `remove` for the dictionaries Lightning makes. It is not: layout-free; a checkpoint can be
resumed only at the layout that wrote it, and `load` says so.

`meta.pt` is written last, by rank 0, so a folder without it is an interrupted save.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from parallax.strategies.mesh import Mesh

PER_RANK = ("state_dict", "optimizer_states", "current_model_state", "averaging_state")
"""Entries of Lightning's dictionary that differ between ranks; everything else is rank 0's. The last two are those of
its WeightAveraging callback: the trained weights, while "state_dict" holds the averaged ones, and their count."""


def _rank_file(folder: Path, rank: int, world: int) -> Path:
    return folder / f"rank-{rank:05d}-of-{world:05d}.pt"


def save(checkpoint: dict[str, Any], folder: Path, mesh: Mesh) -> None:
    """Write this rank's part, then, once every rank has written, `meta.pt`. Collective."""
    if mesh.rank == 0:
        if folder.is_dir():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    mesh["control"].barrier()
    part = {key: checkpoint[key] for key in PER_RANK if key in checkpoint}
    torch.save(part, _rank_file(folder, mesh.rank, mesh.world_size))
    mesh["control"].barrier()
    if mesh.rank == 0:
        meta = {key: value for key, value in checkpoint.items() if key not in PER_RANK}
        meta["parallax"] = {"layout": mesh.layout.to_dict(), "world_size": mesh.world_size}
        partial = folder / "meta.pt.partial"
        torch.save(meta, partial)
        partial.rename(folder / "meta.pt")
    mesh["control"].barrier()


def load(folder: Path, mesh: Mesh) -> dict[str, Any]:
    """This rank's dictionary, as `save` got it.

    Raises:
        ValueError: not a complete checkpoint folder, or written at another layout.
    """
    if not (folder / "meta.pt").is_file():
        state = "has no meta.pt (an interrupted save?)" if folder.is_dir() else "does not exist"
        if folder.is_file():
            state = "is a single file, not written by Parallax"
        raise ValueError(f"{folder} is not a complete Parallax checkpoint: it {state}")
    checkpoint: dict[str, Any] = torch.load(folder / "meta.pt", map_location="cpu", weights_only=False)
    written = checkpoint.pop("parallax")["layout"]
    here = mesh.layout.to_dict()
    same = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size",
            "expert_tensor_parallel_size", "data_parallel_size", "zero_stage", "data_engine")  # fmt: skip
    pairs = {key: (written.get(key), here.get(key)) for key in same}
    differ = [f"{key}: {then} then, {now} now" for key, (then, now) in pairs.items() if then != now]
    if differ:
        raise ValueError(
            f"{folder} was written at another layout ({'; '.join(differ)}); resume with the layout it was written at"
        )
    part = _rank_file(folder, mesh.rank, mesh.world_size)
    checkpoint.update(torch.load(part, map_location="cpu", weights_only=False))
    return checkpoint


def remove(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)
    elif folder.exists():
        folder.unlink()
