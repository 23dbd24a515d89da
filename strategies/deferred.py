"""Deferred initialisation: `configure_model` runs on the meta device while everything it does is recorded.

It is: the context manager `deferred_init` and the `Recording` it yields, from which any one tensor of the model can
be computed later, whole, on a real device, with random numbers that depend on a seed and the tensor's name only. It
is not: the replay itself (`replay.py`), nor putting values into the module (`materialize.py`).

What lands on the meta device: every tensor made without an explicit device, and every random one. A tensor made
with an explicit device, brought from outside, or read from a file is real and stays so; where it meets a meta
tensor it is kept by reference. Values that involve no random number may be read (`.item()`, `.tolist()`, `if`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors  # the factories that `torch.device(...)` redirects
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from parallax.strategies.pretrained_hf import transformers_deferred
from parallax.strategies.recording import IN_INIT, Recording, call_name
from parallax.strategies.replay import META, Outside, Step, Window, storage_key, unrecorded

__all__ = ["Recording", "deferred_init"]

_IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__  # made anew on each access: compare with ==
_FACTORIES = frozenset(_device_constructors())
_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
_FILLS = frozenset(  # in-place operators whose result does not depend on what was there
    f"aten::{name}_"
    for name in (
        *("fill", "zero", "copy", "normal", "uniform", "random", "bernoulli"),
        *("exponential", "log_normal", "cauchy", "geometric"),
    )
)
# Initialisers of torch.nn.init by their code. Some return early on a meta tensor (see `_OnMeta._is_meta`).
_INITIALISERS: Mapping[CodeType, Callable[..., Any]] = {
    inspect.unwrap(function).__code__: function
    for name, function in vars(nn.init).items()
    if inspect.isfunction(function) and name.endswith("_")
}


@contextmanager
def deferred_init() -> Iterator[Recording]:
    """While active, the model's tensors are made on the meta device and recorded.

    `transformers`, when it is or gets imported, initialises its models here as it does on a real device, and its
    `from_pretrained(folder)` records where each weight is stored instead of reading it.

    Example::

        with deferred_init() as recording:
            module.configure_model()
        recording.capture(module)
    """
    recording = Recording()
    with ExitStack() as stack:
        stack.enter_context(transformers_deferred(recording))
        recorder = stack.enter_context(_Recorder(recording))
        stack.enter_context(_OnMeta(recorder))
        yield recording


class _OnMeta(TorchFunctionMode):
    """Python level: factories without a device go to meta; what would bypass the operators is caught here."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_META and args[0].is_meta:
            frame = sys._getframe(1)
            if frame.f_code is nn.Module._load_from_state_dict.__code__:
                return False  # it would warn that copying into a meta parameter does nothing: here it is recorded
            self._record_initialiser(frame)
        elif func in _FACTORIES and (kwargs.get("device") is None or torch.device(kwargs["device"]) == META):
            if func in _FROM_DATA:
                return self._from_data(func, args, {**kwargs, "device": None})
            kwargs["device"] = META
        elif func is Tensor.new_tensor and args[0].is_meta and kwargs.get("device") in (None, META, "meta"):
            return self._from_data(func, args, {**kwargs, "device": "cpu"})
        elif func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            args = (args[0], _real_index(args[1]), *args[2:])
        elif func in (Tensor.numpy, Tensor.__array__) and args[0].is_meta:
            with unrecorded():
                return func(self._recorder.recording.peek(args[0]), *args[1:], **kwargs)
        self._recorder.depth += 1
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.depth -= 1

    def _from_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`torch.tensor(...)` and the like: made for real, since the values come from Python, then a constant."""
        self._recorder.depth += 1
        try:
            made: Tensor = func(*args, **kwargs)
            if made.is_meta or (func in (torch.as_tensor, torch.asarray) and isinstance(args[0], Tensor)):
                return made
            return made.detach().to(META).requires_grad_(made.requires_grad)
        finally:
            self._recorder.depth -= 1

    def _record_initialiser(self, frame: Any) -> None:
        """Record a call of `torch.nn.init` that is about to do nothing because its tensor is on meta.

        `trunc_normal_`, `orthogonal_`, `sparse_` and `dirac_` (torch 2.13) ask `tensor.is_meta` and return. Their
        arguments are in the frame that asks, however the function was reached.
        """
        function = _INITIALISERS.get(frame.f_code)
        if function is None:
            return
        given = {name: frame.f_locals[name] for name in inspect.signature(function).parameters}
        if given.get("generator") is not None:
            raise _generator_error(function.__name__)
        window = self._recorder.recording.tape.window(given["tensor"])
        self._recorder.record_call(function, (), {**given, "tensor": window}, window)


class _Recorder(TorchDispatchMode):
    """Operator level: records every operator that makes or changes meta memory, and runs it on meta."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self.depth = 0  # > 0 inside a call that `_OnMeta` has seen, where a device was chosen on purpose

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        random = torch.Tag.nondeterministic_seeded in func.tags
        leaves = list(tree_iter((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        if not tensors and device is not None and (random or (self.depth == 0 and call_name(func) in _UNINITIALISED)):
            kwargs["device"] = device = META  # random numbers, and `torch.Tensor(rows, cols)`
        if device is None or device == META:
            if device is None and not any(t.is_meta for t in tensors):
                return func(*args, **kwargs)
            if any(isinstance(leaf, torch.Generator) for leaf in leaves):
                raise _generator_error(call_name(func))
            written = _written(func, args, kwargs)
            if torch.Tag.data_dependent_output not in func.tags and all(t.is_meta for t in written):
                try:
                    out = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
                except NotImplementedError:  # the shape of the result depends on values, or there is no meta kernel
                    return tree_map(self._constant, self._evaluate(func, args, kwargs))
                self._record(func, args, kwargs, out, written, random)
                return out
        return self._evaluate(func, args, kwargs)

    def record_call(self, run: Callable[..., Any], args: Any, kwargs: Any, target: Window) -> None:
        """Record a random initialiser that fills the window `target` and returns it."""
        tape = self.recording.tape
        fills = target.storage if tape.covers(target) else None
        reads = () if fills is not None else (target.storage,)
        default = torch.get_default_dtype()
        tape.append(Step(run, args, kwargs, (None,), reads, (target.storage,), fills, True, default))

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, written: list[Tensor], random: bool) -> None:
        tape = self.recording.tape
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_meta]
        before = {storage_key(tensor) for tensor in inputs}
        results = [leaf for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
        made = [tape.window(t) if storage_key(t) not in before else None for t in results]
        new = {window.storage for window in made if window is not None}
        if call_name(func) in _UNINITIALISED or torch.Tag.inplace_view in func.tags or not (new or written):
            return  # memory without contents, or only another view of known memory
        reads = [storage_key(tensor) for tensor in inputs]
        unknown = {storage_key(t) for t in inputs if not tape.knows(t)}
        targets = [tape.window(tensor) for tensor in written]
        fills = None
        if len(targets) == 1 and call_name(func) in _FILLS and tape.covers(targets[0]):
            target = targets[0].storage
            fills = target if reads.count(target) == 1 else None  # a source too: x.copy_(x.t())
        if unknown - {fills}:
            raise ValueError(
                f"{call_name(func)} in configure_model uses a tensor that was made on the meta device elsewhere, so it "
                "has no value; create it in configure_model, or in `__init__` on a real device"
            )
        tape.append(
            Step(
                run=func,
                args=tree_map(self._symbol, args),
                kwargs=tree_map(self._symbol, kwargs),
                outs=tuple(made),
                reads=tuple(dict.fromkeys(storage for storage in reads if storage != fills)),
                writes=tuple({*(window.storage for window in targets), *new}),
                overwrites=fills,
                random=random,
                default_dtype=torch.get_default_dtype(),
            )
        )

    def _symbol(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta:
            return self.recording.tape.window(leaf)
        return Outside(leaf, 0 if leaf.is_inference() else leaf._version)

    def _evaluate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator on real values: something outside the recording (Python, a device) wants the result."""
        if torch.Tag.nondeterministic_seeded in func.tags or any(t.is_meta for t in _written(func, args, kwargs)):
            raise ValueError(
                f"{call_name(func)} in configure_model cannot be recorded: it does not run without values; {IN_INIT}"
            )

        def real(leaf: Any) -> Any:
            return self.recording.peek(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf

        return func(*tree_map(real, args), **tree_map(real, kwargs))

    def _constant(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        out = leaf.to(META)
        self._record(torch.ops.aten._to_copy.default, (leaf,), {"device": META}, out, [], False)
        return out


def _real_index(index: Any) -> Any:
    """An index with its lists made real tensors: indexing a meta tensor would put them on meta and lose them."""
    if isinstance(index, tuple):
        return tuple(map(_real_index, index))
    return torch.tensor(index) if isinstance(index, list) else index


def _as_meta(leaf: Any) -> Any:
    return leaf.to(META) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensor arguments an operator changes in place."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in tree_iter(found) if isinstance(leaf, Tensor)]


def _generator_error(name: str) -> ValueError:
    return ValueError(
        f"{name} in configure_model was given a torch.Generator, which cannot be honoured: initial values are drawn "
        "per parameter from the seed and the parameter's name, so that they are the same at every layout; leave it out "
        "(and seed the run), or build the model in `__init__`"
    )
