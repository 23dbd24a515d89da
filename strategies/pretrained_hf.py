"""`transformers` models under deferred initialisation: initial weights as usual, `from_pretrained` without reading.

It is: what must change in `transformers` for the length of a `deferred_init` block, and how a model's weights are
named in a file. It is not: reading (`weight_files.py`). `transformers` is imported by the user's code, never by this.
"""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parallax.strategies.import_hook import on_import
from parallax.strategies.recording import Recording
from parallax.strategies.replay import unrecorded
from parallax.strategies.weight_files import StoredWeight, WeightFiles, local_folder, match

_NO_EFFECT = frozenset(  # about the hub, or about how bytes are read: no meaning for a local folder read in slices
    {
        *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token", "_commit_hash"),
        *("_from_auto", "_from_pipeline", "trust_remote_code", "low_cpu_mem_usage", "weights_only"),
    }
)
_ONLY_DEFAULT: Mapping[str, tuple[Any, ...]] = {
    "use_safetensors": (None, True),
    "ignore_mismatched_sizes": (False,),
    "output_loading_info": (False,),
    "device_map": (None,),
    "quantization_config": (None,),
    "subfolder": ("",),
}


@contextmanager
def transformers_deferred(recording: Recording) -> Iterator[None]:
    """Patch `transformers` (imported already, or while the block runs) and put everything back afterwards."""
    with ExitStack() as undo:

        def modeling(module: ModuleType) -> None:
            # A model skips its initial weights when torch.tensor([]) lands on meta; here they get recorded instead.
            _patch(undo, module, "get_torch_context_manager_or_global_device", lambda: None)
            _patch(undo, module.PreTrainedModel, "from_pretrained", classmethod(_deferred(recording)))

        def auto(module: ModuleType) -> None:
            resolve = module.resolve_revision  # the first thing an AutoModel does with an id; it may ask the hub

            def local_only(folder: Any, *args: Any, **kwargs: Any) -> Any:
                local_folder(folder)
                return resolve(folder, *args, **kwargs)

            _patch(undo, module, "resolve_revision", local_only)

        with on_import({"transformers.modeling_utils": modeling, "transformers.models.auto.auto_factory": auto}):
            yield


