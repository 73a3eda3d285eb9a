"""What a checkpoint consists of: tensors under their names, and which of them a model and an
optimizer need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mp_optim.checkpoint.blocks import is_cut, scales_of_elements
from mp_optim.checkpoint.garbage import uncollected
from mp_optim.checkpoint.index import Saved
from mp_optim.slots import Slot
from mp_optim.slots.loading import Loadable
from mp_optim.slots.names import canonical_names, prefixed
from mp_optim.slots.state_dict import with_params

MODEL = "model."
"""What the names of the model's tensors begin with; the FQN follows."""

STATE = "optimizer.state."
"""What the names of optimizer state begin with; the state's key, a dot and the parameter's FQN
follow."""

_SHOWN = 40
_OTHER_FORMS = {"remainder": "master_param", "master_param": "remainder"}
"""Keys under which the same thing may have been saved."""

Models = nn.Module | Sequence[nn.Module]


class SlotStateful(Loadable, Protocol):
    """What is needed of an optimizer: slots with names and state."""

    def slots(self) -> list[Slot]: ...
    def full_slot_state(self, slot: Slot) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(
        self, state_dict: dict[str, Any], *, convert: bool = False
    ) -> None: ...


def _entry(key: str, name: str) -> str:
    return f"{STATE}{key}.{name}"


def _scale_of(name: str) -> str:
    key, fqn = name.removeprefix(STATE).split(".", 1)
    return _entry(f"{key}_scale", fqn)


# -- the model ------------------------------------------------------------------------------------


def _chunks(models: Models) -> list[tuple[str, nn.Module]]:
    return prefixed([models] if isinstance(models, nn.Module) else list(models))


def _state_dict(models: Models) -> dict[str, Any]:
    """The chunks' state dicts as one, under canonical names."""
    state: dict[str, Any] = {}
    for prefix, chunk in _chunks(models):
        own = chunk.state_dict()
        state |= {
            prefix + short: own[name]
            for name, short in canonical_names(chunk, own).items()
        }
    return state


def params_of(models: Models) -> dict[str, Tensor]:
    """The parameters under the names they have in a checkpoint."""
    params: dict[str, Tensor] = {}
    for prefix, chunk in _chunks(models):
        own = dict(chunk.named_parameters())
        params |= {
            MODEL + prefix + short: own[name]
            for name, short in canonical_names(chunk, own).items()
        }
    return params


def plain_of(models: Models) -> dict[str, Any]:
    """What a model's state dict holds beside tensors (``get_extra_state``), by name."""
    return {
        name: value
        for name, value in _state_dict(models).items()
        if not isinstance(value, Tensor)
    }


