"""Optimizer state for ``megatron.core.dist_checkpointing``, as Megatron's own optimizers write it.

There are two forms. Without a sharding type in the metadata: that of Megatron's Float16 and FP32
optimizers, ``optimizer.state.fp32_param.<name>`` beside the moments. With one: that of its
distributed optimizer's ``fully_reshardable``, ``optimizer.state.param.<name>``. Either has whole
parameters, so it is loaded in any layout, and with the distributed optimizer on or off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor

from mp_optim.config.rules import is_elementwise
from mp_optim.megatron.model_tensors import ModelTensor, model_tensors, state_tensor
from mp_optim.megatron.saved_groups import Settings, group_settings_of
from mp_optim.megatron.whole_params import WholeState, name_of, whole_states
from mp_optim.precision import MegatronOptimizer
from mp_optim.slots import Slot
from mp_optim.slots.slot_state import State
from mp_optim.slots.state_keys import MASTER

SHARDING_TYPE = "distrib_optim_sharding_type"
"""In Megatron's metadata: in which form its distributed optimizer writes, or wrote."""
RESHARDABLE = "fully_reshardable"
_WRITTEN_AS_RESHARDABLE = (RESHARDABLE, "dp_reshardable", "fully_sharded_model_space")
_FLOAT16_MAIN, _DISTRIBUTED_MAIN = "fp32_param", "param"
MAINS = {_FLOAT16_MAIN, _DISTRIBUTED_MAIN}
"""What Megatron's Float16 optimizer calls a main param, and its distributed one."""
STATE = "param_state"
"""Key of the tensors, by running index."""


@dataclass(frozen=True)
class Form:
    """What a checkpoint's form calls things.

    Attributes:
        main: key of main params. is_distributed: Megatron's distributed optimizer reads it.
        avoids_prefix: parts of a chain are told apart by their parameters' names alone.
    """

    main: str
    is_distributed: bool
    avoids_prefix: bool

    @classmethod
    def of(cls, sharding_type: str | None, metadata: Mapping[str, Any]) -> Form:
        """The form that a sharding type and metadata ask for.

        Raises:
            ValueError: there is no such type here, naming it.
        """
        avoids = bool(metadata.get("chained_optim_avoid_prefix", False))
        if sharding_type is None:
            return cls(_FLOAT16_MAIN, False, avoids)
        if sharding_type not in _WRITTEN_AS_RESHARDABLE:
            raise ValueError(
                f"{SHARDING_TYPE}={sharding_type!r}: state is saved and loaded as "
                f"{RESHARDABLE!r} (--dist-ckpt-optim-fully-reshardable)"
            )
        return cls(_DISTRIBUTED_MAIN, True, avoids)

    def key(self, part: MegatronOptimizer, slot: Slot, key: str) -> str:
        """What a state tensor is called. Megatron's layer-wise optimizer calls main params of
        Muon's matrices as its Float16 optimizer does, beside a distributed one of the rest."""
        if key != MASTER:
            return key
        is_float16 = name_of(part, slot)[1].dtype != torch.float32
        is_muons = part.param_groups[slot.group].get("optimizer") == "muon"
        return _FLOAT16_MAIN if is_muons and is_float16 else self.main


def sharded_state_dict(
    stack: MegatronOptimizer,
    model_sharded_state_dict: Any,
    elsewhere: Sequence[Sequence[Settings]],
    metadata: dict[str, Any],
    sharding_type: str | None,
) -> dict[Any, Any]:
    """What ``dist_checkpointing.save`` takes. Collective if some part is distributed.

    Args:
        elsewhere: for each part, the groups that only other ranks have.
        metadata: the sharding type in it becomes that which is written.

    Raises:
        ValueError: a parameter is not in the model's state dict, its state has not the parameter's
            shape, or parameters were stepped a different number of times; naming it.
        BrokenOffError: the last step or load was broken off half-way.
    """
    stack.step_mark.check("sharded_state_dict")
    form = Form.of(sharding_type, metadata)
    stack.init_state()
    if SHARDING_TYPE in metadata:
        metadata[SHARDING_TYPE] = RESHARDABLE
    step = common_step(stack)
    kept = kept_parts(stack, elsewhere)
    saved: dict[Any, Any] = {}
    for index in kept:
        part = stack.chained_optimizers[index]
        saved[index] = _saved_part(
            part, model_sharded_state_dict, elsewhere[index], form, step
        )
        if len(kept) > 1 and not form.avoids_prefix:
            add_prefix_for_sharding(saved[index], f"chained_{index}.")
    return saved if len(saved) > 1 else next(iter(saved.values()))


