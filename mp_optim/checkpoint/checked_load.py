"""A load of a checkpoint on one rank: check the files, check the values, and only then write.

All ranks finish each phase before any rank begins the next phase. So a checkpoint that one rank
refuses has changed nothing on any rank. The write calls the caller's code (load hooks,
``set_extra_state`` of modules, ``load_state_dict`` of a scheduler).

Saved tensors whose values cannot be refused are read into the live tensors of the model and the
optimizer. All other saved tensors are read into new tensors, whose values are checked before any
live tensor is written.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mp_optim.checkpoint.entries import MODEL, STATE, check_entries, entry_name, key_and_fqn
from mp_optim.checkpoint.file_format import Index, Saved
from mp_optim.checkpoint.inventory import Inventory
from mp_optim.checkpoint.reading import Reading, ValueCheck, plan_reading
from mp_optim.config.state_forms import BLOCK
from mp_optim.core.flat_shard import FlatShard, PartitionShard, flat_index, is_cut
from mp_optim.core.keyed_optimizer import SlotKeyedOptimizer, match_without_state
from mp_optim.core.slot_state import AVERAGE, REMAINDER, SCALE, SECOND, STEP, is_scale, scale_key
from mp_optim.core.state_dict import StateLoad, check_is_state_dict, with_params
from mp_optim.host.torch_types import is_dtensor
from mp_optim.process_groups.agreement import Ranks

_OTHER_KEYS = {"remainder": "master_param", "master_param": "remainder"}
"""A checkpoint may store a main param whole, or only its remainder. For the state key of each form,
this dict has the key of the other form."""
_EXTRA_STATE = "_extra_state"
"""torch's key, in a module's state dict, for the value of the module's ``get_extra_state``."""


