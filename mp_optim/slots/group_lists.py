"""Lists of param groups as callers treat them: edited, assigned, added to in vain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from mp_optim.slots.identity import ParamGroups

_OF_THE_MODEL = ("param_names", "fqns", "is_expert_parallel")
"""What groups have beside settings; a group that is assigned without it keeps it."""


class Grouped(Protocol):
    """What is asked of the optimizer."""

    @property
    def param_groups(self) -> ParamGroups: ...
    def forget_groups(self, count: int) -> None: ...


@contextmanager
def added_whole(optimizer: Grouped) -> Iterator[None]:
    """A group is added inside, here and below: all of it, or nothing where something raises."""
    count = len(optimizer.param_groups)
    try:
        yield
    except BaseException:
        optimizer.forget_groups(count)
        raise


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
            what = (
                f"param_groups[{index}] has {now} parameters, and {before} were added"
            )
            break
    return ValueError(
        f"{what}: groups and parameters cannot be added or taken away by editing the lists. Add a "
        "group by add_param_group; freeze a parameter (requires_grad_(False)) to leave it out, or "
        "build another optimizer"
    )


def check_assigned(live: ParamGroups, groups: Any, defaults: Mapping[str, Any]) -> None:
    """Raise unless these groups can take the place of the live ones; those without names get
    theirs.

    Raises:
        ValueError: groups or parameters are more or fewer, or a setting is missing, naming it.
    """
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list)
        for group in groups
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
