"""Where DeepSpeed 0.19.8 must be held differently while it is set up: one shim per fact, with its reason and date.

It is: with `deepspeed_shims_step.py` (what runs in every step) everything in this project that reaches into
DeepSpeed's internals to change what they do. It is not: permanent; every shim says when it can go, and
`tests/ranks/test_data_shims.py` fails when it is no longer needed. Nothing is patched for longer than the call that
needs it, unless a shim says so.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallax.strategies.mesh import Mesh


def module(name: str) -> Any:
    """DeepSpeed's module `deepspeed.{name}`, imported late because DeepSpeed is optional and slow to import."""
    return importlib.import_module(f"deepspeed.{name}")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside."""
    saved = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, saved)


@contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed's logger says only errors inside.

    2026-11, 0.19.8: it writes to stdout on every rank about accelerators, buffers and "untested" optimizers,
    and sets its own level when it is imported, so a filter on the logger is what survives. Goes when DeepSpeed
    leaves levels to the application.
    """
    logger, rule = logging.getLogger("DeepSpeed"), lambda record: record.levelno >= logging.ERROR
    logger.addFilter(rule)
    try:
        yield
    finally:
        logger.removeFilter(rule)


@contextmanager
def local_rank(index: int) -> Iterator[None]:
    """LOCAL_RANK is `index` inside, for DeepSpeed alone.

    2026-11, 0.19.8: `zero.Init` reads the device from this variable, whatever device the tensors are on. Goes when
    it takes a device.
    """
    saved = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(index)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK")
        if saved is not None:
            os.environ["LOCAL_RANK"] = saved


def hide_deprecations() -> None:
    """Silence torch's notices about two collectives that DeepSpeed calls by their old names. Stays.

    2026-11, 0.19.8 with torch 2.13: two lines on every rank, again and again, about code the user cannot change.
    """
    names = r".torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor). is deprecated"
    warnings.filterwarnings("ignore", message=names, category=FutureWarning)