def kept_parts(
    stack: MegatronOptimizer, elsewhere: Sequence[Sequence[Settings]]
) -> list[int]:
    """Which parts Megatron has too: the first, and those with parameters on some rank."""
    return [
        index
        for index, part in enumerate(stack.chained_optimizers)
        if index == 0 or not part.is_stub_optimizer or elsewhere[index]
    ]


def common_step(stack: MegatronOptimizer) -> float | None:
    """How often every slot was stepped; None without any that is stepped.

    Raises:
        ValueError: not all as often, naming two.
    """
    first: tuple[str, float] | None = None
    for slot in stack.slots():
        state = stack.slot_state(slot)
        if "step" not in state:
            continue
        step = float(state["step"])
        first = first or (stack.slot_name(slot), step)
        if step != first[1]:
            raise ValueError(
                f"{first[0]} was stepped {first[1]:g} times, {stack.slot_name(slot)} {step:g}: "
                "Megatron's form has one number for all; save with --ckpt-format torch, or with "
                "mp_optim.checkpoint.save(root, model, optimizer)"
            )
    return None if first is None else first[1]


def _saved_part(
    part: MegatronOptimizer,
    model_sharded_state_dict: Any,
    elsewhere: Sequence[Settings],
    form: Form,
    step: float | None,
) -> dict[str, Any]:
    groups = [*filter(None, _groups_with_parameters(part)), *elsewhere]
    stepped = {} if step is None else {"step": int(step)}
    inner: dict[str, Any] = {"param_groups": [{**group, **stepped} for group in groups]}
    if not form.is_distributed:
        inner["state"] = {} if step is None else {"common_step": _counted(step)}
    tensors = dict(_saved_tensors(part, model_sharded_state_dict, form))
    is_float16 = part.config.fp16 or part.config.bf16
    saved: dict[str, Any] = inner
    if is_float16 or form.is_distributed:
        saved = {"optimizer": inner}
    if tensors:
        saved[STATE] = tensors
    if part.grad_scaler is not None:
        saved["grad_scaler"] = part.grad_scaler.state_dict()
    if form.is_distributed:
        saved["param_state_sharding_type"] = RESHARDABLE
    return saved


def _counted(step: float) -> Tensor:
    return torch.tensor(step, dtype=torch.float32, device="cpu")


def _groups_with_parameters(part: MegatronOptimizer) -> Iterator[Settings]:
    for settings, group in zip(group_settings_of(part), part.param_groups, strict=True):
        if group["params"]:
            yield settings


def _saved_tensors(
    part: MegatronOptimizer, model_sharded_state_dict: Any, form: Form
) -> Iterator[tuple[int, dict[str, ModelTensor]]]:
    slots = part.slots()
    of_model = model_tensors(
        model_sharded_state_dict, [name_of(part, slot) for slot in slots]
    )
    pairs = zip(whole_states(part), of_model, strict=True)
    for index, (whole, model_tensor) in enumerate(pairs):
        state = checked(part, whole.slot, _with_main(part, whole, form))
        tensors = {}
        for key, value in state.items():
            called = form.key(part, whole.slot, key)
            tensors[called] = state_tensor(
                model_tensor, called, value, only_here=whole.only_here
            )
        if tensors:
            yield index, tensors


def _with_main(part: MegatronOptimizer, whole: WholeState, form: Form) -> State:
    """A slot's tensors; Megatron's distributed optimizer has a main param of FP32 parameters
    too."""
    state = {key: value for key, value in whole.state.items() if key != "step"}
    _, param = name_of(part, whole.slot)
    if form.is_distributed and param.dtype == torch.float32 and MASTER not in state:
        state[MASTER] = param.detach().clone()
        return state if state.keys() != {MASTER} or not whole.only_here else {}
    return state


def checked(part: MegatronOptimizer, slot: Slot, state: State) -> State:
    for key in state:
        if not is_elementwise(key):
            raise ValueError(
                f"{part.slot_name(slot)}.{key} has not the shape of the parameter, and Megatron's "
                "form has no place for such state; save with --ckpt-format torch, or with "
                "mp_optim.checkpoint.save(root, model, optimizer)"
            )
    return state
