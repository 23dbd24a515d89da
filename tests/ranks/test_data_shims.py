"""Every shim around DeepSpeed is still needed: these tests fail when DeepSpeed has changed and a shim can go."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallax.plugins.data import deepspeed_shims as shims
from parallax.plugins.data.base import Clip
from parallax.plugins.data.deepspeed import DeepSpeedEngine
from tests.procs import run_ranks
from tests.ranks import data_cases as cases
from tests.ranks.data_cases import adamw, mesh_of, net


def _without_engine(rank: int, world: int) -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero.utils import assert_ints_same_as_other_ranks

    # The shared-memory operator exists, and hiding it is enough.
    assert get_accelerator().create_op_builder("ShareMemCommBuilder").NAME == "deepspeed_shm_comm"
    with shims.replaced(shims.module("ops"), "__compatible_ops__", {}):
        assert build_shm_op() is None
    # Importing Muon compiles.
    compiled = []
    with shims.replaced(torch, "compile", lambda *args, **kwargs: compiled.append(args) or (lambda fn: fn)):
        shims.module("runtime.zero.muon.muon_optimizer")
    assert compiled
    shims.init_comm()
    # None is the whole world.
    assert shims.module("comm").get_world_size(group=None) == world > 1
    # An absent gradient_clipping clips.
    assert DeepSpeedConfig({"train_batch_size": world}).gradient_clipping == 1.0
    # The order of modules is compared with rank 0 of the world; without LOCAL_RANK not at all.
    with pytest.raises(KeyError, match="LOCAL_RANK"):
        assert_ints_same_as_other_ranks([1])
    with shims.local_rank(0):
        if rank == 0:
            assert_ints_same_as_other_ranks([rank])
        else:
            with pytest.raises(RuntimeError, match="disagreement"):
                assert_ints_same_as_other_ranks([rank])
    assert "LOCAL_RANK" not in os.environ
    # Masters are fp32, and zero.Init refuses fp64.
    plain = ZeROOptimizer.__new__(ZeROOptimizer)
    assert plain._configure_master_weights() == torch.float32
    with shims.fp64_allowed(torch.float64):
        assert plain._configure_master_weights() == torch.float64
    init = partition_parameters.InsertPostInitMethodToModuleSubClasses
    with shims.replaced(get_accelerator(), "is_fp16_supported", lambda: True):  # as on a GPU
        with pytest.raises(AssertionError, match="Invalid data type"):
            init(dtype=torch.float64)
        with shims.fp64_allowed(torch.float64):
            init(dtype=torch.float64)
    dist.barrier()


class _Leave(BaseException):
    pass


class _Leaver(nn.Module):
    def forward(self) -> None:
        raise _Leave


def _with_engine(rank: int, world: int) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine as Plain
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    mesh, module = mesh_of(rank, 1, dp=world), net(torch.float64)
    # A scalar cannot be broadcast.
    scalar = SimpleNamespace(dist_backend="gloo", module=nn.ParameterDict({"one": torch.ones(())}))
    with pytest.raises(RuntimeError, match="to view Float as Byte"):
        Plain._broadcast_model(scalar)
    engine = DeepSpeedEngine()
    engine.setup(module, adamw(module), mesh=mesh, layout=mesh.layout, owned=lambda name: True)
    # The engine would reduce in fp32, and the norm is taken in fp32.
    assert engine.engine.communication_data_type == torch.float64
    assert Plain.communication_data_type.fget(engine.engine) == torch.float32
    assert Plain.get_data_types(engine.engine) == (torch.float32, torch.float32)
    engine.backward(engine.forward(cases.loss_of, module, *cases.batch(0, rank, 0, torch.float64)))
    engine.reduce()
    zero = engine.engine.optimizer
    assert (
        DeepSpeedZeroOptimizer.get_grad_norm_direct(zero, zero.averaged_gradients[0], zero.params_in_partition[0]).dtype
        == torch.float32
    )
    engine.step(Clip())
    engine.teardown()

    # A module left by an exception stays on the stack.
    mesh, leaver = mesh_of(rank, 3, dp=world), nn.Sequential(_Leaver(), nn.Linear(2, 2))
    engine = DeepSpeedEngine()
    engine.setup(leaver, adamw(leaver), mesh=mesh, layout=mesh.layout, owned=lambda name: True)
    depth = len(FWD_MODULE_STACK)

    def leave() -> tuple[()]:
        with pytest.raises(_Leave):
            leaver[0]()
        return ()

    engine.step_module.run = leave
    engine.engine()
    assert len(FWD_MODULE_STACK) > depth
    del FWD_MODULE_STACK[depth:]
    engine.forward(leave)
    assert len(FWD_MODULE_STACK) == depth
    # The set-up puts the root on it for good.
    assert engine.step_module in FWD_MODULE_STACK
    engine.teardown()
    assert engine.step_module not in FWD_MODULE_STACK


@pytest.mark.parametrize("case", [_without_engine, _with_engine])
def test_shims_are_needed(case: Any) -> None:
    run_ranks(2, case, timeout=60)


def test_quiet_lets_errors_through() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(handler)
    try:
        with shims.quiet():
            logger.warning("a buffer was made")
            logger.error("a buffer was lost")
        logger.warning("another buffer was made")
    finally:
        logger.removeHandler(handler)
    assert said == ["a buffer was lost", "another buffer was made"]
