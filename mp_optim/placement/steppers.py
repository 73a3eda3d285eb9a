"""Which stepper steps what is offloaded, and what it cannot step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mp_optim.placement.host_bytes import HostSlot
from mp_optim.placement.host_step import HostOwner, HostStepper, HostStepSettings
from mp_optim.placement.overlap_step import OverlappedHostStepper
from mp_optim.placement.speculative_step import SpeculativeHostStepper
from mp_optim.placement.streamed_step import StreamedStepper, check_can_stream
from mp_optim.slots import Slot, local_tensor, update_of
from mp_optim.slots.host_part import Place
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.update.foreign import ForeignOptimizer
from mp_optim.update.rule import RuleOptimizer

NamedParam = tuple[Slot, str, Tensor]
"""A slot, its name, and the parameter there."""

_MODES: dict[str, type[HostStepper]] = {
    "sync": HostStepper,
    "overlap": OverlappedHostStepper,
    "speculative": SpeculativeHostStepper,
}
_PLACES: tuple[Place, ...] = ("host", "streamed")


def checked_place(place: str, mode: str) -> Place:
    """Where offloaded slots are stepped.

    Raises:
        ValueError: place or mode is unknown, or they do not go together.
    """
    if mode not in _MODES:
        raise ValueError(f"offload_mode={mode!r}: must be one of {list(_MODES)}")
    for known in _PLACES:
        if known == place and (known == "host" or mode == "sync"):
            return known
    if place in _PLACES:
        raise ValueError(
            f"offload_mode={mode!r}: with offload_place={place!r} the host steps nothing; use "
            "'sync'"
        )
    raise ValueError(f"offload_place={place!r}: must be one of {list(_PLACES)}")


def new_stepper(
    place: Place,
    mode: str,
    sub: SlotOptimizer,
    slots: Sequence[HostSlot],
    owner: HostOwner,
    settings: HostStepSettings,
) -> HostStepper:
    """What steps the offloaded slots, which are ``sub``'s."""
    kind = StreamedStepper if place == "streamed" else _MODES[mode]
    return kind(sub, slots, owner, settings)


def check_can_step(
    place: Place,
    mode: str,
    sub: SlotOptimizer,
    params: Sequence[NamedParam],
    is_offloaded: Callable[[Slot], bool],
    settings: HostStepSettings,
) -> None:
    """Raise unless an optimizer can step what is offloaded.

    Args:
        params: all of them. is_offloaded: whether a slot is.

    Raises:
        ValueError: naming the class, or the parameter.
    """
    if place == "streamed":
        here = [param for param in params if is_offloaded(param[0])]
        _check_streamed(sub, here, settings.window_bytes)
    elif mode == "speculative":
        _check_speculative(sub, params)


def _check_speculative(sub: SlotOptimizer, params: Sequence[NamedParam]) -> None:
    if not isinstance(sub, RuleOptimizer):
        raise ValueError(
            f"offload_mode='speculative': {_class_of(sub)} cannot step into other memory than "
            "it steps from; use one of this package's optimizers, or 'overlap'"
        )
    for name in _collective(sub, params):
        raise ValueError(
            f"offload_mode='speculative': {type(sub).__name__} steps {name}, which is "
            "split over ranks, by a collective, which may not meet those of backward; use "
            "'overlap'"
        )


def _check_streamed(
    sub: SlotOptimizer, params: Sequence[NamedParam], window_bytes: int
) -> None:
    if not isinstance(sub, RuleOptimizer):
        raise ValueError(
            f"offload_place='streamed': {_class_of(sub)} cannot be stepped in windows; use one of "
            "this package's optimizers, or 'host'"
        )
    check_can_stream(sub, window_bytes)
    for name in _collective(sub, params):
        raise ValueError(
            f"offload_place='streamed': {type(sub).__name__} steps {name}, which is split over "
            "ranks, by a collective, and ranks may cut other windows; use 'host'"
        )
    devices = {local_tensor(param).device: name for _, name, param in params}
    if len(devices) > 1:
        raise ValueError(
            f"offload_place='streamed': {' and '.join(devices.values())} lie on different devices "
            f"({', '.join(map(str, devices))}); use 'host'"
        )


def _class_of(sub: SlotOptimizer) -> str:
    return type(sub.optimizer if isinstance(sub, ForeignOptimizer) else sub).__name__


def _collective(sub: RuleOptimizer, params: Sequence[NamedParam]) -> Iterable[str]:
    return (
        name
        for slot, name, param in params
        if sub.is_collective(update_of(slot, name, param, param))
    )


def only_accelerator(devices: Iterable[torch.device]) -> torch.device:
    """The accelerator among the devices of parameters; the host if there is none.

    Raises:
        ValueError: there are several.
    """
    names = set(map(str, devices))
    found = sorted(names - {"cpu", "meta"})
    if len(found) > 1:
        raise ValueError(
            f"parameters lie on several accelerators {found}; build one optimizer per device"
        )
    return torch.device(found[0] if found else "meta" if names == {"meta"} else "cpu")
