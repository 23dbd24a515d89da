"""What is verified: a LightningModule and its data, found by `script.py:Name`.

It is: the import, with errors in the user's words, and the making of a fresh module and loader in each process. It
is not: aware of layouts.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from parallax.strategies.names import nearest_name


@dataclass(frozen=True)
class Target:
    """Where the module is, and where its data come from.

    Attributes:
        source: path of a script, or name of a module.
        name: class or function in it that makes the LightningModule when called without arguments, or a
            (LightningModule, data) pair; data is a DataLoader or a LightningDataModule.
        synthetic: samples per data rank and batch, and tokens, of made-up batches `{"input_ids", "labels"}`; None
            takes the module's own training data.
    """

    source: str
    name: str
    synthetic: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str, synthetic: tuple[int, int] | None = None) -> Target:
        """Read `script.py:Name` or `package.module:Name`.

        Raises:
            ValueError: there is no name, or no such script.
        """
        source, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier():
            raise ValueError(f"{text!r} does not say what to verify; write script.py:Name, e.g. train.py:Lit")
        if source.endswith(".py") and not Path(source).is_file():
            raise ValueError(f"there is no script {source!r}")
        return cls(source, name, synthetic)

    def build(self) -> tuple[LightningModule, Any]:
        """A fresh module and its training data (a loader, a data module, or None for the module's own).

        Raises:
            ValueError: the script does not import, or the name is missing or makes something else.
        """
        namespace = self._load()
        make = getattr(namespace, self.name, None)
        if make is None:
            near = nearest_name(self.name, [n for n in vars(namespace) if not n.startswith("_")])
            raise ValueError(f"{self.source!r} has no {self.name!r}" + (f"; did you mean {near!r}?" if near else ""))
        try:
            made = make()
        except TypeError as error:
            raise ValueError(
                f"{self.name}() in {self.source!r} cannot be called without arguments ({error}); name a function that "
                f"makes the module, e.g. def verify_me(): return {self.name}(...)"
            ) from error
        module, data = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(module, LightningModule):
            raise ValueError(f"{self.name} in {self.source!r} makes a {type(module).__name__}, not a LightningModule")
        if self.synthetic is None and data is None and not is_overridden("train_dataloader", module):
            raise ValueError(
                f"{self.name} in {self.source!r} has no train_dataloader; let it make (module, loader), or use "
                f"synthetic batches: --synthetic 4x32 (samples x tokens)"
            )
        return module, data

    def _load(self) -> Any:
        if not self.source.endswith(".py"):
            return _imported(self.source, lambda: importlib.import_module(self.source))
        path = Path(self.source).resolve()
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))

        def run() -> Any:
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            namespace = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = namespace
            spec.loader.exec_module(namespace)
            return namespace

        return _imported(self.source, run)


def _imported(source: str, load: Any) -> Any:
    try:
        return load()
    except Exception as error:
        raise ValueError(f"{source!r} failed to import: {type(error).__name__}: {error}") from error


def synthetic_loader(module: LightningModule, size: tuple[int, int], ranks: int, steps: int) -> DataLoader[Any]:
    """Random token batches, of the vocabulary of the module's Hugging Face model.

    Raises:
        ValueError: no part of the module has a config with a vocab_size.
    """
    configs = (getattr(m, "config", None) for m in module.modules())
    vocabulary = next((v for c in configs if isinstance(v := getattr(c, "vocab_size", None), int)), None)
    if vocabulary is None:
        raise ValueError("synthetic batches need a model with a config.vocab_size; give the module a train_dataloader")
    samples, tokens = size
    rows = torch.randint(0, vocabulary, (samples * ranks * steps, tokens), generator=torch.Generator().manual_seed(7))
    return DataLoader([_row(row) for row in rows], batch_size=samples)  # type: ignore[arg-type]


def _row(tokens: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"input_ids": tokens, "labels": tokens.clone()}


def loader_of(module: LightningModule, data: Any) -> Any:
    """What `Trainer.fit` takes beside the module: `{"train_dataloaders": ...}` or `{"datamodule": ...}` or nothing."""
    if data is None:
        return {}
    return {"datamodule": data} if isinstance(data, LightningDataModule) else {"train_dataloaders": data}
