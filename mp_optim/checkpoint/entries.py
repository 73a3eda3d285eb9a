"""What a checkpoint consists of: tensors under their names, and which of them a model and an
optimizer need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mp_optim.checkpoint.garbage import uncollected
from mp_optim.checkpoint.index import Saved
from mp_optim.checkpoint.partitioned import (
    PartitionShard,
    PartitionState,
    as_partition,
)
from mp_optim.slots import Slot, param_at
from mp_optim.slots.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.slots.model_parallel import ModelParallel
from mp_optim.slots.names import canonical_names, prefixed
from mp_optim.slots.partition import Partition
from mp_optim.slots.slot_state import State
from mp_optim.slots.state_dict import with_params
from mp_optim.slots.state_keys import AVERAGE, scale_key

MODEL = "model."
"""What the names of the model's tensors begin with; the FQN follows."""

STATE = "optimizer.state."
"""What the names of optimizer state begin with; the state's key, a dot and the parameter's FQN
follow."""

_SHOWN = 40

Models = nn.Module | Sequence[nn.Module]


def entry_name(key: str, name: str) -> str:
    """Name of a parameter's state under a key."""
    return f"{STATE}{key}.{name}"


def key_and_fqn(entry: str) -> tuple[str, str]:
    """What :func:`entry_name` made a name of."""
    key, _, fqn = entry.removeprefix(STATE).partition(".")
    return key, fqn


# -- the model ------------------------------------------------------------------------------------


def chunks_of(models: Models) -> list[tuple[str, nn.Module]]:
    return prefixed([models] if isinstance(models, nn.Module) else list(models))


