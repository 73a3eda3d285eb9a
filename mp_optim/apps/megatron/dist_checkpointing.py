"""Optimizer state for ``megatron.core.dist_checkpointing``, in the formats of Megatron's own
optimizers.

Two formats are written. Without a sharding type in the metadata, the format is the format of
Megatron's Float16 and FP32 optimizers: ``optimizer.state.fp32_param.<name>`` and the moments. With
a sharding type, the format is ``fully_reshardable`` of Megatron's distributed optimizer:
``optimizer.state.param.<name>``. Both formats have whole parameters, so they load in any layout,
with or without the distributed optimizer.

A third format, ``dp_reshardable``, can be read if the model is divided into the same buckets. Its
tensors have the size of the buckets of Megatron's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import (
    add_prefix_for_sharding,
    extract_sharded_tensors_and_factories,
)
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor, nn

from mp_optim.apps.megatron.torch_format import (
    REQUEST,
    SavedSettings,
    group_settings_of,
    groups_with_settings,
    whole_states,
)
from mp_optim.config.rules import moment_of
from mp_optim.core import Slot, param_at
from mp_optim.core.flat_shard import FlatShard
from mp_optim.core.slot_state import MASTER, State
from mp_optim.host.host_memory import as_tensor
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.zero.zero import DistributedOptimizer

SHARDING_TYPE = "distrib_optim_sharding_type"
"""Key in Megatron's metadata. The value names the format of a distributed optimizer's checkpoint.
"""
_NO_PREFIX = "chained_optim_avoid_prefix"
"""Key in Megatron's metadata. If the value is True, the parts of a chain have no prefix in the
names of tensors."""
_RESHARDABLE, _BUCKETS = "fully_reshardable", "dp_reshardable"
_WRITTEN_AS_RESHARDABLE = (_RESHARDABLE, _BUCKETS, "fully_sharded_model_space")
_FLOAT16_MAIN, _DISTRIBUTED_MAIN = "fp32_param", "param"
"""Keys of a main param in Megatron's Float16 optimizer and in its distributed optimizer."""
_STATE = "param_state"
"""Key of the state tensors in a part's state dict. The value has the tensors of each slot by the
slot's index."""

ModelTensor = Any
"""One parameter of the model's sharded state dict: Megatron's ``ShardedTensor``, or a
``ShardedTensorFactory`` that makes several sharded tensors."""


def _is_of_distributed(sharding_type: str | None) -> bool:
    """True if a sharding type is set, so that the format is that of Megatron's distributed
    optimizer.

    Raises:
        ValueError: the sharding type is not supported; the message names the type.
    """
    if sharding_type is not None and sharding_type not in _WRITTEN_AS_RESHARDABLE:
        raise ValueError(
            f"{SHARDING_TYPE}={sharding_type!r}: only {_RESHARDABLE!r} is supported; "
            "pass --dist-ckpt-optim-fully-reshardable"
        )
    return sharding_type is not None


@dataclass(frozen=True)
class _Part:
    """The parameters that one optimizer of Megatron's chain steps.

    Attributes:
        index: index of the part of the stack that has the parameters.
        part: the part of the stack.
        rule: rule of the parameters, if Megatron has one optimizer for each rule; else None.
        elsewhere: settings of param groups that only other ranks have.
    """

    index: int
    part: MegatronOptimizer
    rule: str | None
    elsewhere: Sequence[SavedSettings]

    def holds(self, group: Mapping[str, Any]) -> bool:
        return self.rule is None or group.get("optimizer") == self.rule

    def tensors(self, of_part: Mapping[int, Any]) -> dict[int, Any]:
        """Return the tensors of this part's parameters, by the index of their slots."""
        groups = self.part.param_groups
        slots = enumerate(self.part.slots())
        held = {index for index, slot in slots if self.holds(groups[slot.group])}
        return {index: value for index, value in of_part.items() if index in held}

    def groups(self) -> list[SavedSettings]:
        """Return the settings of this part's param groups in Megatron's format.

        Megatron's Muon has one group for all matrices, and the group does not name the rule.
        """
        live = zip(group_settings_of(self.part), self.part.param_groups, strict=True)
        here = [settings for settings, group in live if group["params"] and self.holds(group)]
        groups = [*here, *(group for group in self.elsewhere if self.holds(group))]
        if self.rule != "muon":
            return groups
        merged: list[SavedSettings] = []
        for group in groups:
            settings = {key: group[key] for key in group if key not in _NOT_IN_MEGATRONS_MUON}
            if settings not in merged:
                merged.append(settings)
        return merged


