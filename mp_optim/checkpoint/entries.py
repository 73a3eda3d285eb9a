"""What a checkpoint consists of: tensors under their names, plain data, and which of them a model
and an optimizer need."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim.checkpoint.common import as_json
from mp_optim.checkpoint.file_format import Index, Saved
from mp_optim.config.rules import moment_of
from mp_optim.core import Slot, param_at
from mp_optim.core.flat_shard import PartitionShard, as_partition, part_like
from mp_optim.core.keyed_optimizer import SlotKeyedOptimizer, match_without_state
from mp_optim.core.model_parallel import ModelParallel
from mp_optim.core.names import ModelParams, canonical_names, matched_names, prefixed
from mp_optim.core.partition import Partition
from mp_optim.core.slot_state import AVERAGE, State, scale_key
from mp_optim.core.state_dict import CHECKSUMS, match_by_name, names_in_words, with_params
from mp_optim.host.torch_types import is_dtensor
from mp_optim.process_groups.agreement import Ranks

MODEL = "model."
"""What the names of the model's tensors begin with; the FQN follows."""

STATE = "optimizer.state."
"""What the names of optimizer state begin with; the state's key, a dot and the parameter's FQN
follow."""

_SHOWN = 40

Models = nn.Module | Sequence[nn.Module]


def entry_name(key: str, name: str) -> str:
    return f"{STATE}{key}.{name}"


def key_and_fqn(entry: str) -> tuple[str, str]:
    """What :func:`entry_name` made a name of; twice "" for any other entry."""
    if not entry.startswith(STATE):
        return "", ""
    key, _, fqn = entry.removeprefix(STATE).partition(".")
    return key, fqn


# -- the model ------------------------------------------------------------------------------------


def chunks_of(models: Models) -> list[tuple[str, nn.Module]]:
    """Each chunk, after what names in it begin with."""
    return prefixed([models] if isinstance(models, nn.Module) else list(models))


def _canonical(
    models: Models, read: Callable[[nn.Module], Mapping[str, Any]] = nn.Module.state_dict
) -> Iterator[tuple[str, Any]]:
    """What is read from each chunk, by default its state dict, under canonical names."""
    for prefix, chunk in chunks_of(models):
        own = read(chunk)
        for name, short in canonical_names(chunk, own).items():
            yield prefix + short, own[name]


