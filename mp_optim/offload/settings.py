"""Settings of offloaded steps, and checks of the combinations that are not supported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mp_optim.config.fields import check_field
from mp_optim.config.rules import RULES
from mp_optim.core import Slot, local_tensor, update_of
from mp_optim.core.executor import Executor, Place
from mp_optim.host.transfer import Transfer
from mp_optim.offload.buckets import StepTimeline
from mp_optim.offload.state_storage import StateFile
from mp_optim.rules.rule import Rule
from mp_optim.rules.rule_executor import RuleExecutor

NamedParam = tuple[Slot, str, Tensor]
"""A slot, and the name and the parameter of the slot."""


SlotStepper = type[torch.optim.Optimizer] | Rule
"""A torch optimizer class, or a rule, which a :class:`RuleOptimizer` steps."""


@dataclass(frozen=True)
class HostStepSettings:
    """Place, mode, memory, copies and threads of the steps of offloaded slots.

    Attributes:
        place: ``host`` or ``streamed``.
        mode: ``sync``, ``overlap`` or ``speculative``: the jobs that the host does during backward.
        transfer: interface for copies between host and device.
        timeline: record of the time of stages.
        set_up: function that is called once in the worker thread.
        bucket_bytes: largest staging bytes of a bucket; a larger parameter is a bucket by itself.
        window_bytes: bytes of main params and state in one window.
        pipelined: True to overlap copies in both directions with the arithmetic.
        pin_staging: True to page-lock staging memory.
        pin_mains: True to page-lock the back buffer of main params, and state in windows.
        state_file: file of main params and state on a disk; None for host memory.

    Raises:
        ValueError: place or mode is unknown, or ``bucket_bytes`` is less than 1.
    """

    place: Place
    mode: str
    transfer: Transfer
    timeline: StepTimeline
    set_up: Callable[[], None]
    bucket_bytes: int
    window_bytes: int
    pipelined: bool
    pin_staging: bool
    pin_mains: bool
    state_file: StateFile | None = None

    def __post_init__(self) -> None:
        check_field("offload_mode", self.mode)
        check_field("offload_place", self.place)
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={self.bucket_bytes}: must be at least 1")

    @property
    def runs_in_backward(self) -> bool:
        """True if ``mode`` starts work during backward, before the step."""
        return self.mode != "sync"

    def check(
        self, executor: Executor, params: Sequence[NamedParam], is_offloaded: Callable[[Slot], bool]
    ) -> None:
        """Check that the executor supports this place and mode for the offloaded parameters.

        Args:
            executor: the executor of the optimizer.
            params: slots and parameters.
            is_offloaded: function that returns True for an offloaded slot.

        Raises:
            ValueError: the executor does not support the place or the mode; the message names the
                class or the parameter.
        """
        checked, in_windows = params, self.state_file is not None or self.place != "host"
        lack = "step into a second buffer"
        danger = "which could interleave with collectives of backward"
        if in_windows:
            checked = [param for param in params if is_offloaded(param[0])]
            lack = "be stepped in windows"
            danger = "and ranks may have different windows, so their collectives would not match"
        if self.state_file is not None:
            asked, way_out = "optimizer_state_path", "leave out optimizer_state_path"
        elif in_windows:
            asked, way_out = f"offload_place={self.place!r}", "use 'host'"
        elif self.mode == "speculative":
            asked, way_out = "offload_mode='speculative'", "set offload_mode='overlap'"
        else:
            return
        if not isinstance(executor, RuleExecutor) or (
            in_windows and executor.rule.name not in RULES
        ):
            raise ValueError(
                f"{asked}: {executor.label} cannot {lack}; use an optimizer of this package, or "
                f"{way_out}"
            )
        for slot, name, param in checked:
            if executor.is_collective(update_of(slot, name, param, param)):
                raise ValueError(
                    f"{asked}: {executor.label} steps {name}, which is split over ranks, with a "
                    f"collective, {danger}; {way_out}"
                )
        devices = {local_tensor(param).device: name for _, name, param in checked}
        if in_windows and len(devices) > 1:
            raise ValueError(
                f"{asked}: {' and '.join(devices.values())} are on different devices "
                f"({', '.join(map(str, devices))}); {way_out}"
            )


def only_accelerator(devices: Iterable[torch.device]) -> torch.device:
    """Return the accelerator among the devices of parameters; the host if all parameters are there.

    Raises:
        ValueError: the parameters are on several accelerators.
    """
    names = set(map(str, devices))
    found = sorted(names - {"cpu", "meta"})
    if len(found) > 1:
        raise ValueError(
            f"parameters are on several accelerators {found}; build one optimizer per device"
        )
    return torch.device(found[0] if found else "meta" if names == {"meta"} else "cpu")