_NOT_IN_MEGATRONS_MUON = ("optimizer", "qkv_split_shapes")


def megatrons_parts(
    stack: MegatronOptimizer, elsewhere: Sequence[Sequence[SavedSettings]], *, is_distributed: bool
) -> list[_Part]:
    """Return the parts of Megatron's chain in Megatron's order.

    The chain has the first part, and each other part that has parameters on some rank. Without a
    distributed optimizer, Megatron's Muon and its scalar optimizer are separate parts. Muon's parts
    come first. For each rule, the dense part comes before the expert part.

    Args:
        stack: the stack.
        elsewhere: for each part of the stack, the param groups that only other ranks have.
        is_distributed: True for the format of the distributed optimizer.
    """
    ours = list(zip(stack.chained_optimizers, elsewhere, strict=True))
    whole = [
        _Part(index, part, None, groups)
        for index, (part, groups) in enumerate(ours)
        if index == 0 or not part.is_stub_optimizer or groups
    ]
    if is_distributed or stack.config.optimizer != "muon":
        return whole
    rules = ("muon", stack.config.muon_scalar_optimizer)
    split = [replace(part, rule=rule) for rule in rules for part in whole]
    return [part for part in split if part.groups()] or whole


# -- tensors for a save


def sharded_state_dict(
    stack: MegatronOptimizer,
    model_sharded_state_dict: Any,
    elsewhere: Sequence[Sequence[SavedSettings]],
    metadata: dict[str, Any],
    sharding_type: str | None,
) -> dict[Any, Any]:
    """Return the argument of ``dist_checkpointing.save``. The call is collective if a part is
    distributed.

    Args:
        stack: the stack to save.
        model_sharded_state_dict: sharded state dict of the model's parameters.
        elsewhere: for each part, the groups that only other ranks have.
        metadata: Megatron's metadata. If it has a sharding type, the type is set to the written
            format.
        sharding_type: replaces the type in the metadata; None for the metadata's type.

    Raises:
        ValueError: a parameter is not in the model's state dict, its state has another shape, or
            parameters have different numbers of steps; the message names the parameter.
        BrokenOffError: the last step or load was interrupted.
    """
    stack.step_mark.check("sharded_state_dict")
    is_distributed = _is_of_distributed(sharding_type or metadata.get(SHARDING_TYPE))
    stack.init_state()
    if SHARDING_TYPE in metadata:
        metadata[SHARDING_TYPE] = _RESHARDABLE
    step: float | None = None
    first = ""
    for slot in stack.slots():
        state = stack.slot_state(slot)
        if "step" not in state:
            continue
        if step is None:
            first, step = stack.slot_name(slot), float(state["step"])
        if (count := float(state["step"])) != step:
            raise ValueError(
                f"{first} was stepped {step:g} times and {stack.slot_name(slot)} {count:g} times, "
                "but Megatron's checkpoint format has one number of steps for all parameters; "
                "save with --ckpt-format torch, or with mp_optim.checkpoint.save(root, model, "
                "optimizer)"
            )
    parts = megatrons_parts(stack, elsewhere, is_distributed=is_distributed)
    tensors: dict[int, dict[int, dict[str, ModelTensor]]] = {}
    for index in sorted({part.index for part in parts}):
        ours = stack.chained_optimizers[index]
        states = _saved_states(ours, is_distributed)
        tensors[index] = dict(_placed(ours, model_sharded_state_dict, states, is_distributed))
    saved: dict[Any, Any] = {}
    for number, part in enumerate(parts):
        counted = None if part.rule == "muon" and len(parts) > 1 else step
        saved[number] = _saved_part(part, tensors[part.index], is_distributed, counted)
        if len(parts) > 1 and not metadata.get(_NO_PREFIX):
            add_prefix_for_sharding(saved[number], f"chained_{number}.")
    return saved if len(saved) > 1 else next(iter(saved.values()))


def _saved_part(
    of_megatron: _Part,
    tensors: Mapping[int, dict[str, ModelTensor]],
    is_distributed: bool,
    step: float | None,
) -> dict[str, Any]:
    """Return one part of a chain in the format of Megatron's optimizer for that part.

    Args:
        of_megatron: the part.
        tensors: state tensors, by the index of their slots.
        is_distributed: True for the format of the distributed optimizer.
        step: number of steps of every slot; None for a rule that counts no steps.
    """
    part = of_megatron.part
    stepped = {} if step is None else {"step": int(step)}
    inner: dict[str, Any] = {
        "param_groups": [{**group, **stepped} for group in of_megatron.groups()]
    }
    if not is_distributed:
        inner["state"] = {} if step is None else {"common_step": as_tensor(step)}
    is_float16 = part.config.fp16 or part.config.bf16
    saved: dict[str, Any] = {"optimizer": inner} if is_float16 or is_distributed else inner
    if own := of_megatron.tensors(tensors):
        saved[_STATE] = own
    if part.grad_scaler is not None:
        saved["grad_scaler"] = part.grad_scaler.state_dict()
    if is_distributed:
        saved["param_state_sharding_type"] = _RESHARDABLE
    return saved


