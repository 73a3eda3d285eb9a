"""One rank's part of a load: what the files say, what the values say, and only then writing. All
ranks finish each of the three before any begins the next, so a load that one of them refuses has
changed nothing anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mp_optim.checkpoint.entries import (
    MODEL,
    STATE,
    Models,
    check_entries,
    key_and_fqn,
    load_model,
    state_by_index,
    unallocated,
    wanted_groups,
    without_surplus,
)
from mp_optim.checkpoint.garbage import uncollected
from mp_optim.checkpoint.index import Index
from mp_optim.checkpoint.ranks import Ranks
from mp_optim.checkpoint.reading import Look, Reading, plan_reading
from mp_optim.checkpoint.shared_model import without_checksums
from mp_optim.checkpoint.targets import Targets, as_read, copies_of, targets_of
from mp_optim.slots import Slot
from mp_optim.slots.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.slots.loading import StateLoad, check_plain
from mp_optim.slots.model_parallel import ModelParallel
from mp_optim.slots.state_dict import CHECKSUMS
from mp_optim.slots.state_keys import SECOND, STEP


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
        entries: of :func:`mp_optim.checkpoint.entries.entries_of`.
    """

    model: Models
    optimizer: SlotKeyedOptimizer | None
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
        self._optimizer = optimizer = receiver.optimizer
        self._parallel = parallel = receiver.parallel
        saved = {
            name: entry
            for name, entry in index.entries.items()
            if optimizer is not None or name.startswith(MODEL)
        }
        tensors = dict(receiver.entries)
        tensors |= unallocated(optimizer, parallel, saved, tensors)
        if convert:
            saved = without_surplus(saved, ranks.union(set(tensors)))
        copies = copies_of(optimizer, parallel, tensors)
        self._saved = saved
        self._targets: Targets = targets_of(tensors, saved, copies, convert=convert)
        self._read_anywhere = ranks.union(set(self._targets.tensors))
        self._reading = Reading(version, index, ())

    # -- what the files say -----------------------------------------------------------------------

    def check_files(self, scheduler: Any) -> None:
        """Raise ValueError if names, shapes, dtypes or settings do not fit, or files are damaged
        or hold second moments that nobody takes."""
        tensors = self._targets.tensors
        check_entries(self._version, self._saved, tensors, self._read_anywhere)
        _check_scheduler(self._version, scheduler, self._common)
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
        for group in settings["param_groups"]:
            group.pop(CHECKSUMS, None)  # the weights are yet to come
        match = check_plain(optimizer, settings, convert=self._convert)
        state = state_by_index(settings["param_groups"], self._targets.to_check())
        StateLoad(optimizer, match, state, self._convert).check()

    # -- writing ----------------------------------------------------------------------------------

    @uncollected()
    def write(self) -> None:
        """Read the rest into the live tensors, and hand over what was read apart."""
        self._reading.read(self._targets.live)
        tensors = as_read(self._targets.tensors)
        load_model(self._model, tensors, self._common["model"], self._parallel)
        if self._optimizer is None:
            return
        state_dict = self._settings(self._optimizer)
        state_dict["state"] = state_by_index(state_dict["param_groups"], tensors)
        self._optimizer.load_state_dict(state_dict, convert=self._convert)


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
