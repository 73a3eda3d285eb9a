"""State dicts: export of param groups as plain data, match of saved groups to live groups, and load
of saved state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mp_optim.config.setting_checks import plain_setting
from mp_optim.core.identity import ParamGroups, Slot, iter_slots, slot_name
from mp_optim.core.names import matched_names, names_in_words, without_wrappers
from mp_optim.core.slot_state import AVERAGE, SlotState, State

CHECKSUMS = "param_checksums"
"""Key in a saved group with one entry for each parameter: the checksum of the parameter with which
the saved remainder is valid, or None."""

_PARALLEL = ("params", "param_names", CHECKSUMS)
_OWN = (*_PARALLEL, "fqns", "is_expert_parallel")
"""Entries that a live group gets from the model. A load does not copy them from a saved group."""


@dataclass(frozen=True)
class GroupMatch:
    """The match of a saved state dict to the live slots and groups.

    Attributes:
        index_of: for each slot, the index of its entry in the saved ``"state"``.
        settings: for each live group, a copy of the saved hyperparameters.
        checksums: for slots with a saved remainder, the checksum of the parameter with which the
            remainder is valid.
    """

    index_of: dict[Slot, Any]
    settings: list[dict[str, Any]]
    checksums: dict[Slot, int] = field(default_factory=dict)

    def write_settings(self, live: ParamGroups) -> None:
        """Copy the saved hyperparameters into the live groups."""
        for group, settings in zip(live, self.settings, strict=True):
            group.update(settings)


def plain_groups(param_groups: ParamGroups) -> list[dict[str, Any]]:
    """Return param groups as torch saves them: indices 0, 1, 2, ... in place of tensors, and copies
    of settings."""
    start, packed = 0, []
    for group in param_groups:
        count = len(group["params"])
        plain = {
            key: list(value) if key == "param_names" else deepcopy(plain_setting(value))
            for key, value in group.items()
            if key != "params"
        }
        packed.append({**plain, "params": list(range(start, start + count))})
        start += count
    return packed


def carried(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a slot's state for a state dict. If ``torch.distributed`` is initialized, int16
    tensors are returned as int32 copies.

    torch's functions for state dicts may gather or broadcast the state, and neither NCCL nor gloo
    supports int16. A load converts the copies back without loss. A view as a 16-bit floating dtype
    would not work, because torch's functions convert the values of floating tensors.
    """
    if not dist.is_available() or not dist.is_initialized():
        return dict(state)
    return {
        key: value.int() if isinstance(value, Tensor) and value.dtype == torch.int16 else value
        for key, value in state.items()
    }