def _named_params(models: Models, *, twice: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters under canonical names.

    Args:
        twice: a tied parameter under each of its names, instead of its first.
    """
    return _canonical(
        models, lambda chunk: dict(chunk.named_parameters(remove_duplicate=not twice))
    )


def params_of(models: Models, parallel: ModelParallel) -> dict[str, Tensor]:
    """What this rank has of the parameters, under the names they have in a checkpoint; of one that
    is cut, which part this is comes after the name."""
    params = {}
    for name, param in _named_params(models):
        label, part = MODEL + parallel.names[name], parallel.partitions.get(name)
        if part is not None:
            label += f" (part {part.rank} of {part.size})"
        params[label] = param
    return params


def param_entries(models: Models, parallel: ModelParallel) -> set[str]:
    """Entries that are parameters, and not buffers, which modules write in forward."""
    return {MODEL + parallel.names[name] for name, _ in _named_params(models, twice=True)}


def plain_of(models: Models, parallel: ModelParallel) -> dict[str, Any]:
    """What a model's state dict holds besides tensors (``get_extra_state``), by name."""
    return {
        parallel.names[name]: value
        for name, value in _canonical(models)
        if not isinstance(value, Tensor)
    }


def load_model(
    models: Models, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], parallel: ModelParallel
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


# -- all tensors ----------------------------------------------------------------------------------


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
    for name, value in _canonical(models):
        if isinstance(value, Tensor) and name not in left_out:
            part = as_partition(value, parallel.partitions.get(name))
            entries[MODEL + parallel.names[name]] = part
    if optimizer is None:
        return entries
    for slot, name in names_here(models, optimizer).items():
        if name not in left_out:
            partition = parallel.partitions.get(name)
            for key, value in _slot_state(optimizer, slot, partition, full_precision).items():
                entries[entry_name(key, parallel.names[name])] = value
    return entries


def _slot_state(
    optimizer: SlotKeyedOptimizer, slot: Slot, partition: Partition | None, full_precision: bool
) -> State:
    if partition is None:
        read = optimizer.full_slot_state if full_precision else optimizer.slot_state
        return read(slot)
    optimizer.make_current(slot)
    shape = param_at(optimizer.param_groups, slot).shape
    live = optimizer.state_of(slot)
    state = live.full_precision() if full_precision else live.exported(in_blocks=False)
    whole = torch.Size(partition.whole_shape(shape))
    return {
        key: value if _is_of_whole(key, value, whole) else as_partition(value, partition, shape)
        for key, value in state.items()
    }


def _is_of_whole(key: str, value: Any, whole: torch.Size) -> bool:
    """Whether state of a part is that of the whole parameter."""
    moment = moment_of(key)
    return not moment.elementwise and value.shape == moment.local_shape(whole, whole)


# -- names of slots -------------------------------------------------------------------------------


def names_here(models: Models, optimizer: SlotKeyedOptimizer) -> dict[Slot, str]:
    """Return the name of each slot's parameter on this rank: the one that the model has for it, or
    the optimizer's own if the model does not have that parameter."""
    slots, known = optimizer.slots(), optimizer.model_parallel.names
    in_model: dict[int, str] = {}
    for name, param in _named_params(models):
        in_model.setdefault(id(param), name)
    own = {slot: optimizer.slot_name(slot) for slot in slots}
    params = {slot: param_at(optimizer.param_groups, slot) for slot in slots}
    matched = matched_names(own.values(), [name for name, _ in _named_params(models, twice=True)])
    return {
        slot: name if name in known else in_model.get(id(params[slot]), matched[name])
        for slot, name in own.items()
    }


def slots_by_name(
    models: Models, optimizer: SlotKeyedOptimizer, parallel: ModelParallel
) -> dict[str, Slot]:
    """Return the slots by the names of their parameters in a checkpoint."""
    return {parallel.names[name]: slot for slot, name in names_here(models, optimizer).items()}


def check_names(models: Models, optimizer: SlotKeyedOptimizer) -> None:
    """Raise ValueError if a checkpoint of this model and optimizer could not be loaded again,
    naming the parameter: two have one name, or the model's has another shape. Warn, once, of
    parameters of the model that the optimizer does not train."""
    names, in_model = names_here(models, optimizer), dict(_named_params(models, twice=True))
    counts = Counter(names.values())
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"{names_in_words(twice)}: more than one of the optimizer's parameters has this name; "
            "pass a model that holds all of them (nn.ModuleList([actor, critic])), or give each "
            "parameter a name of its own"
        )
    for slot, name in names.items():
        param = param_at(optimizer.param_groups, slot)
        if name in in_model and in_model[name].shape != param.shape:
            raise ValueError(
                f"{name} has the shape {tuple(in_model[name].shape)} in the model and "
                f"{tuple(param.shape)} in the optimizer, which does not train the model's; build "
                "the optimizer after the last change of the model (resize_token_embeddings)"
            )
    ModelParams([chunk for _, chunk in chunks_of(models)]).warn_of_untrained(optimizer)