def _saved_states(
    part: MegatronOptimizer, is_distributed: bool
) -> Iterator[tuple[Slot, State, bool]]:
    """Yield the states of :func:`whole_states` without steps.

    In the format of Megatron's distributed optimizer, FP32 parameters also have a main param.
    """
    for slot, whole, only_here in whole_states(part):
        state = {key: value for key, value in whole.items() if key != "step"}
        param = param_at(part.param_groups, slot)
        if is_distributed and param.dtype == torch.float32 and MASTER not in state:
            state = {**state, MASTER: param.detach().clone()} if state or not only_here else {}
        yield slot, state, only_here


# -- tensors with the offsets of the model's tensors


def _model_tensors(model_sharded_state_dict: Any, part: MegatronOptimizer) -> list[ModelTensor]:
    """Return the model's sharded tensor of each parameter of a part.

    A sharded tensor has this rank's position in the whole model, for any parallelism.

    Raises:
        ValueError: a parameter has no sharded tensor; the message names the parameter.
    """
    if not part.slots():
        return []
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    by_id: dict[int, ModelTensor] = {id(entry.data): entry for entry in nested_values(sharded)}
    found: list[ModelTensor] = []
    for slot in part.slots():
        key = id(to_local_if_dtensor(param_at(part.param_groups, slot)))
        if key not in by_id:
            raise ValueError(
                f"{part.slot_name(slot)} is not in the model's sharded state dict; pass "
                "model.sharded_state_dict() unchanged, with the parameters themselves as tensors "
                "(keep_vars=True)"
            )
        found.append(by_id[key])
    return found


def _placed(
    part: MegatronOptimizer,
    model_sharded_state_dict: Any,
    states: Iterable[tuple[Slot, State, bool]],
    is_distributed: bool,
) -> Iterator[tuple[int, dict[str, ModelTensor]]]:
    """Yield the index of each slot, and the slot's state as sharded tensors with the offsets of the
    model's tensors.

    Args:
        part: the part.
        model_sharded_state_dict: sharded state dict of the model's parameters.
        states: for every slot, tensors of the local parameter's shape, and True if this rank must
            save them because no other data-parallel rank does.
        is_distributed: True for the format of the distributed optimizer.

    Raises:
        ValueError: a parameter has no sharded tensor, or its state has another shape; the message
            names the parameter.
    """
    # Raise for a missing parameter before ``states`` begins to gather.
    of_model = _model_tensors(model_sharded_state_dict, part)
    pairs = zip(states, of_model, strict=True)
    for index, ((slot, state, only_here), of_param) in enumerate(pairs):
        tensors = {}
        # Megatron's layer-wise optimizer has the keys of its Float16 optimizer for main params of
        # Muon's matrices, and the keys of its distributed optimizer for all other main params.
        is_float16 = param_at(part.param_groups, slot).dtype != torch.float32
        is_muons = is_float16 and part.param_groups[slot.group].get("optimizer") == "muon"
        main_key = _DISTRIBUTED_MAIN if is_distributed and not is_muons else _FLOAT16_MAIN
        for key, value in state.items():
            if not moment_of(key).elementwise:
                raise ValueError(
                    f"{part.slot_name(slot)}.{key} does not have the parameter's shape, and "
                    "Megatron's checkpoint format does not support such state; save with "
                    "--ckpt-format torch, or with mp_optim.checkpoint.save(root, model, "
                    "optimizer)"
                )
            called = main_key if key == MASTER else key
            prefix = f"optimizer.state.{called}"
            sharded = make_sharded_optimizer_tensor(of_param, value, prefix=prefix)
            if only_here:
                # The last number of a replica id is the data-parallel rank. Megatron saves only
                # tensors with rank 0, so this rank's tensor gets a 0.
                place = sharded.replica_id
                first = (*place[:-1], 0) if isinstance(place, tuple) else 0
                sharded = replace(sharded, replica_id=first)
            tensors[called] = sharded
        if tensors:
            yield index, tensors


# -- tensors for a load