def _canonical(
    models: Models, read: Callable[[nn.Module], Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """What is read from each chunk, under canonical names."""
    for prefix, chunk in chunks_of(models):
        own = read(chunk)
        for name, short in canonical_names(chunk, own).items():
            yield prefix + short, own[name]


def _state(models: Models) -> Iterator[tuple[str, Any]]:
    return _canonical(models, lambda chunk: chunk.state_dict())


def params_of(models: Models, parallel: ModelParallel) -> dict[str, Tensor]:
    """What this rank has of the parameters, under the names they have in a checkpoint; of one that
    is cut, which part this is comes after the name."""
    params = {}
    for name, param in _canonical(models, lambda chunk: dict(chunk.named_parameters())):
        label, part = MODEL + parallel.names[name], parallel.partitions.get(name)
        if part is not None:
            label += f" (part {part.rank} of {part.size})"
        params[label] = param
    return params


def param_entries(models: Models, parallel: ModelParallel) -> set[str]:
    """Entries that are parameters, and not buffers, which modules write in forward."""

    def named(chunk: nn.Module) -> Mapping[str, Any]:
        return dict(chunk.named_parameters(remove_duplicate=False))

    return {MODEL + parallel.names[name] for name, _ in _canonical(models, named)}


def plain_of(models: Models, parallel: ModelParallel) -> dict[str, Any]:
    """What a model's state dict holds beside tensors (``get_extra_state``), by name."""
    return {
        parallel.names[name]: value
        for name, value in _state(models)
        if not isinstance(value, Tensor)
    }


def load_model(
    models: Models,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    parallel: ModelParallel,
) -> None:
    """Give a model what :func:`entries_of` and :func:`plain_of` took from it."""
    state: dict[str, Any] = dict(plain)
    for name, value in tensors.items():
        if name.startswith(MODEL):
            own = value.local if isinstance(value, PartitionShard) else value
            state[name.removeprefix(MODEL)] = own
    for prefix, chunk in chunks_of(models):
        given = {}
        for name, short in canonical_names(chunk, chunk.state_dict()).items():
            whole = parallel.names[prefix + short]
            if whole in state:
                given[name] = state[whole]
        chunk.load_state_dict(given, strict=False)


# -- everything -----------------------------------------------------------------------------------


@uncollected()
def entries_of(
    models: Models,
    optimizer: SlotKeyedOptimizer | None,
    parallel: ModelParallel,
    *,
    full_precision: bool = False,
    left_out: Collection[str] = (),
) -> dict[str, Tensor]:
    """Every tensor under its name. The tensors are the live ones where that is possible.

    Args:
        left_out: parameters, by their names here.
    """
    entries: dict[str, Tensor] = {}
    for name, value in _state(models):
        if isinstance(value, Tensor) and name not in left_out:
            part = as_partition(value, parallel.partitions.get(name))
            entries[MODEL + parallel.names[name]] = part
    if optimizer is None:
        return entries
    for slot in optimizer.slots():
        name = optimizer.slot_name(slot)
        if name not in left_out:
            partition = parallel.partitions.get(name)
            for key, value in _slot_state(
                optimizer, slot, partition, full_precision
            ).items():
                entries[entry_name(key, parallel.names[name])] = value
    return entries


def _slot_state(
    optimizer: SlotKeyedOptimizer,
    slot: Slot,
    partition: Partition | None,
    full_precision: bool,
) -> State:
    read = optimizer.full_slot_state if full_precision else optimizer.slot_state
    if partition is None:
        return read(slot)
    optimizer.make_current(slot)
    shape = param_at(optimizer.param_groups, slot).shape
    parts = PartitionState(optimizer.state_of(slot), partition, shape)
    return parts.full_precision() if full_precision else parts.tensors()


def unallocated(
    optimizer: SlotKeyedOptimizer | None,
    parallel: ModelParallel,
    saved: Mapping[str, Saved],
    present: Collection[str],
) -> dict[str, Tensor]:
    """New tensors for saved state of optimizers that allocate theirs when they step first, and of
    parameters that are frozen here."""
    if optimizer is None:
        return {}
    slots = [slot for slot in optimizer.slots() if optimizer.state_of(slot).takes_any()]
    slot_of = {parallel.names[optimizer.slot_name(slot)]: slot for slot in slots}
    new: dict[str, Tensor] = {}
    for name, entry in saved.items():
        slot = slot_of.get(key_and_fqn(name)[1])
        if slot is not None and name.startswith(STATE) and name not in present:
            partition = parallel.partitions.get(optimizer.slot_name(slot))
            param = param_at(optimizer.param_groups, slot)
            new[name] = _unallocated(param, partition, entry)
    return new


def _unallocated(param: Tensor, partition: Partition | None, saved: Saved) -> Tensor:
    """A new tensor for state of a parameter: split as that is, if the state is of its shape."""
    if isinstance(param, DTensor) and saved.shape == param.shape:
        return torch.empty_like(param, dtype=saved.dtype, requires_grad=False)
    if partition is None or saved.shape != partition.whole_shape(param.shape):
        return _new(saved)
    local = torch.empty(param.shape, dtype=saved.dtype, device="cpu")
    return PartitionShard(local, partition)


def _new(saved: Saved) -> Tensor:
    return torch.empty(saved.shape, dtype=saved.dtype, device="cpu")


# -- the optimizer's state as its state dict wants it ---------------------------------------------


def wanted_groups(
    groups: list[dict[str, Any]], names: set[str]
) -> list[dict[str, Any]]:
    """Saved param groups without the parameters that this rank does not have."""
    result = []
    for group in groups:
        kept = [at for at, name in enumerate(group["param_names"]) if name in names]
        if kept or not group["params"]:
            result.append(with_params(group, kept))
    return result


def state_by_index(
    groups: list[dict[str, Any]], tensors: Mapping[str, Tensor]
) -> dict[int, dict[str, Tensor]]:
    """State by the indices of saved param groups."""
    index_of: dict[str, int] = {}
    for group in groups:
        index_of.update(zip(group["param_names"], group["params"], strict=True))
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        key, fqn = key_and_fqn(name)
        if name.startswith(STATE) and fqn in index_of:
            state.setdefault(index_of[fqn], {})[key] = value
    return state


# -- what does not fit ----------------------------------------------------------------------------


def check_entries(
    where: object,
    saved: Mapping[str, Saved],
    wanted: Mapping[str, Tensor],
    others: Iterable[str],
) -> None:
    """Raise ValueError listing what a checkpoint lacks, what is not wanted, and what is of another
    shape or dtype.

    Args:
        where: names the checkpoint.
        saved: its entries.
        wanted: tensors to read on this rank.
        others: names that any rank reads.
    """
    problems = {
        "missing": sorted(wanted.keys() - saved.keys()),
        "unexpected": sorted(saved.keys() - set(others)),
        "mis-shaped": [],
        "of another dtype": [],
    }
    for name in filter(saved.__contains__, wanted):
        there, here = saved[name], wanted[name]
        if there.shape != here.shape:
            text = f"{name}: saved {there.shape}, expected {tuple(here.shape)}"
            if _is_of_each_rank(name, there, here):
                text += " (one for each tensor-parallel rank: load it with as many)"
            problems["mis-shaped"].append(text)
        if there.dtype != here.dtype:
            text = f"{name}: saved {there.dtype}, expected {here.dtype}"
            problems["of another dtype"].append(text)
    if any(_is_average(name) for name in problems["unexpected"]):
        problems["unexpected"].append(
            "(averages: set ema_decay, or load with convert=True, which drops them)"
        )
    if any(_is_unread(name, wanted) for name in problems["unexpected"]):
        problems["unexpected"].append(
            "(first moments: none are kept where betas[0] is 0; load with convert=True, which "
            "drops them)"
        )
    if any(_is_unread(name, saved) for name in problems["missing"]):
        problems["missing"].append(
            "(first moments: none were kept, as betas[0] was 0; build the optimizer so)"
        )
    present = [f"{kind} {_some(names)}" for kind, names in problems.items() if names]
    if present:
        listed = ", ".join(present)
        raise ValueError(f"{where} does not fit this model and optimizer: {listed}")


def check_plain_of(
    where: object, plain: Mapping[str, Any], own: Mapping[str, Tensor]
) -> None:
    """Raise ValueError if what was saved beside tensors has something else for one of them.

    Args:
        where: names the checkpoint.
        plain: of :func:`plain_of`. own: of :func:`entries_of`.
    """
    for name, value in plain.items():
        if MODEL + name in own:
            raise ValueError(
                f"{where} does not fit this model: {name} is a {type(value).__name__} beside the "
                "tensors, and a tensor here"
            )


def without_surplus(
    saved: Mapping[str, Saved], own: Collection[str]
) -> dict[str, Saved]:
    """A checkpoint's entries without averages of main params, and first moments, where none are
    kept here."""
    return {
        name: entry
        for name, entry in saved.items()
        if name in own or not (_is_average(name) or _is_unread(name, own))
    }


def _is_unread(name: str, others: Collection[str]) -> bool:
    """Whether this is a first moment, or its scales, of a parameter that has but a second one
    among other entries: at ``betas[0]`` = 0 Adam keeps no first one."""
    key, fqn = key_and_fqn(name)
    return (
        name.startswith(STATE)
        and key in ("exp_avg", scale_key("exp_avg"))
        and entry_name("exp_avg", fqn) not in others
        and entry_name("exp_avg_sq", fqn) in others
    )


def _is_average(name: str) -> bool:
    return name.startswith(STATE) and key_and_fqn(name)[0] == AVERAGE


def _is_of_each_rank(name: str, there: Saved, here: Tensor) -> bool:
    """Whether state of another shape was, or is, none of the whole's parameter, but each rank's."""
    if isinstance(here, PartitionShard):
        return here.is_stacked
    return name.startswith(STATE) and there.shape[1:] == tuple(here.shape)


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{names[:_SHOWN]}{rest}"
