"""Loading a state dict: all of it is checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor

from mp_optim.process.calls import in_own_modes, warn
from mp_optim.slots.identity import ParamGroups, Slot, iter_slots
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.model_parallel import ModelParallel
from mp_optim.slots.slot_state import AVERAGE, SlotState, State
from mp_optim.slots.state_dict import GroupMatch, check_form, match_groups, names_in_words

_KEPT_BYTES = 64 << 20
"""Of converted state, kept from its check until it is loaded; what is beyond is converted twice, so
that loading takes no more memory than that."""


class Loadable(Protocol):
    """What is asked of the optimizer."""

    param_groups: ParamGroups
    grad_scaler: Any
    skip_rule: Any
    step_mark: StepMark
    model_parallel: ModelParallel
    _optimizer_load_state_dict_pre_hooks: Any
    _optimizer_load_state_dict_post_hooks: Any

    def check_lists(self) -> None: ...
    def slot_name(self, slot: Slot) -> str: ...
    def slot_state(self, slot: Slot) -> State: ...
    def state_of(self, slot: Slot) -> SlotState: ...
    def load_slot_state(self, slot: Slot, state: State) -> None: ...
    def saved_beside(self) -> dict[str, Any]: ...
    def load_beside(self, state_dict: Mapping[str, Any]) -> None: ...
    def check_settings(self, group: dict[str, Any]) -> None: ...
    def follow_model(self) -> None: ...
    def recover(self) -> None: ...
    def begins_anew(self, state_dict: Mapping[str, Any]) -> bool: ...
    def share_settings(self) -> None: ...


@in_own_modes
def restore(optimizer: Loadable, state_dict: dict[str, Any], *, convert: bool = False) -> list[str]:
    """As ``load_state_dict``; returns the names of the parameters that were written, instead of
    warning."""
    optimizer.step_mark.check_lent("load_state_dict")
    optimizer.check_lists()
    check_form(state_dict)
    state_dict = dict(state_dict)
    if optimizer.step_mark.is_set:
        optimizer.recover()
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        hooked = pre_hook(optimizer, state_dict)
        state_dict = state_dict if hooked is None else hooked
    check_form(state_dict)
    if optimizer.begins_anew(state_dict):
        written: list[str] = []
    else:
        written = _restore_state(optimizer, state_dict, convert)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
    return written


def _restore_state(optimizer: Loadable, state_dict: dict[str, Any], convert: bool) -> list[str]:
    optimizer.share_settings()  # which say what state there is
    optimizer.follow_model()
    match = check_plain(optimizer, state_dict, convert=convert)
    load = StateLoad(optimizer, match, state_dict["state"], convert)
    load.check()
    with optimizer.step_mark.under_way(optimizer):
        optimizer.step_mark.touch()
        load.write()
        optimizer.share_settings()
        optimizer.load_beside(state_dict)
        written = load.write_model()
    optimizer.step_mark.clear()
    load.tell_of_averages()  # where warnings are errors, after everything
    return written


def matched_groups(
    live: ParamGroups,
    saved: Sequence[dict[str, Any]],
    check_settings: Callable[[dict[str, Any]], None],
) -> GroupMatch:
    """Which saved parameters and settings go where.

    Raises:
        ValueError: parameters are missing on either side, or a setting is out of range.
    """
    match = match_groups(live, saved)
    for index, (group, settings) in enumerate(zip(live, match.settings, strict=True)):
        try:
            check_settings({**group, **settings})
        except (TypeError, ValueError) as error:
            raise ValueError(f"param group {index} of the saved state: {error}") from error
    return match


def check_plain(
    optimizer: Loadable, state_dict: Mapping[str, Any], *, convert: bool = False
) -> GroupMatch:
    """What can be said of a state dict without its state: which parameters and settings go where.

    Raises:
        ValueError: parameters are missing on either side, or a setting or the loss scale is out of
            range.
    """
    live, names = optimizer.param_groups, optimizer.model_parallel.names
    saved = names.groups_in(state_dict["param_groups"], live)
    match = matched_groups(live, saved, optimizer.check_settings)
    scaler, scale = optimizer.grad_scaler, state_dict.get("grad_scaler")
    if scaler is not None and (scale or not convert):
        scaler.check_state_dict(scale)
    if optimizer.skip_rule is not None:
        optimizer.skip_rule.check_state_dict(state_dict.get("skip_step"))
    return match


class StateLoad:
    """One load of saved state.

    Args:
        match: where each slot's state is. saved: the state dict's ``"state"``.
        convert: also where that loses bits.

    Raises:
        ValueError: state is missing, naming the parameters.
    """

    def __init__(
        self, optimizer: Loadable, match: GroupMatch, saved: Mapping[Any, Any], convert: bool
    ) -> None:
        self._optimizer, self._match, self._convert = optimizer, match, convert
        self._saved = self._matched(saved)
        self._fitted: dict[Slot, State] = {}
        self._without_average: list[str] = []

    def _matched(self, saved: Mapping[Any, Any]) -> dict[Slot, State]:
        """What each slot is to be given. A slot whose state was never allocated had none to
        save."""
        optimizer = self._optimizer
        matched: dict[Slot, State] = {}
        missing: list[str] = []
        for slot, index in self._match.index_of.items():
            state = saved.get(index) or {}
            if not isinstance(state, dict):
                raise ValueError(
                    f"state of {optimizer.slot_name(slot)} is a {type(state).__name__}, not a dict"
                )
            if not state and optimizer.state_of(slot).is_required():
                missing.append(optimizer.slot_name(slot))
            elif state or optimizer.slot_state(slot):
                matched[slot] = state
        if missing:
            raise ValueError(
                f"the saved state has none for {len(missing)} of {len(self._match.index_of)} "
                f"parameters: {names_in_words(missing)}. Was it saved before the first step of an "
                "optimizer that has no state until then, or with these parameters frozen? Load a "
                "complete one, or none; parameters that had never been trained can be frozen "
                "(requires_grad_(False)) while it is loaded"
            )
        return matched

    def check(self) -> None:
        """Raise ValueError, naming what does not fit, or would lose bits."""
        room = _KEPT_BYTES
        for slot, saved in self._saved.items():
            state = self._optimizer.state_of(slot)
            if not self._convert:
                state.check_weights(saved, self._match.checksums.get(slot))
            fitted = state.fit(saved, self._convert)
            state.check(fitted)
            if AVERAGE in fitted and AVERAGE not in saved:
                self._without_average.append(self._optimizer.slot_name(slot))
            room -= _converted_bytes(fitted, saved)
            if room >= 0:
                self._fitted[slot] = fitted

    def write(self) -> None:
        """Copy what was checked into the slots and the groups."""
        optimizer = self._optimizer
        for slot, saved in self._saved.items():
            fitted = self._fitted.pop(slot, None)
            if fitted is None:
                fitted = optimizer.state_of(slot).fit(saved, self._convert)
            optimizer.load_slot_state(slot, fitted)
        self._match.write_settings(optimizer.param_groups)

    def tell_of_averages(self) -> None:
        """Warn if averages are kept for which nothing was saved."""
        if names := self._without_average:
            warn(
                f"the saved state has no average for {len(names)} parameters, of which averages "
                f"are kept (ema_decay): {names_in_words(names)}. They start from the loaded main "
                "params"
            )

    def write_model(self) -> list[str]:
        """Give the model's parameters the values of their main params; returns the names of those
        that had others."""
        optimizer = self._optimizer
        for slot, saved in self._saved.items():
            checksum = None if self._convert else self._match.checksums.get(slot)
            optimizer.state_of(slot).expect_weights(saved, checksum)
        written = [slot for slot in self._saved if optimizer.state_of(slot).write_model()]
        return [optimizer.slot_name(slot) for slot in written]


# -- what was loaded, taken back ------------------------------------------------------------------


def kept_settings(optimizer: Loadable) -> Callable[[], None]:
    """Remember the settings of all param groups; returns what puts them back, tensors in place."""
    kept = [
        {key: (value, deepcopy(value)) for key, value in _settings_of(group).items()}
        for group in optimizer.param_groups
    ]

    @torch.no_grad()
    def put_back() -> None:
        for group, settings in zip(optimizer.param_groups, kept, strict=True):
            for key in _settings_of(group).keys() - settings.keys():
                del group[key]
            for key, (value, copied) in settings.items():
                group[key] = copied
                if isinstance(value, Tensor):
                    group[key] = value.copy_(copied)

    return put_back


def kept_state(optimizer: Loadable) -> Callable[[], None]:
    """Copy the state of all slots, and what is loaded beside it; returns what puts it back, where
    the model's parameters have their values again."""
    states: dict[Slot, State] = {}
    for slot, _ in iter_slots(optimizer.param_groups):
        state = optimizer.slot_state(slot)
        states[slot] = {key: deepcopy(value) for key, value in state.items()}
    beside = deepcopy(optimizer.saved_beside())

    def put_back() -> None:
        for slot, state in states.items():
            form = optimizer.state_of(slot)
            if state or not form.is_required():  # else frozen, and the load gave it state
                optimizer.load_slot_state(slot, form.fit(state, convert=False))
        optimizer.load_beside(beside)

    return put_back


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _converted_bytes(fitted: State, saved: State) -> int:
    """Bytes of what fitting made anew: such tensors have another dtype or key than those that were
    saved."""
    made = [
        value
        for key, value in fitted.items()
        if isinstance(value, Tensor)
        and not (isinstance(saved.get(key), Tensor) and saved[key].dtype == value.dtype)
    ]
    return sum(value.nbytes for value in made)