def requested_state_dict(
    stack: MegatronOptimizer,
    model_sharded_state_dict: Any,
    elsewhere: Sequence[Sequence[SavedSettings]],
    metadata: Mapping[str, Any],
    sharding_type: str | None,
    chunks: Sequence[nn.Module],
) -> dict[Any, Any]:
    """Return new host tensors for ``dist_checkpointing.load`` to fill. After a load, the stack
    checks all tensors before it copies any.

    Raises:
        ValueError: a parameter is not in the model's state dict, or the format of the checkpoint is
            not supported; the message names it.
    """
    stack.init_state()
    kind = sharding_type or metadata.get(SHARDING_TYPE)
    is_distributed, in_buckets = _is_of_distributed(kind), kind == _BUCKETS
    parts = megatrons_parts(stack, elsewhere, is_distributed=is_distributed)
    tensors: dict[int, dict[str, Any]] = {}
    request = LocalNonpersistentObject({"in_buckets": in_buckets})
    asked: dict[Any, Any] = {_STATE: tensors, REQUEST: request}
    placed: dict[int, dict[int, dict[str, ModelTensor]]] = {}
    firsts = [0, *accumulate(len(part.slots()) for part in stack.chained_optimizers)]
    for number, of_megatron in enumerate(parts):
        part, index = of_megatron.part, of_megatron.index
        prefix = f"chained_{number}." if len(parts) > 1 else ""
        if in_buckets:
            asked[number], of_part = _requested_buckets(part, chunks, prefix)
        else:
            if index not in placed:
                rooms = ((slot, _empty(part, slot), False) for slot in part.slots())
                every = _placed(part, model_sharded_state_dict, rooms, is_distributed)
                placed[index] = dict(every)
            of_part = of_megatron.tensors(placed[index])
            if prefix and not metadata.get(_NO_PREFIX):
                add_prefix_for_sharding(of_part, prefix)
        tensors.update({firsts[index] + slot: of_part[slot] for slot in of_part})
    return asked


def _empty(part: MegatronOptimizer, slot: Slot) -> State:
    """Return new host tensors for loaded state: FP32 values of the model's parameter, and zero
    moments.

    The checkpoint may lack elements, such as a vocabulary's padding. Such elements keep these
    values.
    """
    param = param_at(part.param_groups, slot)
    state: State = {}
    for key in part.full_slot_state(slot):
        if key == MASTER:
            state[key] = param.detach().to("cpu", torch.float32, copy=True)
        elif key != "step":
            state[key] = torch.zeros(param.shape, dtype=torch.float32, device="cpu")
    return state


# -- buckets


