"""What steps slots: the optimizer below a precision wrapper, and its main params."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.process.host_memory import beside, zeros
from mp_optim.process.leases import before_writing
from mp_optim.slots import Slot, SlotUpdate, iter_slots, param_at
from mp_optim.slots.group_lists import added_whole
from mp_optim.slots.host_part import HostPart, Place
from mp_optim.slots.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.slots.shared_memory import check_memory
from mp_optim.slots.tensor_layout import Part


class SlotOptimizer(SlotKeyedOptimizer):
    """Steps the slots it is told to, each from a gradient it is given.

    Subclasses provide :meth:`state_of` and :meth:`step_slots`.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._reserved: Iterator[Tensor] = iter(())
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ValueError: parameters share memory, naming them.
        """
        with added_whole(self):
            super().add_param_group(param_group)
            check_memory(
                (self.slot_name(slot), param)
                for slot, param in iter_slots(self.param_groups)
                if param.requires_grad
            )

    @abstractmethod
    def step_slots(
        self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None
    ) -> None:
        """Step the given slots, and only those.

        Args:
            updates: gradients and outputs; each slot at most once.
            grad_norm: global L2 norm of the gradients after their multipliers, for rules that clip
                by it themselves (LAMB's ``max_grad_norm``). None if it was not computed.
        """

    def set_part(self, slot: Slot, part: Part) -> None:
        """Say which part of a parameter a slot's tensor is, where the tensor does not say so
        itself."""

    # -- where slots are stepped ------------------------------------------------------------------

    @property
    def host(self) -> HostPart | None:
        """What steps slots on the host, if there is such a part."""
        return None

    def place(self, slot: Slot) -> Place:
        """Where a slot is stepped."""
        return "device"

    def sub_optimizer(self, place: Place) -> SlotOptimizer:
        """The optimizer that steps the slots of a place."""
        return self

    def metrics(self) -> dict[str, float]:
        """What the rule counted in the last step, by names as of ``optimizer.metrics()``."""
        return {}

    def check_groups(self) -> None:
        """Raise ValueError, naming group and setting, if a hyperparameter is out of range; nothing
        has been stepped."""

    def verdict_device(self) -> torch.device | None:
        """The one device on which every slot is stepped by kernels that read multipliers there;
        None if :meth:`step_slots` needs numbers."""
        return None

    # -- main params: what is stepped. FP32 tensors, unless a subclass says otherwise --------------

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the tensor that is stepped for a parameter of a dtype."""
        return torch.float32

    def new_main_param(self, slot: Slot, source: Tensor) -> Tensor:
        """Replace a slot's tensor by the one that will be stepped, and return it.

        Args:
            slot: which parameter.
            source: local model parameter (any floating dtype); its values are copied, unless it has
                the dtype to step already and is stepped where it lies, in which case it is used
                itself.
        """
        main, dtype = source, self.main_dtype(source.dtype)
        if source.dtype != dtype:
            main = _main_memory(self._reserved, source, dtype).copy_(source)
        self.param_groups[slot.group]["params"][slot.position] = main
        return main

    def reserve_main_params(self, coming: Sequence[tuple[Slot, Tensor]]) -> None:
        """Calls of :meth:`new_main_param` will follow, with these arguments: let main params lie
        side by side."""
        forms = []
        for _, source in coming:
            dtype = self.main_dtype(source.dtype)
            if source.device.type == "cpu" and source.dtype != dtype:
                forms.append((source.shape, dtype))
        self._reserved = iter(beside(forms) or ())

    def main_param(self, slot: Slot) -> Tensor:
        """The FP32 main param: the stepped tensor, or a copy if it is stored in parts."""
        return param_at(self.param_groups, slot)

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        """Give the main param another value of any floating dtype."""
        main = param_at(self.param_groups, slot)
        before_writing([main])
        main.copy_(value)

    def written_outside(self, slot: Slot) -> None:
        """The stepped tensor was replaced or written from outside; make state agree that
        depends on its value."""

    def memory_moved(self) -> None:
        """Main params and state were given other memory (``tensor.data = ...``); forget where it
        was."""


def _main_memory(
    reserved: Iterator[Tensor], source: Tensor, dtype: torch.dtype
) -> Tensor:
    coming = next(reserved, None) if source.device.type == "cpu" else None
    form = source.shape, dtype
    if coming is not None and (coming.shape, coming.dtype) == form:
        return coming
    return zeros(*form, source.device)