def unallocated(
    models: Models,
    optimizer: SlotKeyedOptimizer | None,
    parallel: ModelParallel,
    saved: Mapping[str, Saved],
    present: Collection[str],
) -> dict[str, Tensor]:
    """New tensors for saved state of optimizers that allocate theirs when they step first, and of
    parameters that are frozen here; split as the parameter is, if the state is of its shape."""
    if optimizer is None:
        return {}
    slots, names = slots_by_name(models, optimizer, parallel), names_here(models, optimizer)
    new: dict[str, Tensor] = {}
    for name, entry in saved.items():
        slot = slots.get(key_and_fqn(name)[1])
        if slot is not None and name not in present and optimizer.state_of(slot).is_unallocated():
            partition = parallel.partitions.get(names[slot])
            param = param_at(optimizer.param_groups, slot)
            if is_dtensor(param) and entry.shape == param.shape:
                new[name] = torch.empty_like(param, dtype=entry.dtype, requires_grad=False)
            elif partition is None:
                new[name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            else:
                new[name] = part_like(entry.shape, entry.dtype, partition, param)
    return new


def refused(
    models: Models,
    optimizer: SlotKeyedOptimizer | None,
    parallel: ModelParallel,
    saved: Mapping[str, Saved],
) -> dict[str, str]:
    """Entries whose state is not taken here, whatever it is, and why."""
    if optimizer is None:
        return {}
    why_of: dict[str, str] = {}
    for name, slot in slots_by_name(models, optimizer, parallel).items():
        if why := optimizer.state_of(slot).layout.refusal:
            why_of[name] = why
    found = {name: key_and_fqn(name)[1] for name in saved} if why_of else {}
    return {name: why_of[fqn] for name, fqn in found.items() if fqn in why_of}


def state_by_index(
    index_of: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[Any, dict[str, Tensor]]:
    """Return the state among these tensors as a state dict holds it.

    Args:
        index_of: by the names of parameters.
    """
    state: dict[Any, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        key, fqn = key_and_fqn(name)
        if key and fqn in index_of:
            state.setdefault(index_of[fqn], {})[key] = value
    return state


# -- what does not fit ----------------------------------------------------------------------------


def check_entries(
    where: object, saved: Mapping[str, Saved], wanted: Mapping[str, Tensor], others: Iterable[str]
) -> None:
    """Raise ValueError listing what a checkpoint lacks, what is not wanted, and what is of another
    shape or dtype.

    Args:
        where: names the checkpoint.
        saved: its entries.
        wanted: tensors to read on this rank.
        others: names that any rank reads.
    """
    missing = sorted(wanted.keys() - saved.keys())
    unexpected = sorted(saved.keys() - set(others))
    misshaped, of_another_dtype = _misfits(saved, wanted)
    if any(key_and_fqn(name)[0] == AVERAGE for name in unexpected):
        unexpected.append("(averages: set ema_decay, or load with convert=True, which drops them)")
    if any(_is_unread(name, wanted) for name in unexpected):
        unexpected.append(
            "(first moments: none are kept where betas[0] is 0; load with convert=True, which "
            "drops them)"
        )
    if any(_is_unread(name, saved) for name in missing):
        missing.append("(first moments: none were kept, as betas[0] was 0; build the optimizer so)")
    listed = []
    for kind, names in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("mis-shaped", misshaped),
        ("of another dtype", of_another_dtype),
    ):
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        if names:
            listed.append(f"{kind} {names[:_SHOWN]}{more}")
    if listed:
        raise ValueError(f"{where} does not fit this model and optimizer: {', '.join(listed)}")


def _misfits(
    saved: Mapping[str, Saved], wanted: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    misshaped, of_another_dtype = [], []
    for name in filter(saved.__contains__, wanted):
        there, here = saved[name], wanted[name]
        if there.shape != here.shape:
            text = f"{name}: saved {there.shape}, expected {tuple(here.shape)}"
            if isinstance(here, PartitionShard):
                is_each_ranks = here.is_stacked
            else:
                is_each_ranks = name.startswith(STATE) and there.shape[1:] == tuple(here.shape)
            if is_each_ranks:  # and not cut out of the whole's
                text += " (one for each tensor-parallel rank: load it with as many)"
            misshaped.append(text)
        if there.dtype != here.dtype:
            of_another_dtype.append(f"{name}: saved {there.dtype}, expected {here.dtype}")
    return misshaped, of_another_dtype


def without_surplus(saved: Mapping[str, Saved], own: Collection[str]) -> dict[str, Saved]:
    """A checkpoint's entries without averages of main params, and first moments, where none are
    kept here."""
    return {
        name: entry
        for name, entry in saved.items()
        if name in own or not (key_and_fqn(name)[0] == AVERAGE or _is_unread(name, own))
    }


def _is_unread(name: str, others: Collection[str]) -> bool:
    """Whether this is a first moment, or its scales, of a parameter that has but a second one
    among other entries: at ``betas[0]`` = 0 Adam keeps no first one."""
    key, fqn = key_and_fqn(name)
    return (
        key in ("exp_avg", scale_key("exp_avg"))
        and entry_name("exp_avg", fqn) not in others
        and entry_name("exp_avg_sq", fqn) in others
    )


# -- param groups, and what ranks have of the model -----------------------------------------------


def parallel_of(
    optimizer: SlotKeyedOptimizer | None, given: ModelParallel | None, ranks: Ranks
) -> ModelParallel:
    """What an optimizer knows, or without one what is given, as far as it is between these ranks.

    Raises:
        ValueError: both are there.
    """
    if optimizer is None:
        return (given or ModelParallel()).among(ranks.members())
    if given is not None:
        raise ValueError(
            "model_parallel= beside an optimizer: it knows (optimizer.model_parallel), from the "
            "process_groups= and global_names= that get_megatron_optimizer was given"
        )
    return optimizer.model_parallel.among(ranks.members())


def saved_settings(
    models: Models, optimizer: SlotKeyedOptimizer, parallel: ModelParallel
) -> dict[str, Any]:
    """Return an optimizer's state dict without state, with the name that each parameter has in a
    checkpoint, and without checksums of parameters of which this rank has parts."""
    settings, names = optimizer.settings_dict(), iter(names_here(models, optimizer).values())
    named = []
    for group in settings["param_groups"]:
        called = [parallel.names[name] for name in islice(names, len(group["params"]))]
        named.append({**group, "param_names": called})
    del settings["state"]
    return {**settings, "param_groups": without_checksums(named, parallel)}


def loadable_settings(
    models: Models, optimizer: SlotKeyedOptimizer, parallel: ModelParallel
) -> dict[str, Any]:
    """Return :func:`saved_settings`, after a check that they load into this optimizer.

    Raises:
        ValueError: they do not, naming the parameter or the setting.
    """
    check_names(models, optimizer)
    settings, live = saved_settings(models, optimizer, parallel), optimizer.param_groups
    names = {slot: name for name, slot in slots_by_name(models, optimizer, parallel).items()}
    groups = match_by_name(live, settings["param_groups"], names).as_groups(live)
    match_without_state(optimizer, {**settings, "param_groups": groups})
    return settings


def with_names_here(
    models: Models,
    optimizer: SlotKeyedOptimizer,
    parallel: ModelParallel,
    index: Index,
    common: dict[str, Any],
) -> tuple[Index, dict[str, Any]]:
    """Return a checkpoint's tensors and plain data with the names that parameters have here, where
    they were saved under the optimizer's own names: those of another wrapper, or made-up ones."""
    slots = slots_by_name(models, optimizer, parallel)
    groups = (common["optimizer"] or {"param_groups": ()})["param_groups"]
    saved = {name for group in groups for name in group["param_names"]}
    left, free = saved - slots.keys(), slots.keys() - saved
    own = [(parallel.names[optimizer.slot_name(slots[name])], name) for name in free]
    counts = Counter(name for name, _ in own)
    found = {name: here for name, here in own if name in left and counts[name] == 1}
    matched = matched_names(left - found.keys(), free.difference(found.values()))
    found |= {name: here for name, here in matched.items() if here in free}
    if not found:
        return index, common
    entries = {}
    for name, entry in index.entries.items():
        key, fqn = key_and_fqn(name)
        entries[entry_name(key, found[fqn]) if fqn in found else name] = entry
    renamed = [
        {**group, "param_names": [found.get(name, name) for name in group["param_names"]]}
        for group in groups
    ]
    optimizer_part = {**common["optimizer"], "param_groups": renamed}
    return replace(index, entries=entries), {**common, "optimizer": optimizer_part}


def without_checksums(
    groups: Iterable[Mapping[str, Any]], parallel: ModelParallel
) -> list[dict[str, Any]]:
    """Param groups without the checksums of parameters of which this rank has parts: a checksum is
    of the whole."""
    parts = {parallel.names[name] for name in parallel.partitions}
    result = list(map(dict, groups))
    for group in result:
        if parts and CHECKSUMS in group:
            pairs = zip(group["param_names"], group[CHECKSUMS], strict=True)
            group[CHECKSUMS] = [None if name in parts else checksum for name, checksum in pairs]
    return result


# -- common.json: plain data ----------------------------------------------------------------------


def packed(common: Mapping[str, Any], ranks: Ranks) -> bytes:
    """The content of the file on the first rank, with the parameters of all ranks in its groups;
    b"" on the others.

    Raises:
        ValueError: a value is no plain data, naming its type.
    """
    optimizer = common["optimizer"]
    groups = [] if optimizer is None else optimizer["param_groups"]
    names = json.dumps([group["param_names"] for group in groups])
    digest = hashlib.sha256(names.encode()).digest()
    others = ranks.gather(None if digest == ranks.broadcast(digest) else groups)

    def pack() -> bytes:
        if optimizer is None:
            return as_json(common)
        whole = {**optimizer, "param_groups": _merged(groups, filter(None, others))}
        return as_json({**common, "optimizer": whole})

    return ranks.run_on_first("saving what is not a tensor", pack) or b""


def _merged(
    groups: list[dict[str, Any]], others: Iterable[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The first rank's groups, then those of other ranks that hold parameters it does not have,
    numbered anew."""
    result = list(groups)
    seen = {name for group in groups for name in group["param_names"]}
    start = sum(len(group["params"]) for group in groups)
    for groups_of_rank in others:
        for group in groups_of_rank:
            names = group["param_names"]
            new = [at for at, name in enumerate(names) if name not in seen]
            if new:
                numbers = list(range(start, start + len(new)))
                result.append({**with_params(group, new), "params": numbers})
                start += len(new)
                seen |= set(names)
    return result
