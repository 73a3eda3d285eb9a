"""Foreign state into an optimizer that is there, and out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from mp_optim.checkpoint.foreign.state import MASTER, STEP, ForeignGroup, ForeignState
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots import Slot, group_settings, local_tensor, param_at
from mp_optim.slots.keyed_optimizer import OverStack, stack_of
from mp_optim.slots.loading import Loadable, restore
from mp_optim.slots.names import matched_names
from mp_optim.slots.param_attributes import main_param_of
from mp_optim.slots.state_dict import plain_groups
from mp_optim.slots.state_keys import AVERAGE

_REMAINDER = "remainder"


class NamedOptimizer(Loadable, Protocol):
    """What is needed of an optimizer."""

    def slots(self) -> list[Slot]: ...
    def full_slot_state(self, slot: Slot) -> dict[str, Any]: ...
    def named_main_params(self) -> Iterator[tuple[str, Tensor]]: ...
    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None: ...


@in_own_modes
def import_state(
    optimizer: NamedOptimizer | OverStack,
    foreign: ForeignState,
    *,
    main_from_model: bool = False,
    convert: bool = False,
) -> None:
    """Load foreign state by parameter name. Hyperparameters stay what they are configured to be.

    The model's parameters take the values of the FP32 ones that are imported, rounded. A parameter
    that was never stepped gets zeros and keeps its value. Sharded parameters take their part; every
    rank is given the whole state.

    Args:
        main_from_model: start from the model's value where there is no FP32 value for a 16-bit
            parameter.
        convert: round state to the dtypes configured here also where that loses bits.

    Raises:
        ValueError: names or shapes do not fit, or bits would be lost, listing what; nothing was
            written.
    """
    stack: NamedOptimizer = stack_of(optimizer)
    slots = {
        stack.slot_name(slot): slot for slot in stack.slots() if stack.slot_state(slot)
    }
    foreign = foreign.renamed(matched_names(foreign.names, slots).__getitem__)
    missing, unknown = (
        sorted(slots.keys() - set(foreign.names)),
        sorted(set(foreign.names) - slots.keys()),
    )
    if missing or unknown:
        raise ValueError(
            f"names do not fit this optimizer: missing {missing}, unknown {unknown}; rename with "
            "foreign.renamed(...)"
        )
    whole: dict[str, Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    groups = plain_groups(stack.param_groups)
    for name, slot in slots.items():
        param = param_at(stack.param_groups, slot)
        own = stack.slot_state(slot)
        given = _fitting(name, param, foreign.state.get(name, {}), own, main_from_model)
        if AVERAGE in own and MASTER in given:
            given.setdefault(AVERAGE, given[MASTER].to(own[AVERAGE].dtype))
        if MASTER in foreign.state.get(name, {}):
            whole[name] = given[MASTER]
        if not {MASTER, _REMAINDER} & own.keys():
            given.pop(MASTER, None)
        state[groups[slot.group]["params"][slot.position]] = given
    loaded: dict[str, Any] = {"param_groups": groups, "state": state}
    scaler = stack.grad_scaler
    if scaler is not None:
        loaded["grad_scaler"] = dict(foreign.grad_scaler or scaler.state_dict())
    restore(stack, loaded, convert=convert)
    # FP32 parameters that are stepped elsewhere have a copy outside the state
    stack.reload_model_params(whole)
    for name, value in whole.items():
        slot = slots[name]
        param = param_at(stack.param_groups, slot)
        if _REMAINDER in stack.slot_state(
            slot
        ):  # rounded as it goes with the remainder
            main = main_param_of(param)
            value = param if main is None else main
        local_tensor(param).copy_(local_tensor(value))


def _fitting(
    name: str,
    param: Tensor,
    foreign: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    main_from_model: bool,
) -> dict[str, Tensor]:
    """A parameter's foreign state in its shape and layout."""
    if not foreign:
        zeros = {
            key: torch.zeros_like(value)
            for key, value in own.items()
            if key not in (MASTER, _REMAINDER, AVERAGE) and not key.endswith("_scale")
        }
        return {**zeros, MASTER: param.detach().float()}
    given = {
        key: value if key == STEP else _like(f"{name}.{key}", param, value)
        for key, value in foreign.items()
    }
    if MASTER not in given and param.dtype != torch.float32:
        if not main_from_model:
            raise ValueError(
                f"{name} is {param.dtype}, and the state has no FP32 value of it; to start from "
                "the model's values, pass main_from_model=True"
            )
        given[MASTER] = param.detach().float()
    return given


def _like(label: str, param: Tensor, value: Tensor) -> Tensor:
    """A whole tensor in the parameter's shape and layout; a flat one is taken row by row."""
    if value.dim() == 1 and value.numel() == param.numel():
        value = value.reshape(param.shape)
    if value.shape != param.shape:
        raise ValueError(
            f"{label}: saved shape {tuple(value.shape)}, expected {tuple(param.shape)}"
        )
    if not isinstance(param, DTensor):
        return value
    mesh = param.device_mesh
    spread = DTensor.from_local(
        value.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return spread.redistribute(placements=param.placements)


@in_own_modes
def export_state(optimizer: NamedOptimizer | OverStack) -> ForeignState:
    """All state in FP32, whole (collective for sharded parameters), with the FP32 value of every
    parameter; without averages (``ema_decay``), which the others' optimizers do not keep.

    Tensors that are stored so already are the live ones: write or clone them before the next step.
    """
    stack: NamedOptimizer = stack_of(optimizer)
    mains = dict(stack.named_main_params())
    state: dict[str, dict[str, Tensor]] = {}
    for slot in stack.slots():
        name = stack.slot_name(slot)
        found = {
            key: value
            for key, value in stack.full_slot_state(slot).items()
            if key not in (_REMAINDER, AVERAGE)
        }
        state[name] = {key: _gathered(value) for key, value in found.items()}
        if (
            "exp_avg_sq" in found
        ):  # others' Adam keeps one at beta1 = 0, too, and reads nothing
            zeros = torch.zeros_like(state[name]["exp_avg_sq"])
            state[name].setdefault("exp_avg", zeros)
        if found:
            state[name][MASTER] = _gathered(mains[name])
    groups: list[ForeignGroup] = []
    for index, group in enumerate(stack.param_groups):
        positions = range(len(group["params"]))
        names = tuple(stack.slot_name(Slot(index, position)) for position in positions)
        groups.append(ForeignGroup(names, group_settings(group)))
    scaler = stack.grad_scaler
    return ForeignState(
        tuple(groups), state, None if scaler is None else scaler.state_dict()
    )


def _gathered(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()
