"""Optimizer state by parameter name. Readers convert other libraries' formats to this form."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mp_optim.apps.convert.torch_files import load_plain_file
from mp_optim.checkpoint.common import read_common
from mp_optim.checkpoint.entries import MODEL, key_and_fqn
from mp_optim.checkpoint.reading import open_checkpoint
from mp_optim.core import Slot, group_settings, local_tensor, param_at
from mp_optim.core.keyed_optimizer import SlotKeyedOptimizer, load_checked
from mp_optim.core.names import matched_names
from mp_optim.core.param_attributes import main_param_of
from mp_optim.core.slot_state import AVERAGE, MASTER, REMAINDER, SCALE, STEP
from mp_optim.core.state_dict import plain_groups
from mp_optim.core.tensors import whole_tensor
from mp_optim.host.calls import in_own_modes
from mp_optim.host.host_memory import as_tensor
from mp_optim.host.torch_types import is_dtensor

_NO_SETTINGS = ("params", "param_names", STEP)
"""Keys of a param group that are not settings."""


@dataclass(frozen=True)
class ForeignGroup:
    """A param group of another library.

    Attributes:
        names: names of the group's parameters, in order.
        settings: hyperparameters under their library's names.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ForeignState:
    """Optimizer state by parameter name.

    Attributes:
        groups: param groups; every parameter is in one of them.
        state: state tensors of each parameter: ``step`` (FP32, 0-d), moments under torch's keys
            (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, ...) in the parameter's shape, and an
            optional ``master_param`` (FP32). Empty for a parameter without a step.
        grad_scaler: Megatron's dynamic loss scale; None without a loss scale.
    """

    groups: tuple[ForeignGroup, ...]
    state: Mapping[str, Mapping[str, Tensor]]
    grad_scaler: Mapping[str, Any] | None = None

    @property
    def names(self) -> list[str]:
        """Names of all parameters, in the order of the groups."""
        return [name for group in self.groups for name in group.names]

    def with_masters(self, masters: Mapping[str, Tensor]) -> ForeignState:
        """Return this state with FP32 values of some parameters, by name."""
        state = dict(self.state)
        for name in masters.keys() & state.keys():
            state[name] = {**state[name], MASTER: masters[name]}
        return replace(self, state=state)

    def renamed(self, rename: Callable[[str], str]) -> ForeignState:
        """Return this state under other names.

        Raises:
            ValueError: two parameters would have one name.
        """
        new = {name: rename(name) for name in self.names}
        if len(set(new.values())) < len(new):
            raise ValueError(
                f"two parameters would have the name {_repeated(new.values())}; give each "
                "parameter a unique name"
            )
        groups = [
            replace(group, names=tuple(map(new.__getitem__, group.names))) for group in self.groups
        ]
        state = {new[name]: value for name, value in self.state.items()}
        return replace(self, groups=tuple(groups), state=state)


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def names_of_groups(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None
) -> list[tuple[str, ...]]:
    """Return the names of each group's parameters: the group's ``param_names``, or its range of
    ``names``.

    Args:
        groups: param groups.
        names: names of the parameters of all groups, in order; None if the groups have
            ``param_names``.

    Raises:
        ValueError: names are missing, fewer or more than parameters, or given twice.
    """
    counts = [len(group["params"]) for group in groups]
    if names is None:
        if not all("param_names" in group for group in groups if group["params"]):
            raise ValueError(
                f"the state has no param_names; pass names= for its groups of {counts} parameters, "
                "in the order of its optimizer's parameters"
            )
        names = [name for group in groups for name in group.get("param_names", ())]
    if len(names) != sum(counts):
        raise ValueError(
            f"names= has {len(names)} names, but the groups have {counts} parameters, "
            f"{sum(counts)} in total; pass one name per parameter"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"names= has {_repeated(names)} twice; give each parameter a unique name")
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [tuple(names[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def positional_state(
    state_dict: Mapping[str, Any], names: Sequence[str] | None, step: float | None = None
) -> ForeignState:
    """Return the state of a torch-shaped state dict by parameter name.

    A parameter without ``step`` gets the step of its group, or ``common_step`` (Megatron), or the
    argument ``step``.

    Args:
        state_dict: state dict with ``state`` and ``param_groups``.
        names: names of all parameters, in order; None if the groups have ``param_names``.
        step: number of steps taken, if the state dict does not have it.

    Raises:
        ValueError: names are missing, a value is neither a tensor nor a number, or the step is
            unknown.
    """
    if not {"param_groups", "state"} <= state_dict.keys():
        raise ValueError(
            f"the state dict has the keys {sorted(map(str, state_dict))} instead of param_groups "
            "and state; if the optimizer's state dict is nested in this dict, pass the nested "
            "dict (--key of mp-optim convert)"
        )
    groups, states = state_dict["param_groups"], state_dict["state"]
    common = states.get("common_step", step)
    tensors: dict[str, dict[str, Tensor]] = {}
    foreign = []
    for group, of_group in zip(groups, names_of_groups(groups, names), strict=True):
        for name, index in zip(of_group, group["params"], strict=True):
            tensors[name] = _tensors(name, states.get(index, {}), group.get(STEP, common))
        settings = {key: group[key] for key in group if key not in _NO_SETTINGS}
        foreign.append(ForeignGroup(of_group, settings))
    claimed = {index for group in groups for index in group["params"]}
    unclaimed = sorted(map(str, states.keys() - claimed - {"common_step"}))
    if unclaimed:
        raise ValueError(
            f"the state has entries of parameters in no param group: {unclaimed}; remove them"
        )
    return ForeignState(tuple(foreign), tensors)


def _tensors(name: str, state: Mapping[str, Any], step: Any) -> dict[str, Tensor]:
    if not state:
        return {}
    given = {key: value for key, value in state.items() if value is not None}
    given.setdefault(STEP, step)
    if given[STEP] is None:
        raise ValueError(
            f"the state of {name} has no step, and neither has its group; pass step=, the number "
            "of steps taken (Adam's bias correction reads the number)"
        )
    odd = sorted(key for key, value in given.items() if not isinstance(value, (Tensor, int, float)))
    if odd:
        raise ValueError(
            f"the state of {name} has {odd}, which are neither tensors nor numbers; remove these "
            "entries"
        )
    return {
        key: as_tensor(value).reshape(()).to(torch.float32) if key == STEP else as_tensor(value)
        for key, value in given.items()
    }


# -- into an optimizer, and out of it -------------------------------------------------------------


@in_own_modes
def import_state(
    optimizer: SlotKeyedOptimizer,
    foreign: ForeignState,
    *,
    main_from_model: bool = False,
    convert: bool = False,
) -> None:
    """Load foreign state by parameter name. Hyperparameters keep their configured values.

    The model's parameters are set to the imported FP32 values, rounded. A parameter without a step
    gets zeros as state and keeps its value. For sharded parameters, every rank passes the whole
    state and loads its shard.

    Args:
        optimizer: the optimizer, or the object that holds it.
        foreign: the state to load.
        main_from_model: True to use the model's value for a 16-bit parameter without an FP32 value.
        convert: True to round state to the dtypes configured here, even if bits are lost.

    Raises:
        ValueError: names or shapes do not match, or bits would be lost; the message lists them.
            Nothing was written.
    """
    stack: Any = optimizer.stack
    # A changed setting of a param group can change which state a slot has. So copy the settings to
    # every part of the optimizer before state is read.
    stack.share_settings()
    slots = {stack.slot_name(slot): slot for slot in stack.slots() if stack.slot_state(slot)}
    foreign = foreign.renamed(matched_names(foreign.names, slots).__getitem__)
    missing = sorted(slots.keys() - set(foreign.names))
    unknown = sorted(set(foreign.names) - slots.keys())
    if missing or unknown:
        raise ValueError(
            f"the state's parameter names do not fit this optimizer: missing {missing}, unknown "
            f"{unknown}; rename the parameters with foreign.renamed(...)"
        )
    whole: dict[str, Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    groups = plain_groups(stack.param_groups)
    for name, slot in slots.items():
        param = param_at(stack.param_groups, slot)
        own = stack.slot_state(slot)
        given = _fitting(name, param, foreign.state.get(name, {}), own, main_from_model)
        if AVERAGE in own and MASTER in given:
            given.setdefault(AVERAGE, given[MASTER].to(own[AVERAGE].dtype))
        if MASTER in foreign.state.get(name, {}):
            whole[name] = given[MASTER]
        if not {MASTER, REMAINDER} & own.keys():
            given.pop(MASTER, None)
        state[groups[slot.group]["params"][slot.position]] = given
    loaded: dict[str, Any] = {"param_groups": groups, "state": state}
    scaler = stack.grad_scaler
    if scaler is not None:
        loaded["grad_scaler"] = dict(foreign.grad_scaler or scaler.state_dict())
    load_checked(stack, loaded, convert=convert)
    # The optimizer keeps copies of FP32 parameters that it steps on the host. This call sets these
    # copies, too.
    stack.reload_model_params(whole)
    for name, value in whole.items():
        param = param_at(stack.param_groups, slots[name])
        # With remainders, the load has rounded the parameter so that the parameter fits the
        # remainder. Rounding the whole value again could give other bits.
        if REMAINDER in stack.slot_state(slots[name]):
            main = main_param_of(param)
            value = param if main is None else main
        local_tensor(param).copy_(local_tensor(value))


def _fitting(
    name: str,
    param: Tensor,
    foreign: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    main_from_model: bool,
) -> dict[str, Tensor]:
    if not foreign:
        zeros = {
            key: torch.zeros_like(value)
            for key, value in own.items()
            if key not in (MASTER, REMAINDER, AVERAGE) and not key.endswith("_scale")
        }
        return {**zeros, MASTER: param.detach().float()}
    given = {
        key: value if key == STEP else _like(f"{name}.{key}", param, value)
        for key, value in foreign.items()
    }
    if MASTER not in given and param.dtype != torch.float32:
        if not main_from_model:
            raise ValueError(
                f"{name} is {param.dtype}, and the state has no FP32 main param for the "
                "parameter; pass main_from_model=True to start from the model's values, which "
                "have fewer bits"
            )
        given[MASTER] = param.detach().float()
    return given


def _like(label: str, param: Tensor, value: Tensor) -> Tensor:
    """Return a whole tensor with the parameter's shape and layout. A flat tensor is reshaped in
    row-major order."""
    if value.dim() == 1 and value.numel() == param.numel():
        value = value.reshape(param.shape)
    if value.shape != param.shape:
        raise ValueError(
            f"{label}: saved shape {tuple(value.shape)}, expected {tuple(param.shape)}; "
            "import the state into the saved model"
        )
    if not is_dtensor(param):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    spread = DTensor.from_local(
        value.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return spread.redistribute(placements=param.placements)


@in_own_modes
def export_state(optimizer: SlotKeyedOptimizer) -> ForeignState:
    """Return the state of all parameters in FP32. A parameter with state also has its FP32 value,
    ``master_param``; a parameter that was never trained has nothing.

    Tensors are whole. For sharded parameters the call is collective. Averages (``ema_decay``) are
    left out, because other libraries' optimizers keep no averages.

    NOTE: tensors that the optimizer stores whole in FP32 are not copied. Write or clone them before
    the next step.
    """
    stack: Any = optimizer.stack
    mains = dict(stack.named_main_params())
    state: dict[str, dict[str, Tensor]] = {}
    for slot in stack.slots():
        name = stack.slot_name(slot)
        found = {
            key: value
            for key, value in stack.full_slot_state(slot).items()
            if key not in (REMAINDER, AVERAGE)
        }
        state[name] = {key: _gathered(value) for key, value in found.items()}
        # Without a first moment (beta1=0), export zeros, because the Adam of other libraries always
        # stores exp_avg.
        if "exp_avg_sq" in found:
            zeros = torch.zeros_like(state[name]["exp_avg_sq"])
            state[name].setdefault("exp_avg", zeros)
        if found:
            state[name][MASTER] = _gathered(mains[name])
    groups: list[ForeignGroup] = []
    for index, group in enumerate(stack.param_groups):
        positions = range(len(group["params"]))
        names = tuple(stack.slot_name(Slot(index, position)) for position in positions)
        groups.append(ForeignGroup(names, group_settings(group)))
    scaler = stack.grad_scaler
    return ForeignState(tuple(groups), state, None if scaler is None else scaler.state_dict())


def _gathered(value: Tensor) -> Tensor:
    return whole_tensor(value) if is_dtensor(value) else value.detach()


# -- in a file, and in a checkpoint ---------------------------------------------------------------

_FORMAT = "mp_optim foreign state 1"


def to_file(foreign: ForeignState, path: str | os.PathLike[str]) -> None:
    """Write the state as plain data for ``torch.load(weights_only=True)``."""
    scaler = foreign.grad_scaler
    groups = [{"names": list(g.names), "settings": dict(g.settings)} for g in foreign.groups]
    states = {}
    for name, state in foreign.state.items():
        # Clone each tensor, because saving a view saves its whole storage.
        states[name] = {key: value.detach().clone() for key, value in state.items()}
    content = {
        "format": _FORMAT,
        "groups": groups,
        "state": states,
        "grad_scaler": None if scaler is None else dict(scaler),
    }
    torch.save(content, path)


def from_file(path: str | os.PathLike[str]) -> ForeignState:
    """Read a file of :func:`to_file`.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file has another format, or is damaged.
    """
    content = load_plain_file(path)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(
            f"{path} was not written by mp-optim convert --target-format mp_optim; read a file of "
            "another format with the function for the format, such as from_torch"
        )
    groups = tuple(
        ForeignGroup(tuple(group["names"]), group["settings"]) for group in content["groups"]
    )
    return ForeignState(groups, content["state"], content["grad_scaler"])


def from_checkpoint(path: str | os.PathLike[str]) -> ForeignState:
    """Return the optimizer's state in the newest version of a ``mp_optim.checkpoint.save`` folder.

    No model is needed.

    Raises:
        FileNotFoundError: the folder has no complete checkpoint.
        ValueError: the checkpoint has no optimizer, or state in compact forms, which no other
            library reads.
    """
    saved = open_checkpoint(path)
    for name in saved.entries:
        key, _ = key_and_fqn(name)
        if key == REMAINDER or SCALE in key:
            raise ValueError(
                f"{saved.version} has state in a compact format ({name}, ...), which other "
                "libraries cannot read; save the checkpoint again with full_precision=True"
            )
    common = read_common(saved.version, saved.files)["optimizer"]
    if common is None:
        raise ValueError(
            f"{saved.version} has no optimizer state; save the checkpoint again with model and "
            "optimizer"
        )
    groups = []
    state: dict[str, dict[str, Tensor]] = {}
    for group in common["param_groups"]:
        names = tuple(group["param_names"])
        state |= {name: {} for name in names}
        groups.append(ForeignGroup(names, group_settings(group)))
    for entry in saved.entries:
        key, name = key_and_fqn(entry)
        if key and name in state:
            state[name][key] = saved.read(entry)
    # An FP32 parameter without a main param has its value in the model, so read the value there.
    for name, tensors in state.items():
        model = saved.entries.get(f"{MODEL}{name}")
        if tensors and MASTER not in tensors and model and model.dtype == torch.float32:
            tensors[MASTER] = saved.read(f"{MODEL}{name}")
    return ForeignState(tuple(groups), state, common.get("grad_scaler"))
