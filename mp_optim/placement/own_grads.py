"""Gradients of an optimizer's own parameters, reported to its stepper as backward leaves them, as
long as nothing wraps the optimizer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mp_optim.placement.grad_hooks import GradHooks, final_in_backward
from mp_optim.slots import (
    ParamGroups,
    Slot,
    are_plain,
    current_grad,
    iter_slots,
    param_at,
    update_of,
)
from mp_optim.slots.host_part import HostPart, Place


class Owner(Protocol):
    """What is asked of the optimizer."""

    param_groups: ParamGroups

    @property
    def host(self) -> HostPart: ...
    def place(self, slot: Slot) -> Place: ...
    def slot_name(self, slot: Slot) -> str: ...


class OwnGrads:
    """Hooks on the parameters of an optimizer that are not stepped on the device."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._hooks = GradHooks(self._on_grad)
        self._watched: list[tuple[Slot, Tensor]] = []
        self.follow()

    def follow(self) -> None:
        """Notice gradients of the parameters that the optimizer has now."""
        self._watched = list(iter_slots(self._owner.param_groups))
        wanted = [self._owner.place(slot) != "device" for slot, _ in self._watched]
        self._hooks.follow([param for _, param in self._watched], wanted)

    def _on_grad(self, index: int) -> None:
        (slot, param), owner = self._watched[index], self._owner
        grad = current_grad(param)
        if param_at(owner.param_groups, slot) is not param:
            return  # a wrapper has put its main param there, and reports the gradients itself
        if grad is not None and final_in_backward(param):
            update = update_of(slot, owner.slot_name(slot), param, grad)
            plain = are_plain([grad])
            owner.host.on_grad_ready(update, writes_are_counted=plain)
