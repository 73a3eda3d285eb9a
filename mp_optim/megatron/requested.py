"""What is asked of ``megatron.core.dist_checkpointing``, in the form that a checkpoint has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor, nn

from mp_optim.megatron.bucket_space import BUCKETS, requested_part
from mp_optim.megatron.model_tensors import ModelTensor, model_tensors, state_tensor
from mp_optim.megatron.saved_groups import Settings
from mp_optim.megatron.sharded import STATE, Form, checked, kept_parts
from mp_optim.megatron.whole_params import name_of
from mp_optim.precision import MegatronOptimizer
from mp_optim.slots import Slot
from mp_optim.slots.slot_state import State
from mp_optim.slots.state_keys import MASTER

REQUEST = "mp_optim_request"
"""Key of what says how a request was made; dist_checkpointing gives it back with what it loads."""


def requested_state_dict(
    stack: MegatronOptimizer,
    model_sharded_state_dict: Any,
    elsewhere: Sequence[Sequence[Settings]],
    metadata: Mapping[str, Any],
    sharding_type: str | None,
    chunks: Sequence[nn.Module],
) -> dict[Any, Any]:
    """What ``dist_checkpointing.load`` fills. The tensors are new ones, on the host: the stack
    takes them over when all have been checked.

    Raises:
        ValueError: a parameter is not in the model's state dict, or the checkpoint has a form that
            is not read here; naming it.
    """
    kept = kept_parts(stack, elsewhere)
    stack.init_state()
    if sharding_type == BUCKETS:
        return _in_buckets(stack, kept, chunks)
    form = Form.of(sharding_type, metadata)
    tensors: dict[int, dict[str, ModelTensor]] = {}
    first = 0
    for index, part in enumerate(stack.chained_optimizers):
        if index in kept:
            asked = dict(
                _requested_tensors(part, model_sharded_state_dict, form, first)
            )
            if len(kept) > 1 and not form.avoids_prefix:
                add_prefix_for_sharding(asked, f"chained_{index}.")
            tensors.update(asked)
        first += len(part.slots())
    return {STATE: tensors, **_request(in_buckets=False)}


def _in_buckets(
    stack: MegatronOptimizer, kept: Sequence[int], chunks: Sequence[nn.Module]
) -> dict[Any, Any]:
    tensors: dict[int, dict[str, Any]] = {}
    asked: dict[Any, Any] = {STATE: tensors, **_request(in_buckets=True)}
    first = 0
    for index, part in enumerate(stack.chained_optimizers):
        if index in kept:
            asked[index], of_part = requested_part(part, chunks, index, len(kept) > 1)
            tensors.update({first + number: of_part[number] for number in of_part})
        first += len(part.slots())
    return asked


def _request(*, in_buckets: bool) -> dict[str, Any]:
    return {REQUEST: LocalNonpersistentObject({"in_buckets": in_buckets})}


def _requested_tensors(
    part: MegatronOptimizer, model_sharded_state_dict: Any, form: Form, first: int
) -> Iterator[tuple[int, dict[str, ModelTensor]]]:
    slots = part.slots()
    of_model = model_tensors(
        model_sharded_state_dict, [name_of(part, slot) for slot in slots]
    )
    for index, (slot, model_tensor) in enumerate(
        zip(slots, of_model, strict=True), first
    ):
        state = checked(part, slot, _keys(part, slot))
        tensors = {}
        for key in state:
            called = form.key(part, slot, key)
            tensors[called] = state_tensor(
                model_tensor, called, _empty(part, slot, key)
            )
        if tensors:
            yield index, tensors


def _keys(part: MegatronOptimizer, slot: Slot) -> State:
    state = part.full_slot_state(slot)
    return {key: value for key, value in state.items() if key != "step"}


def _empty(part: MegatronOptimizer, slot: Slot, key: str) -> Tensor:
    """Room for what is loaded. What a checkpoint has no elements for (vocabulary that is padded
    otherwise) keeps the model's values, and moments of zero."""
    _, param = name_of(part, slot)
    if key == MASTER:
        return param.detach().to("cpu", torch.float32, copy=True)
    return torch.zeros(param.shape, dtype=torch.float32, device="cpu")
