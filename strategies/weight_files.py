"""Weights stored in a local folder of safetensors files, read slice by slice.

It is: the folder (one file, or several with an index), slice reading with a count of the bytes read, and the check of
names and shapes against a model. It is not: how a model names its weights (`pretrained_hf.py`). Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.plugins.base import ParamShard

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Fused = Sequence[Sequence[str]]
"""Keys of a tensor that is stored in pieces: for each entry of its dim 0 the blocks that follow each other on dim 1."""


class WeightFiles:
    """The weights of one local folder, by key.

    Attributes:
        bytes_read: bytes of tensor data read so far (headers not counted).

    Raises:
        ValueError: the folder does not exist, or holds no complete set of safetensors files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = local_folder(folder)
        self.bytes_read = 0
        self._open: dict[Path, Any] = {}
        self._fused: dict[str, Fused] = {}
        self._file_of = self._index()

    def _index(self) -> dict[str, Path]:
        single, index = self.folder / SINGLE, self.folder / INDEX
        if single.is_file():
            return dict.fromkeys(self._file(single).keys(), single)
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            missing = sorted({name for name in weight_map.values() if not (self.folder / name).is_file()})
            if missing:
                raise ValueError(f"{index} names files that are not there: {_listed(missing)}")
            return {key: self.folder / name for key, name in weight_map.items()}
        if any(self.folder.glob("*.bin")):
            raise ValueError(
                f"{self.folder} holds .bin weights, which cannot be read in slices; convert them once: "
                f"AutoModelForCausalLM.from_pretrained({str(self.folder)!r}).save_pretrained(<new folder>)"
            )
        raise ValueError(f"{self.folder} holds no weights: expected {SINGLE} or {INDEX}")

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                from safetensors import safe_open
            except ImportError:
                raise ValueError("reading weights needs safetensors: pip install 'lightning-parallax[hf]'") from None
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def keys(self) -> list[str]:
        return sorted(self._file_of)

    def fuse(self, name: str, parts: Fused) -> None:
        """From now on `name` is one more key, made of stored ones."""
        self._fused[name] = parts

    def _slice(self, key: str) -> Any:
        return self._file(self._file_of[key]).get_slice(key)

    def shape(self, key: str) -> tuple[int, ...]:
        if (parts := self._fused.get(key)) is not None:
            shapes = [self.shape(block) for block in parts[0]]
            return len(parts), sum(shape[0] for shape in shapes), *shapes[0][1:]
        return tuple(self._slice(key).get_shape())

    def dtype(self, key: str) -> torch.dtype:
        if (parts := self._fused.get(key)) is not None:
            return self.dtype(parts[0][0])
        shape = self.shape(key)
        empty: Tensor = self._slice(key)[0:0] if shape else self._slice(key)[...]
        return empty.dtype

    def read(self, key: str, shard: ParamShard | None = None) -> Tensor:
        """The stored tensor on the CPU, or the part of it `shard` describes: only those bytes are read.

        Raises:
            ValueError: the shape in the file is not `shard.shape`.
        """
        shape = self.shape(key)
        if shard is not None and shard.shape != shape:
            raise ValueError(f"{key} in {self.folder} has shape {shape}, the model expects {shard.shape}")
        if key in self._fused:
            return self._read_fused(self._fused[key], shard)
        if shard is None or shard.dim is None:
            return self._count(self._slice(key)[...])
        if shard.inner is not None:
            return shard.inner.take(self.read(key, replace(shard, inner=None)))
        before = (slice(None),) * shard.dim
        parts = [self._count(self._slice(key)[(*before, slice(start, stop))]) for start, stop in shard.ranges]
        if shard.pad:
            padding = [*shape]
            padding[shard.dim] = shard.pad
            parts.append(torch.zeros(padding, dtype=parts[0].dtype if parts else self.dtype(key)))
        return torch.cat(parts, dim=shard.dim) if len(parts) > 1 else parts[0]

    def _read_fused(self, parts: Fused, shard: ParamShard | None) -> Tensor:
        """Only the entries of `parts` that the shard holds are read, one at a time."""
        outer = shard is not None and shard.dim == 0
        mine = [parts[i] for lo, hi in shard.ranges for i in range(lo, hi)] if shard is not None and outer else parts
        inner = shard if shard is None or not outer else shard.inner
        entries = []
        for blocks in mine:
            entry = torch.cat([self.read(block) for block in blocks]).unsqueeze(0)
            entries.append(entry if inner is None else replace(inner, shape=tuple(entry.shape)).take(entry))
        return torch.cat(entries)

    def _count(self, part: Tensor) -> Tensor:
        self.bytes_read += part.numel() * part.element_size()
        return part


@dataclass(frozen=True)
class StoredWeight:
    """One key of a `WeightFiles`: the `WeightSource` of a recording."""

    files: WeightFiles
    key: str

    def read(self, shard: ParamShard | None = None) -> Tensor:
        return self.files.read(self.key, shard)


def local_folder(folder: str | Path) -> Path:
    """The folder, which must exist here: a model id is never looked up or downloaded."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(
            f"{str(folder)!r} is not a local folder; weights are read in slices from files, so download the model once "
            "(`huggingface_hub.snapshot_download`) and pass the folder"
        )
    return path


def match(
    files: WeightFiles,
    names: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    missing_allowed: Collection[str] = (),
    strict: bool = True,
) -> dict[str, str]:
    """Which key of `files` gives each tensor: FQN -> key, one FQN of those tied together.

    Args:
        names: key -> FQN, for keys that are wanted.
        tensors: FQN -> tensor, tied ones under each of their names.
        shapes: FQN -> shape of the whole tensor.
        missing_allowed: FQNs that keep their initial value when no key gives them.
        strict: keys without a tensor are an error.

    Raises:
        ValueError: listing the missing and unexpected names and the shapes that differ.
    """
    found: dict[int, tuple[str, str]] = {}
    unexpected, different = [], []
    for key, fqn in names.items():
        if fqn not in tensors:
            unexpected.append(key if key == fqn else f"{key} (as {fqn})")
            continue
        if files.shape(key) != shapes[fqn]:
            different.append(f"{fqn}: {files.shape(key)} in the file, {shapes[fqn]} in the model")
        first = found.setdefault(id(tensors[fqn]), (fqn, key))
        if first[1] != key and not torch.equal(files.read(first[1]), files.read(key)):
            different.append(
                f"{first[0]} and {fqn} are tied in the model, but {first[1]} and {key} differ in the file "
                "(set tie_word_embeddings=False)"
            )
    missing = [fqn for fqn, tensor in tensors.items() if id(tensor) not in found and fqn not in missing_allowed]
    problems = [
        *([f"not in the files: {_listed(missing)}"] if missing else []),
        *([f"not in the model: {_listed(unexpected)}"] if unexpected and strict else []),
        *([f"of another shape: {_listed(different)}"] if different else []),
    ]
    if problems:
        raise ValueError(f"the weights in {files.folder} do not fit the model. Names " + "; ".join(problems))
    return dict(found.values())


def _listed(names: Sequence[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