class CheckedLoad:
    """The load of one version on one rank. Constructing the object is collective.

    Args:
        version: folder of the version.
        index: the version's tensors: names, dtypes, shapes and positions in the files.
        common: plain data of the version (:func:`~mp_optim.checkpoint.common.read_common`).
        own: the model and the optimizer to load into.
        scheduler: object with ``load_state_dict``; None loads no scheduler.
        ranks: ranks that load together.
        convert: True to convert state even if bits are lost.
    """

    def __init__(
        self,
        version: Path,
        index: Index,
        common: dict[str, Any],
        own: Inventory,
        scheduler: Any,
        ranks: Ranks,
        convert: bool,
    ) -> None:
        self._version, self._own, self._scheduler = version, own, scheduler
        self._convert = convert
        # A load hook may change the loaded state, so check state only without such hooks.
        optimizer = own.optimizer
        has_hooks = optimizer is not None and optimizer._optimizer_load_state_dict_pre_hooks
        self._checking = None if has_hooks else optimizer
        self._index, self._common = own.renamed(index, common)
        self._reading = Reading(version, self._index, {})
        saved = {
            name: entry
            for name, entry in self._index.entries.items()
            if own.optimizer is not None or name.startswith(MODEL)
        }
        self._entries = own.entries()
        new = own.unallocated(saved, self._entries)
        tensors, refused = self._entries | new, own.refused(saved)
        if convert:
            own_names = ranks.union(set(tensors))
            saved = {
                name: entry
                for name, entry in saved.items()
                if name not in refused and (name in own_names or key_and_fqn(name)[0] != AVERAGE)
            }
            refused = {}
        self._saved, self._refused = saved, refused
        copies = own.copies(tensors) | new.keys()
        # Staged tensors are new, so that their values can be checked or converted. Live tensors
        # belong to the model and the optimizer, and are read in place.
        self._staged, self._live = _targets_of(tensors, saved, copies, convert=convert)
        self._read_anywhere = ranks.union({*self._staged, *self._live})

    # -- the files --------------------------------------------------------------------------------

    def check_files(self) -> None:
        """Check names, shapes and dtypes of the saved tensors, the saved settings, and the
        checksums of the files.

        Raises:
            ValueError: the checkpoint does not fit the model and the optimizer, files are damaged,
                or the optimizer refuses saved second moments.
        """
        for why in self._refused.values():
            raise ValueError(why)
        tensors = self._staged | self._live
        check_entries(self._version, self._saved, tensors, self._read_anywhere)
        for name, value in self._common["model"].items():
            if MODEL + name in self._entries:
                raise ValueError(
                    f"{self._version} does not match this model: {name} is a "
                    f"{type(value).__name__} in the checkpoint and a tensor in the model; load "
                    "the checkpoint into the saved model"
                )
        if self._scheduler is not None and self._common["scheduler"] is None:
            raise ValueError(
                f"{self._version} has no scheduler state; load the checkpoint with scheduler=None"
            )
        if (check := getattr(self._scheduler, "check_state_dict", None)) is not None:
            check(self._common["scheduler"])
        if (optimizer := self._own.optimizer) is not None:
            if self._common["optimizer"] is None:
                raise ValueError(
                    f"{self._version} has no optimizer state; load the checkpoint with "
                    "optimizer=None"
                )
            settings = self._settings()
            check_is_state_dict({**settings, "state": {}})
            match_without_state(optimizer, settings, convert=self._convert)
        self._reading = plan_reading(tensors, self._version, self._index)
        checks: dict[str, ValueCheck] = {}
        if (checking := self._checking) is not None:
            for name, value in self._live.items():
                key, fqn = key_and_fqn(name)
                if key == SECOND and value.is_floating_point():
                    state = checking.state_of(self._own.slots[fqn])
                    checks[name] = functools.partial(state.check_values, key)
        self._reading.check(checks)

    def _settings(self) -> dict[str, Any]:
        """Return the saved settings as a state dict without state. Each param group has only
        parameters of this rank, in the order of the optimizer's groups."""
        saved, groups = self._common["optimizer"], []
        for group in saved["param_groups"]:
            kept = [at for at, name in enumerate(group["param_names"]) if name in self._own.slots]
            if kept or not group["params"]:
                groups.append(with_params(group, kept))
        groups = self._own.matched_groups(self._own.without_checksums(groups))
        return {**saved, "param_groups": groups}

    def _state_dict(
        self, optimizer: SlotKeyedOptimizer, tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        """Return the saved settings with ``tensors`` as state: a state dict for the optimizer. If
        this rank has a shard of a tensor, the state has only the scales of this shard."""
        settings = self._settings()
        indices = [index for group in settings["param_groups"] for index in group["params"]]
        index_of = dict(zip(optimizer.slots(), indices, strict=True))
        state: dict[int, dict[str, Tensor]] = {}
        scales_of_shards: dict[str, Tensor] = {}
        for name, value in tensors.items():
            key, fqn = key_and_fqn(name)
            scales = tensors.get(entry_name(scale_key(key), fqn))
            if key and is_cut(value) and scales is not None:
                # The last dimension of 1 tells the optimizer that the scales belong to elements.
                # Scales of blocks are 1-D.
                of_elements = scales[flat_index(value).to(scales.device) // BLOCK][..., None]
                scales_of_shards[entry_name(scale_key(key), fqn)] = of_elements
        for name, value in (tensors | scales_of_shards).items():
            key, fqn = key_and_fqn(name)
            if key and fqn in self._own.slots:
                own = value.local if isinstance(value, PartitionShard) else value
                state.setdefault(index_of[self._own.slots[fqn]], {})[key] = own
        return {**settings, "state": state}

    # -- the values -------------------------------------------------------------------------------

    def check_values(self) -> None:
        """Read state that the optimizer may refuse into new tensors, and check its values.

        Load hooks may change the loaded state. So an optimizer with load hooks checks the state
        later, after the hooks were called.

        Raises:
            ValueError: the optimizer refuses a value.
        """
        self._reading.read(self._staged)
        if (optimizer := self._checking) is None:
            return
        if any(key_and_fqn(name)[0] not in ("", STEP) for name in self._staged):
            self._check_state(optimizer)
            return
        slots = self._own.slots
        for name, value in self._staged.items():
            key, fqn = key_and_fqn(name)
            if key:
                optimizer.state_of(slots[fqn]).check_values(key, value)

    def _check_state(self, optimizer: SlotKeyedOptimizer) -> None:
        # Live tensors are read only after all checks, and their shapes and dtypes were checked
        # already. So zeros stand for their values here.
        live = {name: value for name, value in self._live.items() if name.startswith(STATE)}
        memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        zeros = {name: _zeros_like(value, memory) for name, value in live.items()}
        state_dict = self._state_dict(optimizer, self._staged | zeros)
        state = state_dict["state"]
        match = match_without_state(optimizer, state_dict, convert=self._convert)
        # Leave out checksums here, because the weights that belong to the remainders are not read
        # yet. The loop below reads these weights for one parameter at a time.
        without_checksums = replace(match, checksums={})
        StateLoad(without_checksums, state, optimizer.state_of, self._convert)
        if self._convert:
            return
        # The load joins a main param from a remainder and the saved weights. The checksum shows
        # whether the remainder and the weights were saved together.
        for fqn, slot in self._own.slots.items():
            checksum, weights = match.checksums.get(slot), self._live.get(MODEL + fqn)
            is_staged = entry_name(REMAINDER, fqn) in self._staged
            if checksum is not None and weights is not None and is_staged:
                read = torch.empty_like(weights, device="cpu")
                name = MODEL + fqn
                plan_reading({name: read}, self._version, self._index).read({name})
                saved = state[match.index_of[slot]]
                optimizer.state_of(slot).fit(saved, False, checksum, read)

    # -- writing ----------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the checked values, and call the caller's code.

        Raises:
            Exception: the error of the caller's code. The optimizer then refuses to step until a
                load succeeds.
        """
        self._reading.read(self._live)
        tensors = self._staged | self._live
        self._own.load_model(tensors, deepcopy(self._common["model"]))
        if (optimizer := self._own.optimizer) is not None:
            state_dict = self._state_dict(optimizer, tensors)
            optimizer.load_state_dict(state_dict, convert=self._convert)
        # Load a copy, because the scheduler may keep the given object.
        if self._scheduler is not None:
            self._scheduler.load_state_dict(deepcopy(self._common["scheduler"]))


# -- tensors to read a checkpoint into -------------------------------------------------------------


def _targets_of(
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, Saved],
    copies: Collection[str],
    *,
    convert: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors to read a checkpoint into, by name, in two dicts: new tensors, and live
    tensors of the model and the optimizer.

    New tensors are for state that was saved in another dtype or layout, and for step counts. Copies
    of the optimizer's state and extra state of modules are read into new tensors, too.

    Args:
        tensors: result of :meth:`~mp_optim.checkpoint.inventory.Inventory.entries`.
        saved: the checkpoint's tensors, by name.
        copies: names of tensors that are copies of the optimizer's state.
        convert: True to read tensors of the model that were saved in another dtype, too.
    """
    staged: dict[str, Tensor] = {}
    live: dict[str, Tensor] = {}
    # A state tensor also differs if the checkpoint has the state under another name.
    differing = {
        name
        for name, value in tensors.items()
        if (saved[name].dtype != value.dtype if name in saved else not name.startswith(MODEL))
    }
    for name, value in tensors.items():
        key, fqn = key_and_fqn(name)
        base = entry_name(key.removesuffix(SCALE), fqn)
        if not key:
            is_extra = name.startswith(MODEL) and name.rpartition(".")[2] == _EXTRA_STATE
            is_staged = (name in differing and convert) or is_extra
            where = staged if is_staged else live
            where[name] = _new_like(value, saved.get(name)) if is_staged else value
        elif is_scale(key) and base in differing:
            continue  # A scale is read together with its moment, so the scale needs no tensor here.
        elif name in differing or key == STEP:
            staged.update(_as_saved(name, value, saved))
        else:
            where = staged if name in copies else live
            where[name] = value
    return staged, live


def _as_saved(name: str, own: Tensor, saved: Mapping[str, Saved]) -> dict[str, Tensor]:
    """Return new tensors to read one state tensor into. Names and dtypes are those of the saved
    tensors."""
    key, fqn = key_and_fqn(name)
    if name not in saved:
        other = entry_name(_OTHER_KEYS.get(key, ""), fqn)
        if other in saved:
            return {other: _new_like(own, saved[other])}
        if is_scale(key) and entry_name(key.removesuffix(SCALE), fqn) in saved:
            return {}
        if key == AVERAGE:  # A missing average starts from the main param, so read nothing.
            return {}
    form = {name: _new_like(own, saved.get(name))}
    scale = saved.get(entry_name(scale_key(key), fqn))
    if scale is not None and name in saved and saved[name].dtype != own.dtype:
        new = torch.empty(scale.shape, dtype=scale.dtype, device="cpu")
        form[entry_name(scale_key(key), fqn)] = new
    return form


def _new_like(own: Tensor, saved: Saved | None) -> Tensor:
    """Return a new tensor with the layout of ``own`` and the saved dtype."""
    dtype = own.dtype if saved is None else saved.dtype
    if isinstance(own, PartitionShard):
        held = torch.empty_like(own.held, dtype=dtype)
        return PartitionShard(held, own.partition, own.is_stacked)
    return torch.empty_like(own, dtype=dtype)


def _zeros_like(own: Tensor, memory: dict[tuple[torch.dtype, torch.device], Tensor]) -> Tensor:
    """Return zeros with the shape, dtype and layout of another tensor. All results share
    ``memory``, so that zeros for a whole model take the memory of its largest tensor."""
    if isinstance(own, PartitionShard):
        return PartitionShard(_zeros_like(own.held, memory), own.partition, own.is_stacked)
    if isinstance(own, FlatShard):
        return FlatShard(_zeros_like(own.local, memory), own.shape, own.start)
    if is_dtensor(own):
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            _zeros_like(own.to_local().detach(), memory),
            own.device_mesh,
            own.placements,
            run_check=False,
            shape=own.shape,
            stride=own.stride(),
        )
    known = memory.get((own.dtype, own.device))
    if known is None or known.numel() < own.numel():
        size = max(own.numel(), 0 if known is None else 2 * known.numel())
        known = torch.zeros(size, dtype=own.dtype, device=own.device)
        memory[own.dtype, own.device] = known
    return known[: own.numel()].view(own.shape)
