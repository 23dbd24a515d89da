"""Text of any folder as byte-level windows for a language model.

It is: reading files in a fixed order, cutting their bytes into windows of equal length, a split into training and
validation windows that share no byte, and the LightningDataModule that batches them. It is not: a tokenizer (a token
is a byte, 0..255), and it knows nothing of how the model is split over processes.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SKIPPED_FOLDERS = ("__pycache__", "site-packages", "dist-packages", "node_modules")
SEPARATOR = b"\0"  # between two files; no text file holds it


def find_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files under `folder` whose name fits one of `patterns`, in an order that depends on nothing but their paths.

    The order is by checksum of the relative path, so that the first few megabytes of a large folder are a fair
    sample of all of it. Hidden folders, caches and installed packages are left out.
    """
    found: list[tuple[int, str]] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith(".")]
        for name in names:
            if any(fnmatch(name, pattern) for pattern in patterns):
                relative = (Path(root) / name).relative_to(folder).as_posix()
                found.append((zlib.crc32(relative.encode()), relative))
    return [folder / relative for _, relative in sorted(found)]


def read_bytes(files: Sequence[Path], max_bytes: int) -> Tensor:
    """The files' bytes one after another, a zero byte between two files: uint8, at most `max_bytes` long.

    Files that cannot be read, and files that hold a zero byte (not text), are left out.
    """
    parts: list[bytes] = []
    total = 0
    for file in files:
        if total >= max_bytes:
            break
        try:
            content = file.read_bytes()
        except OSError:
            continue
        if content and SEPARATOR not in content:
            parts.append(content)
            total += len(content) + len(SEPARATOR)
    stream = np.frombuffer(SEPARATOR.join(parts)[:max_bytes], dtype=np.uint8)
    return torch.from_numpy(stream.copy())


def split_windows(stream: Tensor, seq_len: int, val_fraction: float, multiple: int) -> tuple[Tensor, Tensor]:
    """Cut `stream` (uint8, 1-dim) into windows that do not overlap: training (n, seq_len), validation (m, seq_len).

    Validation is the end of the stream, so whole files rather than neighbours of training windows. Both counts are
    cut down to a multiple of `multiple`, so that every step sees a full batch.

    Raises:
        ValueError: there is too little text for one batch of each.
    """
    windows = stream[: stream.numel() // seq_len * seq_len].view(-1, seq_len)
    total = windows.shape[0] // multiple
    held_out = max(1, round(total * val_fraction))
    if total - held_out < 1:
        raise ValueError(
            f"{stream.numel()} bytes of text make {windows.shape[0]} windows of {seq_len}, but one batch of {multiple} "
            f"for training and one for validation need {2 * multiple}: choose a folder with more text (data.path, "
            f"data.patterns), or a smaller data.seq_len or data.global_batch_size"
        )
    cut = (total - held_out) * multiple
    return windows[:cut], windows[cut : total * multiple]


class Windows(Dataset[dict[str, Tensor]]):
    """Windows (n, seq_len) of bytes as samples of a causal language model.

    A sample is `{"input_ids": (seq_len,), "labels": (seq_len,)}`, int64. Labels equal the input: the model shifts them.
    """

    def __init__(self, windows: Tensor) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return self.windows.shape[0]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.windows[index].long()
        return {"input_ids": ids, "labels": ids.clone()}


class TextData(L.LightningDataModule):
    """Batches of byte windows from the text files of one folder.

    Args:
        path: a folder or one file; None for the source files of this Python's standard library.
        patterns: names of the files to read, e.g. ["*.md", "*.txt"]; None for *.py of the standard library, and for
            every text file of any other folder.
        max_bytes: read no more than this.
        seq_len: tokens a sample.
        global_batch_size: samples a step over all data-parallel ranks; each rank loads its share.
        val_fraction: share of the windows kept for validation.

    Raises:
        ValueError: no such folder, no file that fits, or too little text.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        patterns: Sequence[str] | None = None,
        max_bytes: int = 8_000_000,
        seq_len: int = 128,
        global_batch_size: int = 16,
        val_fraction: float = 0.05,
    ) -> None:
        super().__init__()
        self.path = Path(path).expanduser() if path is not None else Path(sysconfig.get_paths()["stdlib"])
        self.patterns = list(patterns or (["*.py"] if path is None else ["*"]))
        self.max_bytes, self.seq_len = max_bytes, seq_len
        self.global_batch_size, self.val_fraction = global_batch_size, val_fraction
        self.train_windows: Tensor | None = None
        self.val_windows: Tensor | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read and cut the text; a second call does nothing."""
        if self.train_windows is not None:
            return
        if not self.path.exists():
            raise ValueError(f"data.path={self.path} does not exist")
        files = [self.path] if self.path.is_file() else find_files(self.path, self.patterns)
        if not files:
            raise ValueError(f"no file under {self.path} fits {self.patterns}: change data.patterns")
        stream = read_bytes(files, self.max_bytes)
        cut = split_windows(stream, self.seq_len, self.val_fraction, self.global_batch_size)
        self.train_windows, self.val_windows = cut

    @property
    def rank_batch_size(self) -> int:
        """Samples one data-parallel rank loads a step."""
        strategy = getattr(self.trainer, "strategy", None)
        ranks = getattr(strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)
        if self.global_batch_size % ranks:
            raise ValueError(
                f"data.global_batch_size={self.global_batch_size} does not divide over {ranks} data-parallel ranks: "
                f"choose a multiple of {ranks}"
            )
        return self.global_batch_size // ranks

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled. Lightning replaces the sampler by one that deals the samples out to the data-parallel ranks,
        from the same permutation everywhere: step i sees the same samples at every layout."""
        assert self.train_windows is not None, "setup() comes first"
        return DataLoader(Windows(self.train_windows), batch_size=self.rank_batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """In order."""
        assert self.val_windows is not None, "setup() comes first"
        return DataLoader(Windows(self.val_windows), batch_size=self.rank_batch_size)
