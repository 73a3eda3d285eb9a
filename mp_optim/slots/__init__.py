"""Slots: who a parameter is, what a step does to it, and how its state is shown, saved and
loaded."""

from mp_optim.slots.identity import (
    ParamGroups,
    Slot,
    group_settings,
    iter_slots,
    param_at,
    slot_name,
    stream_of,
    with_names,
)
from mp_optim.slots.param_attributes import current_grad, have_grad_only
from mp_optim.slots.state_view import SlotStateView
from mp_optim.slots.tensors import (
    CachedTensorList,
    all_same,
    are_plain,
    follow,
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
    "SlotStateView",
    "SlotUpdate",
    "SlotUpdates",
    "UpdateSelection",
    "all_same",
    "are_plain",
    "current_grad",
    "follow",
    "group_settings",
    "have_grad_only",
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
