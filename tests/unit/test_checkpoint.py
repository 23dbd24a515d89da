"""Checkpoint folders: complete or refused, never half read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallax.strategies import checkpoint
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh


def mesh(text: str = "dp1") -> Mesh:
    return Mesh.build(Layout.parse(text).resolve(1), 0, groups=False)


def test_round_trip(tmp_path: Path) -> None:
    weights = {"w": torch.arange(3.0)}
    checkpoint.save({"epoch": 3, "state_dict": weights, "optimizer_states": [{"m": 1}]}, tmp_path / "a", mesh())
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["meta.pt", "rank-00000-of-00001.pt"]
    got = checkpoint.load(tmp_path / "a", mesh())
    assert got["epoch"] == 3 and got["optimizer_states"] == [{"m": 1}]
    assert torch.equal(got["state_dict"]["w"], weights["w"])
    checkpoint.save({"epoch": 4, "state_dict": weights}, tmp_path / "a", mesh())
    assert checkpoint.load(tmp_path / "a", mesh())["epoch"] == 4, "saving again replaces the folder"
    checkpoint.remove(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none is not a complete Parallax checkpoint: it does not exist"):
        checkpoint.load(tmp_path / "none", mesh())
    (tmp_path / "half").mkdir()
    with pytest.raises(ValueError, match="has no meta.pt .an interrupted save"):
        checkpoint.load(tmp_path / "half", mesh())
    torch.save({}, tmp_path / "file.ckpt")
    with pytest.raises(ValueError, match="is a single file, not written by Parallax"):
        checkpoint.load(tmp_path / "file.ckpt", mesh())
    checkpoint.save({"state_dict": {}}, tmp_path / "zero1", mesh("zero1"))
    with pytest.raises(ValueError, match="another layout .*zero_stage: 1 then, 0 now"):
        checkpoint.load(tmp_path / "zero1", mesh())