def with_params(group: Mapping[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    """Return a saved group with only the parameters at some positions."""
    some = dict(group)
    for key in _PARALLEL:
        if key in group:
            some[key] = [group[key][position] for position in positions]
    return some


def check_is_state_dict(state_dict: Any) -> None:
    """Raise ValueError unless the argument has the form of an optimizer's state dict, and its
    groups have an index for each parameter.

    Raises:
        ValueError: an entry is missing, has a wrong type, or occurs twice.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"state_dict is a {type(state_dict).__name__}; pass a dict with 'state' and "
            "'param_groups'"
        )
    for key, kind in (("state", Mapping), ("param_groups", list)):
        if not isinstance(state_dict.get(key), kind):
            raise ValueError(
                f"state_dict[{key!r}] is {type(state_dict.get(key)).__name__}; pass a result of an "
                "optimizer's state_dict()"
            )
    for index, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise ValueError(
                f"param_groups[{index}] of the state dict has no list 'params'; pass a result of "
                "an optimizer's state_dict()"
            )
        for key in _PARALLEL[1:]:
            if key in group and len(group[key]) != len(group["params"]):
                raise ValueError(
                    f"param_groups[{index}] of the state dict has {len(group['params'])} params "
                    f"and {len(group[key])} {key}; give each parameter one entry"
                )
    groups = state_dict["param_groups"]
    counts = Counter(entry for group in groups for entry in group["params"])
    if twice := [str(entry) for entry, count in counts.items() if count > 1]:
        raise ValueError(
            f"parameter {names_in_words(twice)} is in the state dict's param_groups more than "
            "once; list each parameter once"
        )
    unknown = state_dict["state"].keys() - {index for group in groups for index in group["params"]}
    if unknown:
        raise ValueError(
            f"the state dict has state for {names_in_words(sorted(map(str, unknown)))}, but none "
            "of its param groups has such a parameter; remove that state, or add the parameter"
        )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return copies of a saved group's hyperparameters, because a shared tensor would change with
    the saved group."""
    return {key: deepcopy(value) for key, value in group.items() if key not in _OWN}


def _match_by_position(live: ParamGroups, saved: Sequence[dict[str, Any]]) -> GroupMatch:
    live_sizes = [len(group["params"]) for group in live]
    saved_sizes = [len(group["params"]) for group in saved]
    if live_sizes != saved_sizes:
        raise ValueError(
            f"param groups do not match: this optimizer has groups of {live_sizes} parameters, "
            f"the saved state has {saved_sizes}. Build both optimizers from "
            "model.named_parameters() to match them by name; read a state dict of torch, apex, "
            "Megatron or DeepSpeed with mp_optim.apps.convert"
        )
    saved_ids = (index for group in saved for index in group["params"])
    slots = (slot for slot, _ in iter_slots(live))
    index_of = dict(zip(slots, saved_ids, strict=True))
    settings = [_settings(group) for group in saved]
    return GroupMatch(index_of, settings, _checksums(index_of, saved))


def _checksums(index_of: Mapping[Slot, Any], saved: Sequence[dict[str, Any]]) -> dict[Slot, int]:
    """Return the checksum of each slot that has one in the saved groups.

    ``torch.distributed.checkpoint`` replaces the indices of parameters by names and may reorder the
    names, but does not reorder the list of checksums. So checksums are used only if the saved index
    is an integer.
    """
    known: dict[int, int] = {}
    for group in saved:
        for index, value in zip(group["params"], group.get(CHECKSUMS, ()), strict=False):
            if isinstance(index, int) and isinstance(value, int):
                known[index] = value
    return {slot: known[index] for slot, index in index_of.items() if index in known}


def match_by_name(
    live: ParamGroups, saved: Sequence[dict[str, Any]], wanted: Mapping[Slot, str]
) -> GroupMatch:
    """Match saved groups to live ones by the names of their parameters.

    Args:
        live: the optimizer's param groups.
        saved: the saved param groups.
        wanted: the unique name of each live slot.

    Raises:
        ValueError: a parameter is only on one side, or saved groups that become one group have
            different settings.
    """
    named = [
        (name, index, number)
        for number, group in enumerate(saved)
        for name, index in zip(group.get("param_names", ()), group["params"], strict=True)
    ]
    canonical = matched_names((name for name, *_ in named), wanted.values())
    places = {canonical[name]: place for name, *place in named}
    if len(places) < len(named):
        counts = Counter(canonical[name] for name, *_ in named)
        twice = [name for name, count in counts.items() if count > 1]
        raise ValueError(
            f"{names_in_words(twice)} is in the saved param_groups more than once; give each "
            "parameter a unique name"
        )
    missing = sorted(set(wanted.values()) - places.keys())
    unexpected = sorted(places.keys() - set(wanted.values()))
    if missing or unexpected:
        raise ValueError(
            f"saved state does not fit this model: missing {missing}, unexpected {unexpected}; "
            "load state of the same model"
        )
    settings = []
    for index, group in enumerate(live):
        slots = (Slot(index, position) for position in range(len(group["params"])))
        sources = [places[wanted[slot]][1] for slot in slots]
        settings.append(_merged(index, saved, list(dict.fromkeys(sources))))
    index_of = {slot: places[name][0] for slot, name in wanted.items()}
    return GroupMatch(index_of, settings, _checksums(index_of, saved))


def _merged(index: int, saved: Sequence[dict[str, Any]], sources: Sequence[int]) -> dict[str, Any]:
    """Return the common settings of saved groups that become one live group.

    Args:
        index: index of the live group, for the error.
        saved: all saved groups.
        sources: indices of the saved groups that become this group.

    Raises:
        ValueError: the settings differ; the message has their names.
    """
    settings = [_settings(saved[source]) for source in sources]
    if len(settings) < 2:
        return settings[0] if settings else {}
    differing = []
    for key in dict.fromkeys(chain.from_iterable(settings)):
        values = [_plain(some.get(key)) for some in settings]
        if any(value != values[0] for value in values):
            differing.append(f"{key} is {values}")
    if differing:
        raise ValueError(
            f"param group {index} takes parameters from saved groups {sorted(sources)}: their "
            f"hyperparameters cannot be merged ({'; '.join(differing)}); "
            "group the parameters as they were saved"
        )
    return settings[0]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def checked_match(
    live: ParamGroups,
    saved: Sequence[dict[str, Any]],
    check_settings: Callable[[dict[str, Any]], None],
) -> GroupMatch:
    """Match saved groups to live ones, and check the saved settings.

    Parameters are matched by FQN, or by position if names are missing or not unique.

    Args:
        live: the optimizer's param groups.
        saved: the saved param groups.
        check_settings: takes a group's settings, and raises if one is out of range.

    Raises:
        ValueError: a parameter is only on one side, a group differs in size, saved groups that
            become one group have different settings, or a setting is out of range.
    """
    if not all("param_names" in group for group in (*live, *saved) if group["params"]):
        match = _match_by_position(live, saved)
    else:
        wanted = {slot: slot_name(live, slot) for slot, _ in iter_slots(live)}
        named = [name for group in saved for name in group.get("param_names", ())]
        if len({*wanted.values()}) == len(wanted) and len({*named}) == len(named):
            match = match_by_name(live, saved, wanted)
        else:
            # A match by position is wrong if the names are in another order.
            own = list(wanted.values())
            pairs = zip(own, without_wrappers(own), without_wrappers(named), strict=False)
            if differing := [name for name, here, there in pairs if here != there]:
                counts = Counter(named) | Counter(own)
                twice = [name for name, count in counts.items() if count > 1]
                raise ValueError(
                    "parameters are matched by position, because the name "
                    f"{names_in_words(twice)} is not unique, but the saved names differ from "
                    f"{differing[0]} on; build the groups in the saved order, or give each "
                    "parameter a unique name"
                )
            match = _match_by_position(live, saved)
    for index, (group, settings) in enumerate(zip(live, match.settings, strict=True)):
        try:
            check_settings({**group, **settings})
        except (TypeError, ValueError) as error:
            raise ValueError(f"param group {index} of the saved state: {error}") from error
    return match


# -- loading: check all state before the first write ---------------------------------------------

_KEPT_BYTES = 64 << 20
"""Bytes of converted state that a load keeps between check and write. State beyond this limit is
converted twice, which bounds the memory of a load."""


class StateLoad:
    """One load of saved state. The constructor checks all state, and :meth:`write` copies the
    state into the slots.

    Args:
        match: the saved entry and settings of each slot.
        saved: the state dict's ``"state"``.
        state_of: returns the live state of a slot.
        convert: True to allow a loss of bits.

    Attributes:
        without_average: names of parameters whose saved state has no average, although this
            optimizer keeps averages.

    Raises:
        ValueError: state is missing, does not fit or would lose bits; the message has the names of
            the parameters.
    """

    def __init__(
        self,
        match: GroupMatch,
        saved: Mapping[Any, Any],
        state_of: Callable[[Slot], SlotState],
        convert: bool,
    ) -> None:
        self._match, self._state_of, self._convert = match, state_of, convert
        self._saved: dict[Slot, State] = {}
        self._fitted: dict[Slot, State] = {}
        self.without_average: list[str] = []
        missing: list[str] = []
        for slot, index in match.index_of.items():
            state, own = saved.get(index) or {}, state_of(slot)
            if not isinstance(state, dict):
                raise ValueError(
                    f"state of {own.name} is a {type(state).__name__}, not a dict; pass a result "
                    "of an optimizer's state_dict()"
                )
            # No saved state is an error, except for a slot without a main param whose store
            # allocates state late. Such a slot is loaded (reset) only if it has live state;
            # otherwise it is left out.
            if not state and (own.main is not None or not own.store.allocates_late):
                missing.append(own.name)
            elif state or own.live():
                self._saved[slot] = state
        if missing:
            raise ValueError(
                f"the state dict has no state for {len(missing)} of {len(match.index_of)} "
                f"parameters: {names_in_words(missing)}. The state dict may have been saved "
                "before the first step, or while these parameters were frozen. Load a complete "
                "state dict or none; if these parameters were never trained, freeze them "
                "(requires_grad_(False)) during the load"
            )

        left = _KEPT_BYTES
        for slot, state in self._saved.items():
            own = state_of(slot)
            fitted = own.fit(state, convert, match.checksums.get(slot))
            if AVERAGE in fitted and AVERAGE not in state:
                self.without_average.append(own.name)
            # Count only tensors that fit() allocated: the saved state lacks their key, or has them
            # in another dtype.
            left -= sum(
                value.nbytes
                for key, value in fitted.items()
                if isinstance(value, Tensor)
                and value.dtype != getattr(state.get(key), "dtype", None)
            )
            if left >= 0:
                self._fitted[slot] = fitted

    def write(self) -> None:
        """Copy the checked states into the slots."""
        for slot, saved in self._saved.items():
            state, fitted = self._state_of(slot), self._fitted.pop(slot, None)
            state.load(state.fit(saved, self._convert) if fitted is None else fitted)

    def write_model(self) -> list[str]:
        """Round main params into the model's parameters. Return the names of parameters that had
        other values."""
        written = []
        for slot, saved in self._saved.items():
            checksum = None if self._convert else self._match.checksums.get(slot)
            if (state := self._state_of(slot)).finish_load(saved, checksum):
                written.append(state.name)
        return written
