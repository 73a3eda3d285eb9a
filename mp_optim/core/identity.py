"""Slots: a parameter is identified by its position in the param groups, not by its tensor.

Mixed precision, FSDP2 and tensor parallelism replace tensors, but the pair ``(group, position)``
stays. All state in this package is keyed by slot. This module also checks param groups that callers
edit or assign, and exchanges changed settings between optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from mp_optim.config.setting_checks import RefusedSettings, plain_setting
from mp_optim.core.names import bare_name

ParamGroups = list[dict[str, Any]]


class Slot(NamedTuple):
    """The identity of a parameter.

    Attributes:
        group: index of the parameter's group in ``param_groups``.
        position: index of the parameter in the group's ``params``.
    """

    group: int
    position: int


def iter_slots(param_groups: ParamGroups) -> Iterator[tuple[Slot, Tensor]]:
    """Yield every slot with its present tensor, in group order."""
    for index, group in enumerate(param_groups):
        for position, param in enumerate(group["params"]):
            yield Slot(index, position), param


_OF_EACH = ("params", "param_names", "fqns")
"""Keys of a param group whose values have one entry for each parameter."""


def all_params(param_groups: ParamGroups) -> list[Tensor]:
    """Return the present tensors of all slots, in slot order."""
    return [*chain.from_iterable(map(itemgetter("params"), param_groups))]


def param_at(param_groups: ParamGroups, slot: Slot) -> Tensor:
    """Return the present tensor of a slot."""
    param: Tensor = param_groups[slot.group]["params"][slot.position]
    return param


def group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters: all entries except parameters and their names."""
    return {key: value for key, value in group.items() if key not in _OF_EACH}


def make_plain(group: Any) -> None:
    """Convert settings of a group that are not plain data, such as numpy numbers, in place. A state
    dict with the group can then be saved."""
    for key, value in group.items() if isinstance(group, dict) else ():
        if key not in _OF_EACH and (plain := plain_setting(value)) is not value:
            group[key] = plain


