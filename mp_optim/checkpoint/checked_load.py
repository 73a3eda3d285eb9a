"""One rank's part of a load: what the files say, what the values say, what the caller's own code
says, and only then writing. All ranks finish each of the four before any begins the next, so a load
that one of them refuses has changed nothing anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mp_optim.checkpoint.entries import (
    MODEL,
    STATE,
    Models,
    check_entries,
    check_plain_of,
    entry_name,
    key_and_fqn,
    load_model,
    state_by_index,
    unallocated,
    wanted_groups,
    without_surplus,
)
from mp_optim.checkpoint.garbage import uncollected
from mp_optim.checkpoint.index import Index
from mp_optim.checkpoint.own_code import (
    has_own_hooks,
    is_extra_state,
    kept_model,
    kept_scheduler,
)
from mp_optim.checkpoint.ranks import Ranks
from mp_optim.checkpoint.reading import Look, Reading, plan_reading
from mp_optim.checkpoint.shared_model import without_checksums
from mp_optim.checkpoint.targets import Targets, as_read, copies_of, targets_of
from mp_optim.slots import Slot
from mp_optim.slots.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.slots.loading import StateLoad, check_plain, kept_settings, kept_state
from mp_optim.slots.model_parallel import ModelParallel
from mp_optim.slots.slot_state import State
from mp_optim.slots.state_dict import check_form
from mp_optim.slots.state_keys import REMAINDER, SECOND, STEP


@runtime_checkable
class CheckedScheduler(Protocol):
    """A scheduler that says what is wrong with saved state before any of it is loaded, as
    :class:`mp_optim.OptimizerParamScheduler` does; torch's do not."""

    def check_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Receiver:
    """What a checkpoint is loaded into.

    Attributes:
        optimizer: None loads the model alone.
        scheduler: None loads none.
        entries: of :func:`mp_optim.checkpoint.entries.entries_of`.
    """

    model: Models
    optimizer: SlotKeyedOptimizer | None
    scheduler: Any
    parallel: ModelParallel
    entries: dict[str, Tensor]


