"""Slots identify parameters. This package has the update that a step applies to a slot, and the
export, save and load of a slot's state."""

from mp_optim.core.identity import (
    ParamGroups,
    Slot,
    all_params,
    group_settings,
    iter_slots,
    param_at,
    slot_name,
    stream_of,
    with_names,
)
from mp_optim.core.tensors import (
    CachedTensorList,
    all_same,
    are_plain,
    check_shape,
    current_grad,
    current_grads,
    follow,
    local_grad,
    local_tensor,
    same_memory,
)
from mp_optim.core.updates import (
    DeviceMultiplier,
    Multiplier,
    SlotUpdate,
    SlotUpdates,
    StepPlan,
    UpdateSelection,
    update_of,
)

__all__ = [
    "CachedTensorList",
    "DeviceMultiplier",
    "Multiplier",
    "ParamGroups",
    "Slot",
    "SlotUpdate",
    "SlotUpdates",
    "StepPlan",
    "UpdateSelection",
    "all_params",
    "all_same",
    "are_plain",
    "check_shape",
    "current_grad",
    "current_grads",
    "follow",
    "group_settings",
    "iter_slots",
    "local_grad",
    "local_tensor",
    "param_at",
    "same_memory",
    "slot_name",
    "stream_of",
    "update_of",
    "with_names",
]
