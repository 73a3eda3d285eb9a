"""Tensors of a model and an optimizer by their names in a checkpoint, and the optimizer's slot of
each name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim.checkpoint.entries import MODEL, entry_name, key_and_fqn
from mp_optim.checkpoint.file_format import Index, Saved
from mp_optim.config.rules import moment_of
from mp_optim.core import Slot, param_at
from mp_optim.core.flat_shard import PartitionShard, as_partition, part_like
from mp_optim.core.keyed_optimizer import SlotKeyedOptimizer, match_without_state
from mp_optim.core.model_parallel import ModelParallel
from mp_optim.core.names import (
    ModelParams,
    canonical_items,
    canonical_names,
    matched_names,
    names_in_words,
    prefixed,
)
from mp_optim.core.partition import Partition
from mp_optim.core.slot_state import State, scale_key, without_keys
from mp_optim.core.state_dict import CHECKSUMS, match_by_name
from mp_optim.host.torch_types import is_dtensor
from mp_optim.process_groups.agreement import Ranks

Models = nn.Module | Sequence[nn.Module]


def chunks_of(models: Models) -> list[nn.Module]:
    return [models] if isinstance(models, nn.Module) else list(models)


@dataclass
class Inventory:
    """The model and the optimizer of one rank, for one save or load. The names are computed once.

    Attributes:
        models: a module, or the list of the model's chunks.
        optimizer: the optimizer; None to save or load the model alone.
        parallel: names and partitions of this rank's parameters in the whole model.
    """

    models: Models
    optimizer: SlotKeyedOptimizer | None
    parallel: ModelParallel

    @classmethod
    def among(
        cls,
        models: Models,
        optimizer: SlotKeyedOptimizer | None,
        given: ModelParallel | None,
        ranks: Ranks,
    ) -> Inventory:
        """Return the inventory of this rank for a save or load by some ranks.

        Args:
            models: a module, or the list of the model's chunks.
            optimizer: the optimizer, or None.
            given: names and partitions of this rank's parameters; only allowed if ``optimizer`` is
                None.
            ranks: the ranks that save or load together.

        Raises:
            ValueError: ``optimizer`` and ``given`` are both set.
        """
        if optimizer is not None and given is not None:
            raise ValueError(
                "model_parallel=...: the call also has an optimizer, and optimizer.model_parallel "
                "already has the names and partitions, from process_groups= and global_names= of "
                "get_megatron_optimizer; remove the argument"
            )
        parallel = given or ModelParallel() if optimizer is None else optimizer.model_parallel
        return cls(models, optimizer, parallel.among(ranks.members()))

    def _named_params(self, *, twice: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's parameters by canonical name.

        Args:
            twice: True to yield a tied parameter under each of its names; False for the first name
                only.
        """
        read = methodcaller("named_parameters", remove_duplicate=not twice)
        return canonical_items(chunks_of(self.models), read)

    # -- the model --------------------------------------------------------------------------------

    def params(self) -> dict[str, Tensor]:
        """Return this rank's parameters by their names in a checkpoint. If the parameter is a
        tensor-parallel shard, the name ends with the shard's number, because different shards
        have different values."""
        params = {}
        for name, param in self._named_params():
            label, part = MODEL + self.parallel.names[name], self.parallel.partitions.get(name)
            if part is not None:
                label += f" (part {part.rank} of {part.size})"
            params[label] = param
        return params

    def param_entries(self) -> set[str]:
        """Return the names of the model's parameters in a checkpoint, without buffers.

        A background save may lease parameters, but has to copy buffers, because modules write
        buffers in forward.
        """
        return {MODEL + self.parallel.names[name] for name, _ in self._named_params(twice=True)}

    def plain(self) -> dict[str, Any]:
        """Return the values of the model's state dict that are not tensors
        (``get_extra_state``), by name."""
        items = canonical_items(chunks_of(self.models), nn.Module.state_dict)
        return {
            self.parallel.names[name]: value
            for name, value in items
            if not isinstance(value, Tensor)
        }

    def load_model(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Load tensors of :meth:`entries` and values of :meth:`plain` into the model."""
        state: dict[str, Any] = dict(plain)
        for name, value in tensors.items():
            if name.startswith(MODEL):
                own = value.local if isinstance(value, PartitionShard) else value
                state[name.removeprefix(MODEL)] = own
        for prefix, chunk in prefixed(chunks_of(self.models)):
            given = {}
            for name, short in canonical_names(chunk, chunk.state_dict()).items():
                whole = self.parallel.names[prefix + short]
                if whole in state:
                    given[name] = state[whole]
            chunk.load_state_dict(given, strict=False)

    # -- slots ------------------------------------------------------------------------------------

    @cached_property
    def _stack(self) -> SlotKeyedOptimizer:
        assert self.optimizer is not None
        return self.optimizer

    @cached_property
    def names(self) -> dict[Slot, str]:
        """The name of each slot's parameter on this rank: the model's name, or the optimizer's
        name if the model does not have the parameter."""
        if self.optimizer is None:
            return {}
        optimizer, known = self.optimizer, self.optimizer.model_parallel.names
        in_model: dict[int, str] = {}
        for name, param in self._named_params():
            in_model.setdefault(id(param), name)
        own = {slot: optimizer.slot_name(slot) for slot in optimizer.slots()}
        params = {slot: param_at(optimizer.param_groups, slot) for slot in own}
        every = [name for name, _ in self._named_params(twice=True)]
        matched = matched_names(own.values(), every)
        return {
            slot: name if name in known else in_model.get(id(params[slot]), matched[name])
            for slot, name in own.items()
        }

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """Slots by the names of their parameters in a checkpoint."""
        return {self.parallel.names[name]: slot for slot, name in self.names.items()}

    def check_names(self) -> None:
        """Check that a checkpoint of this model and optimizer could be loaded again.

        Warn once about parameters of the model that the optimizer does not train.

        Raises:
            ValueError: two parameters have one name, or a parameter's shape in the model differs
                from its shape in the optimizer; the message names the parameter.
        """
        in_model, counts = dict(self._named_params(twice=True)), Counter(self.names.values())
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(
                f"{names_in_words(twice)}: more than one parameter of the optimizer has this "
                "name; pass a model that has all of them (nn.ModuleList([actor, critic])), or "
                "give each parameter a unique name"
            )
        for slot, name in self.names.items():
            param = param_at(self._stack.param_groups, slot)
            if name in in_model and in_model[name].shape != param.shape:
                raise ValueError(
                    f"{name} has the shape {tuple(in_model[name].shape)} in the model and "
                    f"{tuple(param.shape)} in the optimizer: the model's parameter was replaced "
                    "after the optimizer was built, and is not trained; build the optimizer after "
                    "the last change of the model (resize_token_embeddings)"
                )
        ModelParams(chunks_of(self.models)).warn_of_untrained(self._stack)

    # -- tensors ----------------------------------------------------------------------------------

    def entries(
        self, *, full_precision: bool = False, left_out: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Return every tensor of the model and the optimizer by its name in a checkpoint. State
        that the checkpoint has in another form is converted into new tensors; all other tensors
        are live.

        Args:
            full_precision: True for FP32 copies of state that is stored in fewer bits.
            left_out: names on this rank of parameters to leave out.
        """
        parallel = self.parallel
        entries: dict[str, Tensor] = {}
        items = canonical_items(chunks_of(self.models), nn.Module.state_dict)
        for name, value in items:
            if isinstance(value, Tensor) and name not in left_out:
                part = as_partition(value, parallel.partitions.get(name))
                entries[MODEL + parallel.names[name]] = part
        for slot, name in self.names.items():
            if name in left_out:
                continue
            optimizer, partition = self._stack, parallel.partitions.get(name)
            label = partial(entry_name, name=parallel.names[name])
            if partition is None:
                read = optimizer.full_slot_state if full_precision else optimizer.slot_state
                entries |= {label(key): value for key, value in read(slot).items()}
                continue
            optimizer.make_current(slot)
            live, shape = optimizer.state_of(slot), param_at(optimizer.param_groups, slot).shape
            state = live.full_precision() if full_precision else live.exported(in_blocks=False)
            parts = _in_parts(state, partition, shape)
            entries |= {label(key): value for key, value in parts.items()}
        return entries

    def unallocated(
        self, saved: Mapping[str, Saved], present: Collection[str]
    ) -> dict[str, Tensor]:
        """Return new tensors for saved state that this rank has not allocated.

        Optimizers that allocate state in their first step, and parameters that are frozen here,
        have no such state yet. State of the parameter's shape is sharded as the parameter is.
        """
        new: dict[str, Tensor] = {}
        for name, entry in saved.items():
            slot = self.slots.get(key_and_fqn(name)[1])
            if slot is None or name in present or not self._stack.state_of(slot).is_unallocated():
                continue
            partition = self.parallel.partitions.get(self.names[slot])
            param = param_at(self._stack.param_groups, slot)
            if is_dtensor(param) and entry.shape == param.shape:
                new[name] = torch.empty_like(param, dtype=entry.dtype, requires_grad=False)
            elif partition is None:
                new[name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            else:
                new[name] = part_like(entry.shape, entry.dtype, partition, param)
        return new

    def refused(self, saved: Iterable[str]) -> dict[str, str]:
        """Return a reason, by name, for each saved tensor that the optimizer cannot load in any
        dtype or layout."""
        why_of = {
            name: why
            for name, slot in self.slots.items()
            if (why := self._stack.state_of(slot).layout.refusal)
        }
        fqns = ((name, key_and_fqn(name)[1]) for name in saved)
        return {name: why_of[fqn] for name, fqn in fqns if fqn in why_of}

    def copies(self, tensors: Collection[str]) -> set[str]:
        """Return the names of state tensors that the optimizer stores in blocks, and that
        ``tensors`` has as FP32 copies."""
        return {
            entry_name(key, name)
            for name, slot in self.slots.items()
            for key in self._stack.state_of(slot).coded()
            if entry_name(scale_key(key), name) not in tensors
        }

    # -- param groups -----------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return the optimizer's state dict without state. Parameters have their names in a
        checkpoint. Check that the optimizer could load the result.

        Raises:
            ValueError: the optimizer could not load the result; the message names the parameter or
                the setting.
        """
        self.check_names()
        settings, names = self._stack.settings_dict(), iter(self.names.values())
        named = []
        for group in settings["param_groups"]:
            called = [self.parallel.names[name] for name in islice(names, len(group["params"]))]
            named.append({**group, "param_names": called})
        del settings["state"]
        settings = {**settings, "param_groups": self.without_checksums(named)}
        groups = self.matched_groups(settings["param_groups"])
        match_without_state(self._stack, {**settings, "param_groups": groups})
        return settings

    def matched_groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the saved param groups, with this rank's parameters in the order of the
        optimizer's groups."""
        live, names = self._stack.param_groups, {slot: name for name, slot in self.slots.items()}
        match, groups = match_by_name(live, saved, names), []
        for index, (group, settings) in enumerate(zip(live, match.settings, strict=True)):
            slots = [Slot(index, position) for position in range(len(group["params"]))]
            matched = {**settings, "params": [match.index_of[slot] for slot in slots]}
            if "param_names" in group:
                matched["param_names"] = list(group["param_names"])
            if match.checksums:
                matched[CHECKSUMS] = [match.checksums.get(slot) for slot in slots]
            groups.append(matched)
        return groups

    def without_checksums(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return param groups without the checksums of tensor-parallel parameters. Such a checksum
        would cover the whole parameter, but each rank has only a shard."""
        parts = {self.parallel.names[name] for name in self.parallel.partitions}
        result = list(map(dict, groups))
        for group in result:
            if parts and CHECKSUMS in group:
                pairs = zip(group["param_names"], group[CHECKSUMS], strict=True)
                group[CHECKSUMS] = [None if name in parts else checksum for name, checksum in pairs]
        return result

    def renamed(self, index: Index, common: dict[str, Any]) -> tuple[Index, dict[str, Any]]:
        """Return the index and the plain data of a checkpoint, with the names that this rank gives
        to the parameters.

        The saved names differ if another wrapper surrounded the model, or if the optimizer had no
        names and made its own.
        """
        if self.optimizer is None:
            return index, common
        groups = (common["optimizer"] or {"param_groups": ()})["param_groups"]
        saved = {name for group in groups for name in group["param_names"]}
        left, free = saved - self.slots.keys(), self.slots.keys() - saved
        own = [
            (self.parallel.names[self._stack.slot_name(self.slots[name])], name) for name in free
        ]
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


def present_entries(
    stack: SlotKeyedOptimizer,
    slot: Slot,
    name: str,
    parallel: ModelParallel,
    *,
    with_blocks: bool = True,
) -> dict[str, Tensor]:
    """Return parameter and state of a slot, by name in a checkpoint, with their present bits. If
    other code wrote the parameter since the last step, the main param is not refreshed first.

    Args:
        stack: the optimizer.
        slot: index of the param group, and position in the group.
        name: name of the parameter on this rank.
        parallel: names and partitions of this rank's parameters.
        with_blocks: True to include FP32 copies of state that is stored in blocks.
    """
    param, live = param_at(stack.param_groups, slot), stack.state_of(slot)
    if with_blocks:
        state = live.exported(in_blocks=False)
    else:
        stored = live.live()
        coded = {key for key in stored if scale_key(key) in stored}
        state = live.layout.show(without_keys(stored, coded.union(map(scale_key, coded))))
    if (partition := parallel.partitions.get(name)) is not None:
        state = _in_parts(state, partition, param.shape)
    entries = {entry_name(key, parallel.names[name]): value for key, value in state.items()}
    entries[MODEL + parallel.names[name]] = as_partition(param, partition)
    return {entry: value for entry, value in entries.items() if isinstance(value, Tensor)}


def _in_parts(state: State, partition: Partition, shape: torch.Size) -> State:
    """Return the state of a tensor-parallel shard, with tensors as parts of the whole parameter's
    state (:func:`as_partition`). Scalars, and moments that each rank keeps whole, are unchanged.

    Args:
        state: the state by key.
        partition: position of the shard.
        shape: shape of the shard.
    """
    whole = torch.Size(partition.whole_shape(shape))
    parts = {}
    for key, value in state.items():
        moment = moment_of(key)
        is_whole = not moment.elementwise and value.shape == moment.local_shape(whole, whole)
        parts[key] = value if is_whole else as_partition(value, partition, shape)
    return parts