def with_names(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group with ``params`` as (name, tensor) pairs, the form in which torch
    accepts names."""
    plain = {key: value for key, value in group.items() if key != "param_names"}
    names = group.get("param_names")
    if names is not None:
        plain["params"] = zip(names, group["params"], strict=True)
    return {**plain, "params": list(plain["params"])}


def slot_name(param_groups: ParamGroups, slot: Slot) -> str:
    """Return the FQN of a slot without the parts that module wrappers add. Without names in the
    group, return ``group<g>.param<i>``.

    Names are in ``param_names`` or ``fqns``. torch refuses ``param_names`` in a group without
    parameters, so the groups of executors have ``fqns``.
    """
    group = param_groups[slot.group]
    names: Sequence[str] | None = group.get("param_names") or group.get("fqns")
    return bare_name(names[slot.position]) if names else f"group{slot.group}.param{slot.position}"


def stream_of(name: str, first_element: int = 0) -> int:
    """Return the random stream of a parameter.

    The 64-bit hash of the name gives the stream (lower 32 bits) and the index of element 0 (upper
    32 bits). So two parameters draw the same number for an element only if all 64 bits are equal.

    Args:
        name: FQN of the parameter.
        first_element: row-major index of the first local element.
    """
    digest = blake2b(name.encode(), digest_size=8).digest()
    stream, index = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    return stream | (index + first_element) << 32


# -- groups that callers edit or assign -----------------------------------------------------------

_OF_THE_MODEL = ("param_names", "fqns", "is_expert_parallel")
"""Entries of groups that are not settings. If an assigned group lacks such an entry, the old entry
stays."""


def sizes_of(groups: ParamGroups) -> list[int]:
    """Return the number of parameters of each group."""
    return [len(group["params"]) for group in groups]


def edited_lists(sizes: Sequence[int], added: Sequence[int]) -> ValueError:
    """Return the error about groups whose lists the caller edited.

    Args:
        sizes: present number of parameters in each group.
        added: number of parameters that each group had when it was registered.
    """
    fact = f"param_groups has {len(sizes)} groups now, and {len(added)} were registered"
    for index, (now, before) in enumerate(zip(sizes, added, strict=False)):
        if now != before:
            fact = f"param_groups[{index}] has {now} parameters now, and {before} were registered"
            break
    return ValueError(
        f"{fact}: groups and parameters cannot be added or removed by editing the lists. Add a "
        "group with add_param_group; freeze a parameter (requires_grad_(False)) to leave it out, "
        "or build another optimizer"
    )


def check_assigned(live: ParamGroups, groups: Any, defaults: Mapping[str, Any]) -> None:
    """Raise ValueError if assigned groups cannot replace the live groups. Copy missing names from
    the live groups into the assigned groups.

    Args:
        live: the live groups.
        groups: the assigned groups.
        defaults: the optimizer's default settings.

    Raises:
        ValueError: the number of groups or parameters differs, or a setting is missing.
    """
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise ValueError(
            "param_groups = ...: the value is not a list of groups; assign a list of dicts with a "
            "list 'params' each"
        )
    if sizes_of(groups) != sizes_of(live):
        raise edited_lists(sizes_of(groups), sizes_of(live))
    for index, (before, group) in enumerate(zip(live, groups, strict=True)):
        if missing := [key for key in defaults if key in before and key not in group]:
            raise ValueError(
                f"param_groups = ...: group {index} has no {', '.join(missing)}; copy the other "
                "settings, as in {**group, 'lr': 0.1}"
            )
    for before, group in zip(live, groups, strict=True):
        for key in _OF_THE_MODEL:
            if key in before:
                group.setdefault(key, before[key])


_NOTHING = object()


class SharedSettings:
    """The settings of param groups that several optimizers share, as of the last exchange.

    An exchange copies a changed setting to all other optimizers. Callers change settings of the
    outermost optimizer. The optimizers below it change step counts and computed learning rates. If
    both a caller and an optimizer below changed a setting, the caller's value is used.
    """

    def __init__(self) -> None:
        self._seen: list[list[dict[str, Any]]] = []

    def forget_groups(self, count: int) -> None:
        """Drop the copies of all groups after the first ``count``."""
        del self._seen[count:]

    def exchange(self, groups: ParamGroups, below: Sequence[ParamGroups]) -> None:
        """Make the settings of groups with the same index equal in all optimizers.

        Args:
            groups: groups of the outermost optimizer.
            below: groups of each optimizer below.

        Raises:
            RefusedSettings: two optimizers below step parameters of one group, and wrote different
                values for a setting.
        """
        for index, group in enumerate(groups):
            alike = [group, *(of_one[index] for of_one in below)]
            if index == len(self._seen):
                self._seen.append([{} for _ in alike])
            for one, seen in zip(alike, self._seen[index], strict=True):
                same_keys = list(one) == list(seen)
                if not (same_keys and all(map(is_, one.values(), seen.values()))):
                    _agree(index, alike, self._seen[index])
                    self._seen[index] = [dict(each) for each in alike]
                    break


def _agree(index: int, alike: Sequence[dict[str, Any]], seen: Sequence[Mapping[str, Any]]) -> None:
    """Copy changed settings of one group between the optimizers. If the caller deleted a setting,
    remove it from the groups of the optimizers below.

    Args:
        index: index of the group, for the error.
        alike: the group of the outermost optimizer, then the group of each optimizer below.
        seen: copies of these groups from the last exchange.
    """
    above, *below = alike
    by_caller, deleted = _changed(above, seen[0]), seen[0].keys() - above.keys()
    for group in below:
        for key in deleted.difference(_OF_EACH):
            group.pop(key, None)
    news: dict[str, Any] = {}
    for group, before in zip(below, seen[1:], strict=True):
        if not group["params"]:
            # An optimizer with an empty group steps no parameter of the group, so ignore the
            # settings of that optimizer.
            continue
        for key, value in _changed(group, before).items():
            if key in by_caller:
                continue
            if not _is_same(news.setdefault(key, value), value):
                raise RefusedSettings(
                    f"param group {index}: the rule has set {key} to {news[key]!r} on the device "
                    f"and to {value!r} on the host, because the rule computes {key} from all "
                    "parameters of a group; set offload_fraction to 0 or 1, or put device and "
                    "host parameters into separate groups"
                )
    for group in alike:
        group.update({**news, **by_caller})
        make_plain(group)


def _changed(group: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in group.items()
        if key not in _OF_EACH and not _is_same(value, seen.get(key, _NOTHING))
    }


def _is_same(one: Any, other: Any) -> bool:
    """True if two settings are equal. Tensors and unknown objects are equal only if they are the
    same object."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple) and len(one) == len(other):
        return all(map(_is_same, one, other))
    return isinstance(one, bool | int | float | str) and bool(one == other)
