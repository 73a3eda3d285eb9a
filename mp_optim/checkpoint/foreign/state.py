"""What all formats have in common: state by parameter name, and the settings of param groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mp_optim.process.host_memory import as_tensor

STEP = "step"
MASTER = "master_param"
"""Key of the FP32 value of a parameter."""


@dataclass(frozen=True)
class ForeignGroup:
    """Names of a param group's parameters in order, and its hyperparameters under their library's
    names."""

    names: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ForeignState:
    """Optimizer state by parameter name.

    Attributes:
        groups: every parameter once.
        state: for each name its state tensors: ``step`` (FP32, 0-d), moments under torch's keys
            (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, ...) in the parameter's shape,
            ``master_param`` (FP32) if there is one. Empty for a parameter that was never stepped.
        grad_scaler: Megatron's dynamic loss scale, if there was one.
    """

    groups: tuple[ForeignGroup, ...]
    state: Mapping[str, Mapping[str, Tensor]]
    grad_scaler: Mapping[str, Any] | None = None

    @property
    def names(self) -> list[str]:
        """All names in order."""
        return [name for group in self.groups for name in group.names]

    def with_masters(self, masters: Mapping[str, Tensor]) -> ForeignState:
        """The same state, with FP32 values of some parameters by name."""
        state = dict(self.state)
        for name in masters.keys() & state.keys():
            state[name] = {**state[name], MASTER: masters[name]}
        return replace(self, state=state)

    def renamed(self, rename: Callable[[str], str]) -> ForeignState:
        """The same state under other names.

        Raises:
            ValueError: two parameters would have one name.
        """
        new = {name: rename(name) for name in self.names}
        if len(set(new.values())) < len(new):
            raise ValueError(
                f"two parameters would be called {_repeated(new.values())}"
            )
        groups = [
            replace(group, names=tuple(map(new.__getitem__, group.names)))
            for group in self.groups
        ]
        state = {new[name]: value for name, value in self.state.items()}
        return replace(self, groups=tuple(groups), state=state)


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def names_of_groups(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None
) -> list[tuple[str, ...]]:
    """The names of each group's parameters: its own ``param_names``, or ``names``, for all groups
    one after the other.

    Raises:
        ValueError: there are no names, not as many as parameters, or some twice.
    """
    counts = [len(group["params"]) for group in groups]
    if names is None:
        if not all("param_names" in group for group in groups if group["params"]):
            raise ValueError(
                f"the state has no param_names; pass names= for its groups of {counts} parameters, "
                "in the order in which its optimizer was given them"
            )
        names = [name for group in groups for name in group.get("param_names", ())]
    if len(names) != sum(counts):
        raise ValueError(
            f"{len(names)} names for groups of {counts} parameters, {sum(counts)} together"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"names occur twice: {_repeated(names)}")
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [
        tuple(names[end - count : end]) for end, count in zip(ends, counts, strict=True)
    ]


def positional_state(
    state_dict: Mapping[str, Any],
    names: Sequence[str] | None,
    step: float | None = None,
) -> ForeignState:
    """A torch-shaped state dict by name. Where a parameter's state has no ``step``, it is its
    group's, or ``common_step`` (Megatron), or ``step``.

    Raises:
        ValueError: names are missing, a value is no tensor or number, or nothing says the step.
    """
    if not {"param_groups", "state"} <= state_dict.keys():
        raise ValueError(
            f"no state dict of an optimizer: it has {sorted(map(str, state_dict))}, not "
            "param_groups and state; is it under one of these keys?"
        )
    groups, states = state_dict["param_groups"], state_dict["state"]
    common = states.get("common_step", step)
    tensors: dict[str, dict[str, Tensor]] = {}
    named = names_of_groups(groups, names)
    for group, of_group in zip(groups, named, strict=True):
        for name, index in zip(of_group, group["params"], strict=True):
            tensors[name] = _tensors(
                name, states.get(index, {}), group.get(STEP, common)
            )
    claimed = {index for group in groups for index in group["params"]}
    unclaimed = sorted(map(str, states.keys() - claimed - {"common_step"}))
    if unclaimed:
        raise ValueError(
            f"the state has entries that are in no param group: {unclaimed}"
        )
    return ForeignState(
        tuple(map(ForeignGroup, named, map(_settings, groups))), tensors
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: group[key] for key in group if key not in ("params", "param_names", STEP)
    }


def _tensors(name: str, state: Mapping[str, Any], step: Any) -> dict[str, Tensor]:
    if not state:
        return {}
    given = {key: value for key, value in state.items() if value is not None}
    given.setdefault(STEP, step)
    if given[STEP] is None:
        raise ValueError(
            f"the state of {name} has no step, and neither has its group; pass step=, the number "
            "of steps taken (Adam's bias correction depends on it)"
        )
    odd = sorted(
        key
        for key, value in given.items()
        if not isinstance(value, (Tensor, int, float))
    )
    if odd:
        raise ValueError(f"the state of {name} holds {odd}, which are no tensors")
    return {
        key: as_tensor(value).to(torch.float32).reshape(())
        if key == STEP
        else as_tensor(value)
        for key, value in given.items()
    }
