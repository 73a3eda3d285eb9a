"""``state_dict()`` of torch's Adam and AdamW (and of any optimizer whose state is tensors of the
parameter's shape)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mp_optim.checkpoint.foreign.state import MASTER, ForeignState, positional_state

_DEFAULTS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def from_torch(
    state_dict: Mapping[str, Any],
    names: Sequence[str] | None = None,
    *,
    masters: Mapping[str, Tensor] | None = None,
    step: float | None = None,
) -> ForeignState:
    """State of a torch optimizer.

    Args:
        state_dict: as ``state_dict()`` gives it.
        names: of all parameters in the order in which the optimizer was given them; not needed if
            it was given named parameters.
        masters: the FP32 copies that were stepped for 16-bit parameters, by name.
        step: steps taken, for optimizers that do not count them (SGD).

    Raises:
        ValueError: names are missing, or masters are of unknown parameters.
    """
    foreign = positional_state(state_dict, names, step)
    masters = masters or {}
    if unknown := sorted(masters.keys() - set(foreign.names)):
        raise ValueError(
            f"masters of parameters that the optimizer does not have: {unknown}"
        )
    return foreign.with_masters(masters)


def to_torch(foreign: ForeignState, *, param_names: bool = True) -> dict[str, Any]:
    """A state dict that ``torch.optim.AdamW.load_state_dict`` takes, over FP32 parameters (see
    :func:`fp32_params`).

    Args:
        param_names: name the parameters in the groups, as torch does if it was given named ones.
    """
    names = foreign.names
    index_of = {name: index for index, name in enumerate(names)}
    groups = []
    for group in foreign.groups:
        settings = _settings(group.settings)
        settings["params"] = [index_of[name] for name in group.names]
        if param_names:
            settings["param_names"] = list(group.names)
        groups.append(settings)
    stepped = [name for name in names if foreign.state.get(name)]
    state = {index_of[name]: _without_master(foreign.state[name]) for name in stepped}
    return {"state": state, "param_groups": groups}


def _without_master(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != MASTER}


def fp32_params(foreign: ForeignState) -> dict[str, Tensor]:
    """The FP32 values of all parameters that have one, by name."""
    return {
        name: state[MASTER] for name, state in foreign.state.items() if MASTER in state
    }


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With what torch's group needs; AdamW or Adam as it was."""
    decoupled = settings.get("adam_w_mode", _DEFAULTS["decoupled_weight_decay"])
    return {**_DEFAULTS, "decoupled_weight_decay": decoupled, **settings}
