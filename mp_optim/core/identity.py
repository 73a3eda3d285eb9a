"""Slots: a parameter's identity is its place in the param groups, never the tensor that sits there;
and param groups as callers treat them: edited, assigned, with settings that are changed.

Wrappers replace tensors (a mixed-precision wrapper, FSDP2, tensor parallelism); the pair
``(group, position)`` outlives all of that. Everything in this package that has to be found again
later is found by slot.
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
    """The identity of a parameter: index of its param group, position inside that group."""

    group: int
    position: int


def iter_slots(param_groups: ParamGroups) -> Iterator[tuple[Slot, Tensor]]:
    """Every slot with the tensor that sits there now, in group order."""
    for index, group in enumerate(param_groups):
        for position, param in enumerate(group["params"]):
            yield Slot(index, position), param


_OF_EACH = ("params", "param_names", "fqns")
"""Keys of a group that have something for each of its parameters."""


def all_params(param_groups: ParamGroups) -> list[Tensor]:
    """The tensors that sit at the slots now, in slot order."""
    return [*chain.from_iterable(map(itemgetter("params"), param_groups))]


def param_at(param_groups: ParamGroups, slot: Slot) -> Tensor:
    """The tensor that sits at a slot now."""
    param: Tensor = param_groups[slot.group]["params"][slot.position]
    return param


def group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters: all that is not its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _OF_EACH}


def make_plain(group: Any) -> None:
    """Replace a group's settings by plain data, so that a state dict of it can be saved."""
    for key, value in group.items() if isinstance(group, dict) else ():
        if key not in _OF_EACH and (plain := plain_setting(value)) is not value:
            group[key] = plain


def with_names(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a group in the form torch takes names in: ``params`` as (name, tensor) pairs."""
    plain = {key: value for key, value in group.items() if key != "param_names"}
    names = group.get("param_names")
    if names is not None:
        plain["params"] = zip(names, group["params"], strict=True)
    return {**plain, "params": list(plain["params"])}


def has_names(group: dict[str, Any]) -> bool:
    """Whether a group's parameters have names, or :func:`slot_name` makes some up."""
    return bool(group.get("param_names") or group.get("fqns"))


def slot_name(param_groups: ParamGroups, slot: Slot) -> str:
    """Return the FQN of a slot, without wrappers' parts, if its group carries ``param_names`` (or
    ``fqns``: torch forbids the former in a group without parameters, which executors may have);
    else ``group<g>.param<i>``."""
    group = param_groups[slot.group]
    names: Sequence[str] | None = group.get("param_names") or group.get("fqns")
    return bare_name(names[slot.position]) if names else f"group{slot.group}.param{slot.position}"


def stream_of(name: str, first_element: int = 0) -> int:
    """Return the stream of a parameter's random numbers.

    The 64-bit hash of the name gives the stream its lower 32 bits and the index of element 0. So
    two parameters draw the same number for an element only if all 64 bits are equal.

    Args:
        name: of the parameter.
        first_element: index of its first local element, row-major.
    """
    digest = blake2b(name.encode(), digest_size=8).digest()
    stream, index = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    return stream | (index + first_element) << 32


# -- groups as callers treat them -----------------------------------------------------------------

_OF_THE_MODEL = ("param_names", "fqns", "is_expert_parallel")
"""What groups have beside settings; a group that is assigned without it keeps it."""


def sizes_of(groups: ParamGroups) -> list[int]:
    """The number of parameters of each group."""
    return [len(group["params"]) for group in groups]


def edited_lists(sizes: Sequence[int], added: Sequence[int]) -> ValueError:
    """What to say of lists that were edited by hand.

    Args:
        sizes: parameters in each group now. added: as many were added.
    """
    what = f"there are {len(sizes)} param_groups, and {len(added)} were added"
    for index, (now, before) in enumerate(zip(sizes, added, strict=False)):
        if now != before:
            what = f"param_groups[{index}] has {now} parameters, and {before} were added"
            break
    return ValueError(
        f"{what}: groups and parameters cannot be added or taken away by editing the lists. Add a "
        "group by add_param_group; freeze a parameter (requires_grad_(False)) to leave it out, or "
        "build another optimizer"
    )


def check_lists(groups: ParamGroups, added: Sequence[int]) -> None:
    """Raise ValueError if groups, or parameters in them, were added or taken away by editing the
    lists, naming the first group.

    Args:
        added: as many parameters were added to each group; empty before the first group.
    """
    sizes = sizes_of(groups)
    if added and sizes != added:
        raise edited_lists(sizes, added)


def check_assigned(live: ParamGroups, groups: Any, defaults: Mapping[str, Any]) -> None:
    """Raise unless these groups can take the place of the live ones; those without names get
    theirs.

    Raises:
        ValueError: groups or parameters are more or fewer, or a setting is missing, naming it.
    """
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise ValueError(
            "param_groups = ...: they are a list of dicts with a list of 'params' each"
        )
    if sizes_of(groups) != sizes_of(live):
        raise edited_lists(sizes_of(groups), sizes_of(live))
    for index, (before, group) in enumerate(zip(live, groups, strict=True)):
        if missing := [key for key in defaults if key in before and key not in group]:
            raise ValueError(
                f"param_groups = ...: group {index} has no {', '.join(missing)}; take the other "
                "settings along, as {**group, 'lr': 0.1} does"
            )
    for before, group in zip(live, groups, strict=True):
        for key in _OF_THE_MODEL:
            if key in before:
                group.setdefault(key, before[key])


_NOTHING = object()


class SharedSettings:
    """Hands on what was changed in one optimizer's groups since the last time to those of the
    others: what the caller writes down, what an optimizer below writes (steps it counts, the rate
    it found) up. Where both wrote, the caller did so later, or wants it otherwise."""

    def __init__(self) -> None:
        self._seen: list[list[dict[str, Any]]] = []

    def forget_groups(self, count: int) -> None:
        """Forget the groups after the first ``count``."""
        del self._seen[count:]

    def exchange(self, groups: ParamGroups, below: Sequence[ParamGroups]) -> None:
        """Make groups at the same position alike.

        Raises:
            RefusedSettings: two of the optimizers below step parameters of one group, and wrote
                different values for a setting.
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
    above, *below = alike
    told, gone = _changed(above, seen[0]), seen[0].keys() - above.keys()
    for group in below:
        for key in gone.difference(_OF_EACH):
            group.pop(key, None)
    news: dict[str, Any] = {}
    for group, before in zip(below, seen[1:], strict=True):
        if not group["params"]:
            continue  # it steps nothing, so what it writes means nothing
        for key, value in _changed(group, before).items():
            if key in told:
                continue
            if not _is_same(news.setdefault(key, value), value):
                raise RefusedSettings(
                    f"param group {index}: the optimizer that steps its parameters on the device "
                    f"has {key}={news[key]!r}, the one on the host {value!r}. This rule goes by "
                    "all parameters of a group together, so they have to be in one place: use "
                    "offload_fraction 0 or 1, or make a group for each place"
                )
    for group in alike:
        group.update({**news, **told})
        make_plain(group)


def _changed(group: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in group.items()
        if key not in _OF_EACH and not _is_same(value, seen.get(key, _NOTHING))
    }


def _is_same(one: Any, other: Any) -> bool:
    """Whether two settings are one; of tensors and the like, whether they are the same object."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple) and len(one) == len(other):
        return all(map(_is_same, one, other))
    return isinstance(one, bool | int | float | str) and bool(one == other)