def import_muon() -> None:
    """Import DeepSpeed's Muon so that nothing is compiled before Muon is used.

    2026-11, 0.19.8: building any ZeRO optimizer imports it, and its decorators load torch's compiler: 2 to 6 seconds
    on every rank. Inside, `torch.compile` waits for the first call. Goes when the import is left to Muon's users.
    """

    def later(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        if fn is None:
            return lambda target: later(target, **options)
        compiled: list[Callable[..., Any]] = []

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not compiled:
                compiled.append(torch.compile(fn, **options))
            return compiled[0](*args, **kwargs)

        return call

    with replaced(torch, "compile", later):
        module("runtime.zero.muon.muon_optimizer")


def use_accelerator(device: torch.device) -> None:
    """Make DeepSpeed work on the kind of `device`. Stays: DeepSpeed has one accelerator per process.

    2026-11, 0.19.8: it picks a GPU when there is one, also for a model on the CPU.
    """
    accelerator = module("accelerator")
    if accelerator.get_accelerator().device_name() != device.type:
        kind = {"cpu": "CPU_Accelerator", "cuda": "CUDA_Accelerator"}.get(device.type)
        if kind is None:
            raise ValueError(f"data engine 'deepspeed' works on cpu and cuda, the model is on {device}; use 'ddp'")
        accelerator.set_accelerator(getattr(module(f"accelerator.{device.type}_accelerator"), kind)())


def init_comm() -> None:
    """Let DeepSpeed use the process group that is already there.

    2026-11, 0.19.8: on a CPU it compiles a shared-memory operator here (minutes, under a file lock that a killed
    process leaves behind, so that every later run waits for ever); for the duration of the call nothing can be
    compiled. And by default it looks for MPI by itself and changes RANK. Goes when the first can be switched off by
    an argument, like the second.
    """
    operators = module("ops")
    known = vars(operators).get("__compatible_ops__")  # made by its first reader, who runs the C compiler for it
    operators.__compatible_ops__ = {}
    try:
        module("comm.comm").init_distributed(
            dist_backend=dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False, verbose=False
        )
    finally:
        del operators.__compatible_ops__
        if known is not None:
            operators.__compatible_ops__ = known


def mpu(mesh: Mesh) -> Any:
    """The mesh's `mpu` with a real group also where an axis has one rank.

    2026-11, 0.19.8: it takes None for the whole world, so that with one data rank stages would average with each
    other. A stay-alone group costs nothing.
    """
    unit: Any = mesh.mpu()
    for name, axis in (("data_parallel", "data"), ("model_parallel", "model"), ("tensor_model_parallel", "tp")):
        if mesh[axis].group is None:
            setattr(unit, f"get_{name}_group", lambda axis=axis: mesh.real_group(axis))
    return unit


def engine_class(dtype: torch.dtype, experts: bool) -> Any:
    """DeepSpeed's engine for trainable parameters of `dtype`.

    2026-11, 0.19.8: the engine knows fp32, fp16 and bf16 only, as a property of its config; fp64 gradients would be
    reduced in fp32. bf16 gradients would be moved to a second, fp32, attribute where plugins do not find them. And
    the device index comes from LOCAL_RANK, which must equal Open MPI's. And it looks for experts in layers of its own
    classes only (`experts`: there are groups of them). Goes when dtypes are the tensors' and experts the marked ones.
    """
    base = module("runtime.engine").DeepSpeedEngine
    members = {
        "communication_data_type": property(lambda self: dtype, lambda self, value: None),
        "get_data_types": lambda self: (dtype, dtype),
        "_do_args_sanity_check": lambda self, args: None,
        "_configure_with_arguments": lambda self, args, mpu: setattr(self, "local_rank", args.device_rank),
    }
    if experts:
        members["has_moe_layers"] = property(lambda self: True, lambda self, value: None)
    return type("ParallaxDeepSpeedEngine", (base,), members)


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Inside, ranks take the weights they have, which are the same already (`assemble.py`).

    2026-11, 0.19.8: every weight is broadcast as bytes, and a scalar (a learned temperature) has no view as bytes, so
    that no module with one could be trained. Goes when scalars are broadcast.
    """

    def partitioned(self: Any, param: Any) -> None:
        self._convert_to_deepspeed_param(param)
        param.partition()

    engine, init = module("runtime.engine").DeepSpeedEngine, module("runtime.zero.partition_parameters").Init
    with replaced(engine, "_broadcast_model", lambda self: None), replaced(init, "_zero_init_param", partitioned):
        yield


@contextmanager
def fp64_allowed(dtype: torch.dtype) -> Iterator[None]:
    """Inside, ZeRO keeps fp64 parameters, masters and states in fp64.

    2026-11, 0.19.8: masters are fp32 by construction, where fp16 is supported `zero.Init` asserts a dtype that it then
    does not use for a finished module, and reduce-scatter, which groups of experts need, is refused. Goes when
    `data_types` accepts fp64.
    """
    with ExitStack() as stack:
        if dtype == torch.float64:
            optimizer = module("runtime.base_optimizer").ZeROOptimizer
            plain = optimizer._configure_master_weights

            def masters(self: Any, *args: Any, **kwargs: Any) -> torch.dtype:
                plain(self, *args, **kwargs)
                return dtype

            def only_checked(self: Any, *_: Any) -> None:
                self.dtype = torch.float

            init = module("runtime.zero.partition_parameters").InsertPostInitMethodToModuleSubClasses
            stack.enter_context(replaced(optimizer, "_configure_master_weights", masters))
            stack.enter_context(replaced(init, "_set_dtype", only_checked))

            partitioned = module("runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer
            configure = partitioned._configure_moe_settings

            def experts_scattered(self: Any) -> None:
                self.reduce_scatter, asked = True, self.reduce_scatter
                configure(self)
                self.reduce_scatter = asked

            stack.enter_context(replaced(partitioned, "_configure_moe_settings", experts_scattered))
        yield


def build_engine(
    step: nn.Module,
    optimizer: Any,
    config: dict[str, Any],
    *,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
    experts: bool = False,
) -> Any:
    """DeepSpeed's engine around `step`, over the data group of `mesh`. Collective over the world."""
    with quiet(), local_rank(device.index or 0), fp64_allowed(dtype), nothing_sent():
        hide_deprecations()
        import_muon()
        use_accelerator(device)
        init_comm()
        unit = mpu(mesh)
        settings = module("runtime.config").DeepSpeedConfig(config, unit)
        engine = engine_class(dtype, experts)(
            args=SimpleNamespace(device_rank=device.index or 0),
            model=step,
            optimizer=optimizer,
            mpu=unit,
            config=config,
            config_class=settings,
            dont_change_device=True,
        )
        if experts:
            engine.optimizer.reduce_scatter = True  # the only path that knows which group a gradient belongs to
        return engine