class CheckedLoad:
    """A load of a version. Collective when it is made.

    Args:
        version: names the checkpoint.
        index: what it holds, under the names that the parameters have here.
        common: what it holds beside tensors.
        convert: also where that loses bits.
    """

    def __init__(
        self,
        version: Path,
        index: Index,
        common: dict[str, Any],
        receiver: Receiver,
        ranks: Ranks,
        *,
        convert: bool,
    ) -> None:
        self._version, self._index, self._common = version, index, common
        self._model, self._convert = receiver.model, convert
        self._scheduler, self._entries = receiver.scheduler, receiver.entries
        self._optimizer = optimizer = receiver.optimizer
        self._parallel = parallel = receiver.parallel
        saved = {
            name: entry
            for name, entry in index.entries.items()
            if optimizer is not None or name.startswith(MODEL)
        }
        tensors = dict(receiver.entries)
        tensors |= (new := unallocated(optimizer, parallel, saved, tensors))
        if convert:
            saved = without_surplus(saved, ranks.union(set(tensors)))
        copies = copies_of(optimizer, parallel, tensors) | new.keys()
        self._saved = saved
        self._targets: Targets = targets_of(tensors, saved, copies, convert=convert)
        self._read_anywhere = ranks.union(set(self._targets.tensors))
        self._reading = Reading(version, index, ())
        self._kept = ExitStack()
        has_hooks = has_own_hooks(self._model, optimizer)
        self._keeps = bool(ranks.union({"hooks"} if has_hooks else set()))
        self._is_written, self._was_broken_off = False, False

    # -- what the files say -----------------------------------------------------------------------

    def check_files(self) -> None:
        """Raise ValueError if names, shapes, dtypes or settings do not fit, or files are damaged
        or hold second moments that nobody takes."""
        tensors = self._targets.tensors
        check_entries(self._version, self._saved, tensors, self._read_anywhere)
        check_plain_of(self._version, self._common["model"], self._entries)
        _check_scheduler(self._version, self._scheduler, self._common)
        self._check_groups()
        self._reading = plan_reading(tensors, self._version, self._index)
        self._reading.check(self._looks())

    def _check_groups(self) -> None:
        if self._optimizer is None:
            return
        if self._common["optimizer"] is None:
            raise ValueError(
                f"{self._version} holds a model and no optimizer; load it with optimizer=None"
            )
        settings = self._settings(self._optimizer)
        check_form({**settings, "state": {}})
        check_plain(self._optimizer, settings, convert=self._convert)

    def _settings(self, optimizer: SlotKeyedOptimizer) -> dict[str, Any]:
        """The saved state dict without state, and without parameters that this rank does not
        have."""
        names = {
            self._parallel.names[optimizer.slot_name(slot)]
            for slot in optimizer.slots()
        }
        groups = wanted_groups(self._common["optimizer"]["param_groups"], names)
        return {
            **self._common["optimizer"],
            "param_groups": without_checksums(groups, self._parallel),
        }

    def _looks(self) -> dict[str, Look]:
        """Looks at second moments that are read into the live ones."""
        if (optimizer := self._without_hooks()) is None:
            return {}
        slots = self._slots(optimizer)
        looks: dict[str, Look] = {}
        for name, value in self._targets.live.items():
            key, fqn = key_and_fqn(name)
            if _is_state(name) and key == SECOND and value.is_floating_point():
                state = optimizer.state_of(slots[fqn])
                looks[name] = partial(state.check_values, key)
        return looks

    def _slots(self, optimizer: SlotKeyedOptimizer) -> dict[str, Slot]:
        """Slots by the names of parameters in the checkpoint."""
        names = self._parallel.names
        return {names[optimizer.slot_name(slot)]: slot for slot in optimizer.slots()}

    def _without_hooks(self) -> SlotKeyedOptimizer | None:
        """The optimizer, if nothing changes what is loaded into it on the way."""
        optimizer = self._optimizer
        if optimizer is None or optimizer._optimizer_load_state_dict_pre_hooks:
            return None
        return optimizer

    # -- what the values say ----------------------------------------------------------------------

    @uncollected()
    def check_values(self) -> None:
        """Read what may be refused for its values into memory of its own, and raise ValueError if
        the optimizer does not take it. Hooks for loading may change what is loaded, so an optimizer
        that has some checks it when they have been called."""
        apart = self._targets.apart
        self._reading.read(apart)
        if (optimizer := self._without_hooks()) is None:
            return
        if any(key_and_fqn(name)[0] != STEP for name in apart if _is_state(name)):
            self._check_state(optimizer)
        else:
            slots = self._slots(optimizer)
            for name in filter(_is_state, apart):
                key, fqn = key_and_fqn(name)
                optimizer.state_of(slots[fqn]).check_values(key, apart[name])

    def _check_state(self, optimizer: SlotKeyedOptimizer) -> None:
        settings = self._settings(optimizer)
        match = check_plain(optimizer, settings, convert=self._convert)
        state = state_by_index(settings["param_groups"], self._targets.to_check())
        # the weights that remainders belong to are yet to come
        yet_to_come = replace(match, checksums={})
        StateLoad(optimizer, yet_to_come, state, self._convert).check()
        for slot, checksum in {} if self._convert else match.checksums.items():
            self._check_weights(optimizer, slot, state[match.index_of[slot]], checksum)

    def _check_weights(
        self, optimizer: SlotKeyedOptimizer, slot: Slot, saved: State, checksum: int
    ) -> None:
        """Raise ValueError if the saved weights are not those that the saved remainder of a slot
        belongs to, where it becomes a main param."""
        fqn = self._parallel.names[optimizer.slot_name(slot)]
        entry, name = entry_name(REMAINDER, fqn), MODEL + fqn
        if entry not in self._targets.apart or name not in self._targets.live:
            return
        weights = torch.empty_like(self._targets.live[name], device="cpu")
        plan_reading({name: weights}, self._version, self._index).read({name})
        optimizer.state_of(slot).check_weights(saved, checksum, weights)

    # -- what the caller's own code says ----------------------------------------------------------

    def rehearse(self) -> None:
        """Have the scheduler, the modules' extra state and their hooks take what was saved, beside
        the tensors that are there: what these refuse is known only by doing. :meth:`take_back`
        undoes it."""
        keep = (
            self._kept.callback
        )  # the last is put back first, and each if another fails
        if self._optimizer is not None:
            keep(kept_settings(self._optimizer))
        if self._scheduler is not None:
            keep(kept_scheduler(self._scheduler))
        if self._optimizer is not None and self._keeps:
            keep(kept_state(self._optimizer))
        values, parallel = self._keeps, self._parallel
        keep(kept_model(self._model, self._entries, parallel, values=values))
        saved = {
            name: value
            for name, value in self._targets.apart.items()
            if is_extra_state(name)
        }
        self._load_model({**self._entries, **saved})
        self._load_scheduler()

    def take_back(self) -> None:
        """Give everything what it had before :meth:`rehearse`. The tensors that :meth:`write` has
        begun to replace are lost if none of the caller's hooks could refuse them: then the
        optimizer raises until something is loaded."""
        self._kept.close()
        if self._optimizer is None or not self._is_written:
            return
        mark = self._optimizer.step_mark
        if self._keeps and not self._was_broken_off:
            mark.clear()
        else:
            mark.touch()

    def _load_model(self, tensors: dict[str, Tensor]) -> None:
        plain = deepcopy(self._common["model"])
        load_model(self._model, tensors, plain, self._parallel)

    def _load_scheduler(self) -> None:
        if self._scheduler is not None:  # it may keep what it is given
            self._scheduler.load_state_dict(deepcopy(self._common["scheduler"]))

    # -- writing ----------------------------------------------------------------------------------

    @uncollected()
    def write(self) -> None:
        """Read the rest into the live tensors, and hand over what was read apart."""
        self._is_written = True
        if self._optimizer is not None:
            self._was_broken_off = self._optimizer.step_mark.is_set
        self._reading.read(self._targets.live)
        self._load_model(self._targets.tensors)
        if self._optimizer is not None:
            state_dict = self._settings(self._optimizer)
            tensors = as_read(self._targets.tensors)
            state_dict["state"] = state_by_index(state_dict["param_groups"], tensors)
            self._optimizer.load_state_dict(state_dict, convert=self._convert)
        self._load_scheduler()


def _is_state(name: str) -> bool:
    return name.startswith(STATE)


def _check_scheduler(version: Path, scheduler: Any, common: Mapping[str, Any]) -> None:
    if scheduler is None:
        return
    if common["scheduler"] is None:
        raise ValueError(
            f"{version} holds no scheduler state; load it with scheduler=None"
        )
    if isinstance(scheduler, CheckedScheduler):
        scheduler.check_state_dict(common["scheduler"])
