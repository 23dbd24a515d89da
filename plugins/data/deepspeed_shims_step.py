"""Where DeepSpeed 0.19.8 must be held differently in every step: one shim per fact, with its reason and date.

It is: what `deepspeed_shims.py` is for the set-up. It is not: patched into DeepSpeed's classes; objects of one
engine are changed, or module attributes for the duration of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from parallax.plugins.data.deepspeed_shims import module, replaced
from parallax.strategies.comm import AxisComm


def scope_trace(optimizer: Any, comm: AxisComm, *, traced: bool) -> None:
    """Keep ZeRO-3's record of the order of modules inside the data group, or do without it.

    2026-11, 0.19.8: at every forward until a trace is complete the coordinator compares it with rank 0 of the *world*:
    a hang or an error as soon as stages differ. The comparison is confined to `comm`. With several forwards in flight
    (`traced` False) no recorded order repeats, so that every forward would record and compare anew: then
    nothing is recorded, at the price of prefetching. Goes when the comparison takes the partition group.
    """
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    if not traced:
        coordinator.reset_step = coordinator._clean_inflight_param_registry
        return
    home, plain = module("runtime.zero.partitioned_param_coordinator"), coordinator.reset_step

    def reset_step() -> None:
        with replaced(home, "assert_ints_same_as_other_ranks", lambda ints: same_over(comm, ints)):
            plain()

    coordinator.reset_step = reset_step


def same_over(comm: AxisComm, ints: list[int]) -> None:
    """Raise unless every rank of `comm` has the same `ints`."""
    others = comm.gather_objects(ints)
    if any(other != others[0] for other in others):
        raise RuntimeError(f"the data ranks {comm.ranks} ran their modules in different orders: {others}")


@contextmanager
def unwound_forward(optimizer: Any, step: nn.Module) -> Iterator[None]:
    """Around code inside `step.forward` that may unwind modules by an exception and catch it.

    2026-11, 0.19.8: ZeRO-3 keeps a module-level stack of the modules whose forward is running and pops it in a hook
    that runs after a forward returns. A pipeline stage ends inside the user's model, so the hooks of the containers
    around it never run: the stack grows for ever and the wrong module is popped next. Ending those modules here is
    what the hook would have done; parameters of their own are handed to `step`, so that they are gathered again
    for its backward. Goes when the hook is registered with `always_call`.
    """
    offload = getattr(optimizer, "parameter_offload", None)
    if offload is None:
        yield
        return
    stack = module("runtime.zero.parameter_offload").FWD_MODULE_STACK
    depth = len(stack)
    try:
        yield
    finally:
        while len(stack) > depth:
            unwound = stack.pop()
            for param in unwound.parameters(recurse=False):
                module("runtime.zero.partition_parameters").register_external_parameter(step, param)
            offload.post_sub_module_forward_function(unwound)


@contextmanager
def unwound_recompute(optimizer: Any) -> Iterator[None]:
    """Around a backward: cuts the same stack back to its height.

    2026-11, 0.19.8 with torch 2.13: activation recomputation without reentrance leaves the recomputed modules by an
    exception once it has what it needs. Their parameters are released after their backward as usual.
    """
    if not hasattr(optimizer, "parameter_offload"):
        yield
        return
    stack = module("runtime.zero.parameter_offload").FWD_MODULE_STACK
    depth = len(stack)
    try:
        yield
    finally:
        del stack[depth:]


def forget_module(step: nn.Module) -> None:
    """Take `step` off the module-level stack, where the set-up of ZeRO-3 puts it for good (2026-11, 0.19.8)."""
    stack = module("runtime.zero.parameter_offload").FWD_MODULE_STACK
    stack[:] = [m for m in stack if m is not step]


def own_norm(optimizer: Any, answer: Callable[[], torch.Tensor]) -> None:
    """Have `optimizer.step` use `answer()` as its gradient norm: 0 for a good step, -1 for one to leave out.

    2026-11, 0.19.8: its norm is reduced in fp32, once per parameter group (which pipeline stages may have in different
    numbers), and counts a parameter by an attribute; any non-finite norm skips the step without a word. The
    engine computes the norm, unscales and clips before the step. Goes when there is an option for that.
    """
    if hasattr(optimizer, "scaled_global_norm"):
        optimizer.scaled_global_norm = lambda norm_type=2: answer()
    else:
        optimizer._get_norm_groups = lambda: [answer()]
