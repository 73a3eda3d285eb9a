"""Slots: who a parameter is, what a step does to it, and how its state is shown, saved and
loaded."""

from mp_optim.slots.identity import (
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
from mp_optim.slots.param_attributes import current_grad, current_grads, have_grad_only
from mp_optim.slots.tensors import (
    CachedTensorList,
    all_same,
    are_plain,
    check_shape,
    follow,
    held_tensor,
    local_grad,
    local_tensor,
    same_memory,
)
from mp_optim.slots.updates import (
    DeviceMultiplier,
    Multiplier,
    SlotUpdate,
    SlotUpdates,
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
    "UpdateSelection",
    "all_params",
    "all_same",
    "are_plain",
    "check_shape",
    "current_grad",
    "current_grads",
    "follow",
    "group_settings",
    "have_grad_only",
    "held_tensor",
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
