"""The example's data module: windows, labels, a split that shares nothing, the same data every time."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DistributedSampler

from text_data import TextData, find_files, read_bytes, split_windows


def attach(data: TextData, ranks: int) -> None:
    """Give `data` a strategy of `ranks` data-parallel processes, as a Trainer would."""
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")] * ranks, cluster_environment=LightningEnvironment())
    data.trainer = SimpleNamespace(strategy=strategy)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(6):
        (tmp_path / f"part{i % 2}").mkdir(exist_ok=True)
        content = random.Random(i).choices(range(1, 256), k=100 + i)
        (tmp_path / f"part{i % 2}" / f"text{i}.py").write_bytes(bytes(content))
    (tmp_path / "part0" / "__pycache__").mkdir()
    (tmp_path / "part0" / "__pycache__" / "cached.py").write_bytes(b"z" * 50)
    (tmp_path / "notes.txt").write_bytes(b"y" * 50)
    (tmp_path / "binary.py").write_bytes(b"\x00\x01\x02")
    return tmp_path


def test_finds_the_files_that_fit_in_a_fixed_order(folder: Path) -> None:
    files = find_files(folder, ["*.py"])
    assert {f.name for f in files} == {f"text{i}.py" for i in range(6)} | {"binary.py"}
    assert files == find_files(folder, ["*.py"])
    assert {f.name for f in find_files(folder, ["*.txt"])} == {"notes.txt"}


def test_order_does_not_depend_on_where_the_folder_is(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    moved = tmp_path_factory.mktemp("elsewhere") / "copy"
    names = [f.relative_to(folder) for f in find_files(folder, ["*.py"])]
    folder.rename(moved)
    assert [f.relative_to(moved) for f in find_files(moved, ["*.py"])] == names


def test_stream_is_the_files_bytes_with_separators(folder: Path) -> None:
    files = find_files(folder, ["*.py"])
    stream = read_bytes(files, 10**6)
    texts = [f.read_bytes() for f in files if f.name != "binary.py"]
    assert bytes(stream.tolist()) == b"\0".join(texts)
    assert read_bytes(files, 250).tolist() == stream[:250].tolist()
    assert read_bytes([folder / "missing.py", *files], 10**6).equal(stream)


def test_windows_cover_the_stream_without_overlap() -> None:
    stream = (torch.arange(1039) % 251).to(torch.uint8)
    train, val = split_windows(stream, seq_len=10, val_fraction=0.2, multiple=4)
    assert train.shape == (80, 10) and val.shape == (20, 10)  # 3 windows and 9 bytes do not fill a batch
    assert torch.cat([train, val]).flatten().equal(stream[:1000])


def test_sample_and_batch(folder: Path) -> None:
    data = TextData(str(folder), seq_len=16, global_batch_size=4, val_fraction=0.25)
    data.setup()
    assert data.patterns == ["*"]
    assert data.train_windows.dtype == torch.uint8
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (4, 16) and batch["input_ids"].dtype == torch.int64
    assert batch["labels"].equal(batch["input_ids"])  # the model shifts them
    windows = {tuple(w) for w in data.train_windows.tolist()}
    assert {tuple(ids) for ids in batch["input_ids"].tolist()} <= windows
    assert next(iter(data.val_dataloader()))["input_ids"].equal(data.val_windows[:4].long())
    data.setup("validate")
    assert len(data.val_dataloader()) * 4 == data.val_windows.shape[0]


def steps(data: TextData, ranks: int) -> list[set[tuple[int, ...]]]:
    """The samples each step sees over all `ranks`, with the sampler Lightning puts in."""
    attach(data, ranks)
    seen: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for rank in range(ranks):
        loader = data.train_dataloader()
        order = list(DistributedSampler(loader.dataset, ranks, rank, shuffle=True, seed=7))
        for at, index in enumerate(order):
            seen[at // loader.batch_size].add(tuple(loader.dataset[index]["input_ids"].tolist()))
    return [seen[step] for step in range(len(seen))]


def test_step_sees_the_same_samples_on_any_number_of_ranks(folder: Path) -> None:
    data = TextData(str(folder), seq_len=8, global_batch_size=8)
    data.setup()
    alone = steps(data, 1)
    assert len(alone) * 8 == len(data.train_windows) and all(len(samples) == 8 for samples in alone)
    assert steps(data, 2) == alone
    assert steps(data, 4) == alone


def test_default_text_is_the_standard_library() -> None:
    data = TextData(max_bytes=300_000)
    data.setup()
    assert data.patterns == ["*.py"]
    text = bytes(data.train_windows.flatten().tolist())
    assert data.train_windows.numel() + data.val_windows.numel() > 290_000
    assert b"import " in text and b"def " in text


def test_bad_input_says_what_to_change(folder: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        TextData(str(folder / "nowhere")).setup()
    with pytest.raises(ValueError, match=r"data.patterns"):
        TextData(str(folder), patterns=["*.rst"]).setup()
    with pytest.raises(ValueError, match="need 32: choose a folder with more text"):
        TextData(str(folder), seq_len=128).setup()
    data = TextData(str(folder), seq_len=8, global_batch_size=8)
    data.setup()
    attach(data, 3)
    with pytest.raises(ValueError, match="choose a multiple of 3"):
        data.train_dataloader()


def test_trainer_runs_it(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    seen = []

    class Collect(L.LightningModule):
        def training_step(self, batch, batch_idx):
            seen.append(batch["input_ids"])

        def configure_optimizers(self):
            return None

    data = TextData(str(folder), seq_len=8, global_batch_size=8)
    root = tmp_path_factory.mktemp("run")
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=root,
    )  # fmt: skip
    trainer.fit(Collect(), datamodule=data)
    assert sorted(torch.cat(seen).tolist()) == sorted(data.train_windows.tolist())