def _requested_buckets(
    part: MegatronOptimizer, chunks: Sequence[nn.Module], prefix: str
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the tensors to load for a part whose checkpoint has the format ``dp_reshardable``: the
    part's settings, and tensors by the index of their slots.

    Raises:
        ValueError: the model has no buckets, the rule is Muon, or a parameter is in no bucket.
    """
    if part.config.optimizer == "muon":
        raise ValueError(
            f"the checkpoint has Megatron's {_BUCKETS!r}, which is not supported with "
            "optimizer='muon'; save the checkpoint again with --dist-ckpt-optim-fully-reshardable"
        )
    if not isinstance(part, DistributedOptimizer) or not chunks:
        raise ValueError(
            f"the checkpoint has Megatron's {_BUCKETS!r}, which needs "
            "use_distributed_optimizer=True and the same model in Megatron's "
            "DistributedDataParallel; to load the checkpoint in another layout, save it again "
            "with --dist-ckpt-optim-fully-reshardable"
        )
    ranks, dp = part.process_groups.grad_stats, part.process_groups.dp
    # The constructor of a distributed optimizer requires a data-parallel group.
    assert dp is not None
    domain = f"optimizer.distributed.dp_group_idx_{0 if ranks is None else ranks.rank()}"
    is_expert = any(group.get("is_expert_parallel") for group in part.param_groups)
    places = dict(_places(chunks, domain, expert=is_expert))
    tensors: dict[int, dict[str, Any]] = {}
    for number, slot in enumerate(part.slots()):
        param = param_at(part.param_groups, slot)
        if id(param) not in places:
            raise ValueError(
                f"{part.slot_name(slot)} is in no buffer of the model's DistributedDataParallel; "
                "wrap the module that has this parameter"
            )
        tensors[number] = dict(_bucket_tensors(part, slot, places[id(param)]))
    keys = ["optimizer", *(["grad_scaler"] if part.grad_scaler is not None else [])]
    copy = (0, 0, dp.rank())
    settings = {
        key: ShardedObject(f"{domain}.{key}", None, (1,), (0,), replica_id=copy) for key in keys
    }
    if prefix:
        add_prefix_for_sharding(settings, prefix)
        add_prefix_for_sharding(tensors, prefix)
    return settings, tensors


def _places(
    chunks: Sequence[Any], domain: str, *, expert: bool
) -> Iterator[tuple[int, tuple[str, int, int]]]:
    """Yield the id of each parameter, and the parameter's position in Megatron's buffers.

    A position has three values: the key of the bucket's tensors, the length of these tensors
    without padding at the end, and the parameter's first element in the bucket.
    """
    attribute = "expert_parallel_buffers" if expert else "buffers"
    buffers = chain.from_iterable(getattr(chunk, attribute) for chunk in chunks)
    for number, buffer in enumerate(buffers):
        dtypes = buffer.param_dtype, buffer.grad_dtype
        for param, (start, _, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            key = f"{domain}.gbuf_idx_{number}.dtype_{dtypes}.bucket_idx_{bucket_id}"
            yield (id(param), (key, bucket.numel_unpadded, start - bucket.offset))


def _bucket_tensors(
    part: MegatronOptimizer, slot: Slot, place: tuple[str, int, int]
) -> Iterator[tuple[str, Any]]:
    """Yield one tensor for each state key, with the elements of this rank. A rank without elements
    yields no tensor.

    Args:
        place: position from :func:`_places`.
    """
    bucket, length, first = place
    for key, value in part.full_slot_state(slot).items():
        if key == "step":
            continue
        start, count = 0, value.numel()
        if isinstance(value, FlatShard):
            start, count = value.start, value.local.numel()
        if count:
            called = _DISTRIBUTED_MAIN if key == MASTER else key
            data = torch.zeros(count, dtype=torch.float32, device="cpu")
            yield (
                called,
                ShardedTensor(
                    f"{bucket}.{called}",
                    data,
                    data.dtype,
                    tuple(data.shape),
                    (length,),
                    (first + start,),
                    axis_fragmentations=None,
                    replica_id=(0, 0, 0),
                ),
            )


# -- results of a load


def plain_state_dict(stack: MegatronOptimizer, loaded: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert the result of ``dist_checkpointing.load`` into a state dict for the stack's
    ``load_state_dict``, which checks the whole dict before it writes any state.

    Raises:
        ValueError: the saved param groups do not match the stack's groups.
    """
    numbered = sorted(key for key in loaded if isinstance(key, int))
    parts: list[Mapping[str, Any]] = [loaded[key] for key in numbered] or [loaded]
    # The state dict of an FP32 optimizer has its param groups at the top level.
    inner: list[Mapping[str, Any]] = [part.get("optimizer", part) for part in parts]
    groups = [group for part in inner for group in part.get("param_groups", ())]
    # Megatron stores the number of steps under ``common_step`` or in the param groups. A rule that
    # counts no steps gets 1.
    common = [part.get("state", {}).get("common_step") for part in inner]
    counts = [count for count in common if count is not None][:1]
    counts = counts or [group["step"] for group in groups if group.get("step") is not None]
    step = float(max(counts, default=1))
    state: dict[int, State] = {}
    for index, slot in enumerate(stack.slots()):
        if "step" not in stack.slot_state(slot):
            continue  # This parameter was never trained, so the checkpoint has no state for it.
        tensors = dict(loaded.get(_STATE, {}).get(index, {}))
        for main in {_FLOAT16_MAIN, _DISTRIBUTED_MAIN} & tensors.keys():
            tensors[MASTER] = tensors.pop(main)
        if loaded[REQUEST]["in_buckets"]:
            live = stack.full_slot_state(slot)
            keys = [key for key in live if key != "step"]
            tensors = {key: _as_shard(live[key], tensors.get(key)) for key in keys}
        state[index] = {"step": as_tensor(step), **tensors}
    plain = {"state": state, "param_groups": groups_with_settings(stack, groups)}
    scalers = [part["grad_scaler"] for part in parts if part.get("grad_scaler")]
    return {**plain, "grad_scaler": scalers[0]} if scalers else plain


def _as_shard(live: Any, elements: Tensor | None) -> Any:
    """Return loaded elements in the form of the stack's own tensor: a shard of a parameter, or a
    whole tensor.

    Args:
        live: the stack's own tensor.
        elements: flat tensor; None if this rank has no elements.
    """
    local = live.local if isinstance(live, FlatShard) else live
    value = local.detach().float() if elements is None else elements.to(local.device)
    if isinstance(live, FlatShard):
        return FlatShard(value.reshape(-1), live.shape, live.start)
    return value.view(live.shape)
