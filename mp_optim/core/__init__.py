"""Slots, which identify an optimizer's parameters; the updates that a step applies to slots; and
export, save and load of a slot's state."""

from mp_optim.core.identity import ParamGroups as ParamGroups
from mp_optim.core.identity import Slot as Slot
from mp_optim.core.identity import all_params as all_params
from mp_optim.core.identity import group_settings as group_settings
from mp_optim.core.identity import iter_slots as iter_slots
from mp_optim.core.identity import param_at as param_at
from mp_optim.core.identity import slot_name as slot_name
from mp_optim.core.identity import stream_of as stream_of
from mp_optim.core.identity import with_names as with_names
from mp_optim.core.tensors import CachedTensorList as CachedTensorList
from mp_optim.core.tensors import all_same as all_same
from mp_optim.core.tensors import are_plain as are_plain
from mp_optim.core.tensors import check_shape as check_shape
from mp_optim.core.tensors import current_grad as current_grad
from mp_optim.core.tensors import current_grads as current_grads
from mp_optim.core.tensors import follow as follow
from mp_optim.core.tensors import local_grad as local_grad
from mp_optim.core.tensors import local_tensor as local_tensor
from mp_optim.core.tensors import same_memory as same_memory
from mp_optim.core.updates import DeviceMultiplier as DeviceMultiplier
from mp_optim.core.updates import Multiplier as Multiplier
from mp_optim.core.updates import SlotUpdate as SlotUpdate
from mp_optim.core.updates import SlotUpdates as SlotUpdates
from mp_optim.core.updates import StepPlan as StepPlan
from mp_optim.core.updates import UpdateSelection as UpdateSelection
from mp_optim.core.updates import update_of as update_of
