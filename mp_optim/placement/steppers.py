"""Which stepper steps what is offloaded, and what it cannot step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mp_optim.placement.auto_step import AutoStepper
from mp_optim.placement.disk_step import SteppedFromDisk, StreamedFromDisk
from mp_optim.placement.host_bytes import HostSlot
from mp_optim.placement.host_step import (
    HostOwner,
    HostStepper,
    HostStepSettings,
    Stepper,
)
from mp_optim.placement.measured_split import FixedSplit, MeasuredSplit
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
_PLACES = ("host", "streamed", "auto")
_FROM_DISK = {"host": SteppedFromDisk, "streamed": StreamedFromDisk}


@dataclass(frozen=True)
class OffloadedStep:
    """Where and when offloaded slots are stepped.

    Attributes:
        place: ``host``, ``streamed``, or ``auto``: some on the host and some streamed.
        mode: when the host works.
        streamed_fraction: with ``auto``, the share of their elements that is streamed; None: it is
            measured.

    Raises:
        ValueError: place or mode is unknown, they do not go together, or no share between 0 and 1.
    """

    place: str
    mode: str
    streamed_fraction: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(
                f"offload_mode={self.mode!r}: must be one of {list(_MODES)}"
            )
        if self.place not in _PLACES:
            raise ValueError(
                f"offload_place={self.place!r}: must be one of {list(_PLACES)}"
            )
        if self.place == "streamed" and self.mode != "sync":
            raise ValueError(
                f"offload_mode={self.mode!r}: with offload_place='streamed' the host steps "
                "nothing; use 'sync', or offload_place='auto'"
            )
        if self.streamed_fraction is not None and not 0 <= self.streamed_fraction <= 1:
            raise ValueError(
                f"offload_streamed_fraction={self.streamed_fraction!r}: must be between 0 and 1"
            )

    @property
    def sub_place(self) -> Place:
        """By which the optimizer of the offloaded slots is known."""
        return "streamed" if self.place == "streamed" else "host"

    def new_stepper(
        self,
        sub: SlotOptimizer,
        slots: Sequence[HostSlot],
        owner: HostOwner,
        settings: HostStepSettings,
    ) -> Stepper:
        """What steps the offloaded slots, which are ``sub``'s."""
        kind = _MODES[self.mode]
        if settings.state_file is not None:
            return _FROM_DISK[self.place](sub, slots, owner, settings)
        if self.place == "auto":
            share = self.streamed_fraction
            split = MeasuredSplit() if share is None else FixedSplit(share)
            return AutoStepper(kind, sub, slots, owner, settings, split)
        if self.place == "streamed":
            kind = StreamedStepper
        return kind(sub, slots, owner, settings)

    def classes(
        self, host: type[torch.optim.Optimizer], device: type[torch.optim.Optimizer]
    ) -> dict[Place, type[torch.optim.Optimizer]]:
        """The optimizer class of the device, and that of what is offloaded.

        Raises:
            ValueError: slots cannot be stepped by either class where they may change.
        """
        if self.place == "auto" and host is not device:
            raise ValueError(
                f"offload_place='auto': a parameter is stepped on the host or streamed, by one "
                f"class; {host.__name__} and {device.__name__} are two"
            )
        offloaded = device if self.place == "streamed" else host
        return {"device": device, self.sub_place: offloaded}

    def check(
        self,
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
        here = [param for param in params if is_offloaded(param[0])]
        if settings.state_file is not None:
            self._check_on_disk()
            asked = "optimizer_state_path", "leave it out"
            _check_windows(sub, here, settings.window_bytes, *asked)
        elif self.place != "host":
            asked = f"offload_place={self.place!r}", "use 'host'"
            _check_windows(sub, here, settings.window_bytes, *asked)
        if self.mode == "speculative":
            _check_speculative(sub, params)

    def _check_on_disk(self) -> None:
        if self.mode != "sync":
            raise ValueError(
                f"offload_mode={self.mode!r}: with optimizer_state_path the state is on the disk "
                "between steps; use 'sync'"
            )
        if self.place == "auto":
            raise ValueError(
                "offload_place='auto': with optimizer_state_path all of it is stepped in one "
                "place; use 'host' or 'streamed'"
            )


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


def _check_windows(
    sub: SlotOptimizer,
    params: Sequence[NamedParam],
    window_bytes: int,
    asked: str,
    way_out: str,
) -> None:
    if not isinstance(sub, RuleOptimizer):
        raise ValueError(
            f"{asked}: {_class_of(sub)} cannot be stepped in windows; use one of this package's "
            f"optimizers, or {way_out}"
        )
    check_can_stream(sub, window_bytes, asked, way_out)
    for name in _collective(sub, params):
        raise ValueError(
            f"{asked}: {type(sub).__name__} steps {name}, which is split over ranks, by a "
            f"collective, and ranks may cut other windows; {way_out}"
        )
    devices = {local_tensor(param).device: name for _, name, param in params}
    if len(devices) > 1:
        raise ValueError(
            f"{asked}: {' and '.join(devices.values())} lie on different devices "
            f"({', '.join(map(str, devices))}); {way_out}"
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
