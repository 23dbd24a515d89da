"""Making an ordinary module again of one that `fully_shard` has taken over; torch has no such call.

It is: the removal of hooks, classes and marks. It is not: a gathering of weights (`fsdp_shards.py`).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule

MARKS = (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""What torch writes into the `__dict__` of modules."""


def forget(unit: nn.Module, state: Any) -> None:
    """Undo `fully_shard(unit)`, whose state is `state`; parameters stay as they are."""
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in state._fsdp_param_groups:
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [record._post_load_hook_handle for record in group.fsdp_params]
    for handle in handles:
        handle.remove()
    assert isinstance(unit, FSDPModule)
    unit.__class__ = type(unit).__mro__[unit._orig_cls_mro_index]
    _composable_state._module_state_mapping.pop(unit, None)
    for module in unit.modules():
        for mark in MARKS:
            vars(module).pop(mark, None)