def load_model(
    models: Models, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> None:
    """Give a model what :func:`entries_of` and :func:`plain_of` took from it."""
    own_names = (name for name in tensors if name.startswith(MODEL))
    state: dict[str, Any] = {
        name.removeprefix(MODEL): tensors[name] for name in own_names
    }
    state |= plain
    for prefix, chunk in _chunks(models):
        own = canonical_names(chunk, chunk.state_dict())
        chunk.load_state_dict(
            {
                name: state[prefix + short]
                for name, short in own.items()
                if prefix + short in state
            },
            strict=False,
        )


# -- everything -----------------------------------------------------------------------------------


@uncollected()
def entries_of(
    models: Models, optimizer: SlotStateful | None, full_precision: bool = False
) -> dict[str, Tensor]:
    """Every tensor under its name. The tensors are the live ones where that is possible."""
    entries = {
        MODEL + name: value
        for name, value in _state_dict(models).items()
        if isinstance(value, Tensor)
    }
    for slot in optimizer.slots() if optimizer is not None else ():
        assert optimizer is not None
        state = (
            optimizer.full_slot_state(slot)
            if full_precision
            else optimizer.slot_state(slot)
        )
        for key, value in state.items():
            entries[_entry(key, optimizer.slot_name(slot))] = value
    return entries


def unallocated(
    optimizer: SlotStateful | None, saved: Mapping[str, Saved], present: Collection[str]
) -> dict[str, Tensor]:
    """New tensors for saved state of optimizers that allocate theirs when they step first."""
    if optimizer is None:
        return {}
    slots = [slot for slot in optimizer.slots() if optimizer.state_of(slot).takes_any()]
    names = {optimizer.slot_name(slot) for slot in slots}
    return {
        name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for name, entry in saved.items()
        if name.startswith(STATE) and name not in present and _fqn(name) in names
    }


def _fqn(name: str) -> str:
    return name.removeprefix(STATE).split(".", 1)[1]


def in_saved_form(
    tensors: Mapping[str, Tensor], saved: Mapping[str, Saved], *, convert: bool
) -> dict[str, Tensor]:
    """The tensors to read a checkpoint into: the live ones. Where any state was saved in another
    form, new ones for all state, so that a load that is refused for losing bits has changed none.

    Args:
        tensors: of :func:`entries_of`.
        saved: the checkpoint's entries.
        convert: read tensors of the model of another dtype, too.
    """
    if all(
        _dtype(saved.get(name), value.dtype) == value.dtype
        and (name in saved or name.startswith(MODEL))
        for name, value in tensors.items()
    ):
        return dict(tensors)
    model = {
        name: _new_like(value, saved.get(name))
        if convert and _dtype(saved.get(name), value.dtype) != value.dtype
        else value
        for name, value in tensors.items()
        if name.startswith(MODEL)
    }
    own = {name: value for name, value in tensors.items() if name.startswith(STATE)}
    state: dict[str, Tensor] = {}
    for name, value in own.items():
        state |= _as_saved(name, value, saved)
    if state.keys() == own.keys() and all(
        own[name].dtype == value.dtype for name, value in state.items()
    ):
        return {**model, **own}
    return {**model, **state}


def _as_saved(name: str, own: Tensor, saved: Mapping[str, Saved]) -> dict[str, Tensor]:
    """New tensors to read one state tensor into, under the names and of the dtypes it was saved
    with."""
    key, fqn = name.removeprefix(STATE).split(".", 1)
    scale = _entry(f"{key}_scale", fqn)
    if name not in saved:
        other = _entry(_OTHER_FORMS.get(key, ""), fqn)
        if other in saved:
            return {other: _new_like(own, saved[other])}
        if key.endswith("_scale") and _entry(key.removesuffix("_scale"), fqn) in saved:
            return {}
    if scale in saved and _dtype(saved[name], own.dtype) != own.dtype:
        return {
            name: _new_like(own, saved[name]),
            scale: torch.empty(
                saved[scale].shape, dtype=saved[scale].dtype, device="cpu"
            ),
        }
    return {name: _new_like(own, saved.get(name))}


def as_read(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Entries after reading, with the scales of a tensor of which this rank has a part cut to that
    part."""
    result = dict(tensors)
    for name, value in tensors.items():
        if (
            name.startswith(STATE)
            and is_cut(value)
            and (scale := _scale_of(name)) in tensors
        ):
            result[scale] = scales_of_elements(value, tensors[scale])
    return result


def _new_like(own: Tensor, saved: Saved | None) -> Tensor:
    """A tensor to read an entry into, of the layout of ``own`` and the dtype that was saved."""
    return torch.empty_like(own, dtype=_dtype(saved, own.dtype))


def _dtype(saved: Saved | None, default: torch.dtype) -> torch.dtype:
    return default if saved is None else saved.dtype


# -- the optimizer's state as its state dict wants it ---------------------------------------------


def wanted_groups(
    groups: list[dict[str, Any]], names: set[str]
) -> list[dict[str, Any]]:
    """Saved param groups without the parameters that this rank does not have."""
    result = []
    for group in groups:
        kept = [at for at, name in enumerate(group["param_names"]) if name in names]
        if kept or not group["params"]:
            result.append(with_params(group, kept))
    return result


def state_by_index(
    groups: list[dict[str, Any]], tensors: Mapping[str, Tensor]
) -> dict[int, dict[str, Tensor]]:
    """State by the indices of saved param groups."""
    index_of = {
        name: index
        for group in groups
        for name, index in zip(group["param_names"], group["params"], strict=True)
    }
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(STATE):
            key, fqn = name.removeprefix(STATE).split(".", 1)
            if fqn in index_of:
                state.setdefault(index_of[fqn], {})[key] = value
    return state


# -- what does not fit ----------------------------------------------------------------------------


def check_entries(
    where: object,
    saved: Mapping[str, Saved],
    wanted: Mapping[str, Tensor],
    others: Iterable[str],
) -> None:
    """Raise ValueError listing what a checkpoint lacks, what is not wanted, and what is of another
    shape or dtype.

    Args:
        where: names the checkpoint.
        saved: its entries.
        wanted: tensors to read on this rank.
        others: names that any rank reads.
    """
    here = {name: value for name, value in wanted.items() if name in saved}
    shapes = [
        f"{name}: saved {saved[name].shape}, expected {tuple(value.shape)}"
        for name, value in here.items()
        if saved[name].shape != value.shape
    ]
    dtypes = [
        f"{name}: saved {saved[name].dtype}, expected {value.dtype}"
        for name, value in here.items()
        if saved[name].dtype != value.dtype
    ]
    problems = {
        "missing": sorted(wanted.keys() - saved.keys()),
        "unexpected": sorted(saved.keys() - set(others)),
        "mis-shaped": shapes,
        "of another dtype": dtypes,
    }
    if any(problems.values()):
        listed = ", ".join(
            f"{kind} {_some(names)}" for kind, names in problems.items() if names
        )
        raise ValueError(f"{where} does not fit this model and optimizer: {listed}")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{names[:_SHOWN]}{rest}"