def _patch(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def _deferred(recording: Recording) -> Callable[..., nn.Module]:
    """The `from_pretrained` that builds the model on meta and records which stored weight goes where."""

    def from_pretrained(
        cls: Any, pretrained_model_name_or_path: str | Path, *model_args: Any, config: Any = None, **kwargs: Any
    ) -> nn.Module:
        folder = local_folder(pretrained_model_name_or_path)
        if model_args:
            raise ValueError(f"from_pretrained takes no positional arguments but the folder here, got {model_args}")
        options, dtype = _options(folder, kwargs)
        how = {key: options.pop(key) for key in ("attn_implementation", "experts_implementation") if key in options}
        if config is None:
            config, options = cls.config_class.from_pretrained(folder, return_unused_kwargs=True, **options)
        if options:
            raise ValueError(
                f"from_pretrained in configure_model does not support: {', '.join(sorted(options))}; where weights "
                "go is the strategy's affair, and config keys must exist in the config"
            )
        config = _checked_config(cls, folder, copy.deepcopy(config))
        files = WeightFiles(folder)
        model = cls._from_config(config, dtype=_dtype(dtype, config, files), **how)
        _record(model, files, recording)
        if model.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = type(model.generation_config).from_pretrained(folder)
        model.eval()
        return model

    return from_pretrained


def _options(folder: Path, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """(what is left of the keyword arguments, dtype): those without effect here dropped, the others checked."""
    options = {key: value for key, value in kwargs.items() if key not in _NO_EFFECT}
    adapter = options.pop("adapter_kwargs", None) or {}
    if (folder / "adapter_config.json").is_file() or set(adapter) - _NO_EFFECT:
        raise ValueError(f"{folder} holds (or asks for) an adapter; load the base model, then add the adapter to it")
    for key, allowed in _ONLY_DEFAULT.items():
        value = options.pop(key, allowed[0])
        if value not in allowed:
            raise ValueError(f"from_pretrained in configure_model does not support {key}={value!r}; leave it out")
    dtype, old_dtype = options.pop("dtype", None), options.pop("torch_dtype", None)
    return options, old_dtype if dtype is None else dtype


def _checked_config(cls: Any, folder: Path, config: Any) -> Any:
    if not isinstance(config, cls.config_class):
        raise ValueError(f"{cls.__name__} needs a {cls.config_class.__name__}, got {type(config).__name__}")
    for key in ("quantization_config", "transformers_weights", "fusion_config"):
        if getattr(config, key, None) is not None:
            raise ValueError(f"the config of {folder} sets {key}, which cannot be read in slices; remove it")
    config.name_or_path = str(folder)
    return config


def _dtype(dtype: Any, config: Any, files: WeightFiles) -> torch.dtype:
    """What `from_pretrained` means by `dtype`: by default the config's, else that of the first float in the file."""
    if dtype is None or dtype == "auto":
        dtype = config.dtype
        if dtype is None:
            dtype = next((d for d in map(files.dtype, files.keys()) if d.is_floating_point), torch.get_default_dtype())
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype, its name or 'auto', got {dtype!r}")
    return dtype


def _record(model: Any, files: WeightFiles, recording: Recording) -> None:
    """Record the stored weight of every parameter and persistent buffer of `model`, whole on meta."""
    plan = model._get_dtype_plan(model.dtype)  # modules kept in fp32, by pattern
    if plan:
        from transformers.core_model_loading import build_glob_alternation

        pattern, groups, _ = build_glob_alternation(list(plan))
        for fqn, param in model.named_parameters():
            found = pattern.search(fqn)
            if found is not None:
                param.data = param.data.to(plan[groups[found.lastgroup]])
    tensors: dict[str, Tensor] = {
        fqn: value for fqn, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
    }
    names, missing_allowed = stored_names(model, files, tensors)
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in tensors.items()}
    for fqn, key in match(files, names, tensors, shapes=shapes, missing_allowed=missing_allowed).items():
        if tensors[fqn].is_meta:
            recording.load(tensors[fqn], StoredWeight(files, key))
        else:
            with unrecorded():
                tensors[fqn].copy_(files.read(key))


def stored_names(
    module: nn.Module, files: WeightFiles, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, str], frozenset[str]]:
    """(key -> FQN for the stored keys that are wanted, FQNs that may be missing).

    For a `transformers` model these are its own rules: renamed keys, `base_model_prefix` added or taken off, keys it
    ignores, and for a body the keys of the head it was stored with. Experts that are stored one by one become one key
    of `files` for each tensor of the model. For any other module, keys are FQNs.

    Raises:
        ValueError: the model converts weights on load in another way (splits, transposes), which slices cannot.
    """
    keys = files.keys()
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        return {key: key for key in keys}, frozenset()
    model: Any = module
    names = _renamed(model, files, tensors)
    prefix = f"{model.base_model_prefix}."
    with_head = not hasattr(model, model.base_model_prefix) and any(key.startswith(prefix) for key in keys)
    head = sorted(k for k, fqn in names.items() if with_head and fqn not in tensors and not k.startswith(prefix))
    if head:
        warnings.warn(f"{type(model).__name__} has no place for the stored {', '.join(head)}: left out", stacklevel=2)
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"}
    unwanted = {k for k, fqn in names.items() if fqn not in tensors and any(re.search(p, fqn) for p in ignored)}
    optional = model._keys_to_ignore_on_load_missing or ()
    allowed = frozenset(fqn for fqn in tensors if any(re.search(p, fqn) for p in optional))
    return {k: fqn for k, fqn in names.items() if k not in unwanted and k not in head}, allowed


def _renamed(model: Any, files: WeightFiles, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    prefix = model.base_model_prefix
    names: dict[str, str] = {}
    pieces: dict[str, dict[str, list[str]]] = {}
    for key in sorted(files.keys(), key=dot_natural_key):  # some renamings look at the keys in this order
        fqn, pattern = rename_source_key(key, renamings, converters, prefix, tensors)
        if fqn not in tensors and key in tensors:
            fqn, pattern = rename_source_key(key, [], [], prefix, tensors)
        if pattern is None:
            names[key] = fqn
            continue
        converter = next(c for c in converters if pattern in c.source_patterns)
        if not _stacks(converter):
            raise ValueError(
                f"{type(model).__name__} converts stored weights when it loads them ({key} by the rule {pattern!r}), "
                "which cannot be done on slices; call from_pretrained in `__init__`, where weights are real"
            )
        found = pieces.setdefault(fqn, {each: [] for each in converter.source_patterns})
        found[pattern].append(key)
    for fqn, blocks in pieces.items():
        counts = {pattern: len(keys) for pattern, keys in blocks.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"{fqn} is stored expert by expert, but with unequal numbers of pieces: {counts}")
        files.fuse(fqn, list(zip(*blocks.values(), strict=True)))
        names[fqn] = fqn
    return names


def _stacks(converter: Any) -> bool:
    """Whether a rule of transformers puts experts on top of each other, and the blocks of each after one another."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    several = len(converter.source_patterns) > 1
    wanted = [("MergeModulelist", 0), *([("Concatenate", 1)] if several else [])]
    return len(converter.target_patterns) == 1 and steps == wanted
