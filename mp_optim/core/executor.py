"""Executors: objects that step the tensors at some slots and keep the state of these slots.

An executor is not a torch optimizer, but has param groups with parameters and settings. A torch
optimizer in front of the executor adds groups, exports state, and calls
:meth:`Executor.step_slots`. A precision wrapper of that optimizer takes over the executor. After
that the wrapper calls the executor, and the optimizer only exports state.

There are three kinds of executors:

- ``rules/rule_executor.py`` steps with a rule of this package.
- ``rules/foreign_executor.py`` steps with any torch optimizer.
- ``offload/hybrid_executor.py`` distributes slots over executors on the device and the host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mp_optim.core import ParamGroups, Slot, SlotUpdates, local_tensor, param_at, slot_name
from mp_optim.core.interrupted_step import HOST, StepMark
from mp_optim.core.slot_state import SlotState
from mp_optim.host.host_memory import allocate_contiguous, zeros

Place = Literal["device", "host", "streamed"]
"""Where a slot is stepped and where its main param and state are stored: ``device`` (both on the
parameter's device), ``host`` (both on the host), or ``streamed`` (stored in host memory, copied to
the device for each step)."""


class Executor:
    """Steps slots from given gradients, and keeps the state of the slots for the optimizer's life.

    NOTE: an executor neither checks settings nor marks steps in ``step_mark``. The outermost
    optimizer checks the settings and marks the step once, and then calls :meth:`step_slots`.

    Args:
        param_groups: list of param groups, which is not copied; the optimizer in front of the
            executor adds groups to this list.

    Attributes:
        label: class name that users know, for messages.
        sizes: number of parameters of each group when the group was added.
        step_mark: consistency flag of the outermost optimizer; records interrupted steps.
    """

    writes_settings = False
    """True if a step may write settings into the param groups: learning rates and step counts."""
    clips = False
    """True if the rule of this executor clips gradients (:meth:`clipped`)."""

    def __init__(self, param_groups: ParamGroups) -> None:
        self.param_groups = param_groups
        self.label = type(self).__name__
        self.sizes: list[int] = []
        self.step_mark = StepMark()
        self._reserved: Iterator[Tensor] = iter(())

    def slot_name(self, slot: Slot) -> str:
        """Return the FQN of a slot, for messages."""
        return slot_name(self.param_groups, slot)

    # -- groups -----------------------------------------------------------------------------------

    def group_added(self) -> None:
        """Check and register the last group, which the optimizer has just added.

        Raises:
            ValueError: a setting is out of range, or a parameter cannot be stepped.
        """
        self.sizes.append(len(self.param_groups[-1]["params"]))

    def forget_groups(self, count: int) -> None:
        """Remove all groups after the first ``count``, including a group that was added only in
        part."""
        del self.param_groups[count:], self.sizes[count:]

    def has_only(self, group: int, positions: Sequence[int]) -> None:
        """Restrict this executor to some slots of a group. Later calls of all methods still use
        positions in the full group.

        Args:
            group: index of the param group.
            positions: positions in the full group of the slots that this executor steps.
        """

    def step_together(self, group: int, sets: Sequence[Sequence[int]]) -> None:
        """Cache one kernel launch for each given set of slots, and one launch for the remaining
        slots of the group.

        Most steps contain all slots of a set, so the launch of the set is reused.

        Args:
            group: index of the param group.
            sets: sets of positions in the group.
        """

    def all_groups(self) -> list[ParamGroups]:
        """Return the param groups of this executor and of the executors below it. Groups with the
        same index have equal settings."""
        return [self.param_groups]

    def use_mark(self, mark: StepMark) -> None:
        """Use the consistency flag of the layer above, in place of this executor's flag."""
        self.step_mark = mark

    def recover(self) -> None:
        """Discard pending work of an interrupted step. The caller loads all values afterwards."""

    # -- settings ---------------------------------------------------------------------------------

    def check_settings(self, group: dict[str, Any]) -> None:
        """Raise ValueError if a setting of a param group cannot be used in a step; the message has
        name and value."""

    def check_groups(self) -> None:
        """Raise RefusedSettings if a hyperparameter is out of range; the message has group and
        name."""

    # -- steps ------------------------------------------------------------------------------------

    def clipped(self, updates: SlotUpdates, grad_norm: float) -> SlotUpdates:
        """Return the updates of a step after the rule has clipped gradients (LAMB's
        ``max_grad_norm``). The multipliers change, not the gradients. Other rules return
        ``updates``.

        Args:
            updates: the updates of the step.
            grad_norm: global L2 norm of the gradients after their multipliers.
        """
        return updates

    @abstractmethod
    def step_slots(self, updates: SlotUpdates) -> None:
        """Step the given slots, each at most once, and write their outputs."""

    def plan_step(self, updates: SlotUpdates) -> Any:
        """Prepare as much of :meth:`step_slots` as possible, without stepping any slot. Return the
        argument of :meth:`run_step`."""
        return updates

    def run_step(self, planned: Any, queue: list[Callable[[], None]] | None = None) -> None:
        """Step the slots that :meth:`plan_step` prepared, and write their outputs.

        Args:
            planned: result of :meth:`plan_step`.
            queue: list to which an executor may append kernels, in place of calling them. The
                caller calls them before :meth:`finish_step`. None to call all kernels here.
        """
        self.step_slots(planned)

    def finish_step(self) -> None:
        """Check a step after all of its kernels are queued.

        Raises:
            AuditError: an audit repeated the step and got other bits, and ``audit_action`` is
                "raise".
        """

    def verdict_device(self) -> torch.device | None:
        """Return the device on which all slots are stepped by kernels that read multipliers from
        device memory. Return None if :meth:`step_slots` needs multipliers as numbers."""
        return None

    # -- places -----------------------------------------------------------------------------------

    def place(self, slot: Slot) -> Place:
        """Return the place where a slot is stepped."""
        return "device"

    def host_slots(self) -> Sequence[Slot]:
        """Return the slots that are stepped on the host. Their new weights are copied to the
        device."""
        return ()

    def home(self, slot: Slot, param: Tensor) -> torch.device:
        """Return the device that stores main param and state of a slot between steps: the
        parameter's device, or the host for the places ``host`` and ``streamed``."""
        return local_tensor(param).device if self.place(slot) == "device" else HOST

    @abstractmethod
    def backend_and_reason(self, group: int, place: Place, device: torch.device) -> tuple[str, str]:
        """Return the name of the backend that steps the slots of a group, and the reason for the
        choice.

        Args:
            group: index of the param group.
            place: place of the slots.
            device: device of the model's parameters.
        """

    def marks_changes(self, slot: Slot) -> bool:
        """True if every step of a slot sets bits for changed weights in ``SlotUpdate.changed``."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return counters of the last step, by their names in ``optimizer.metrics()``."""
        return {}

    # -- state ------------------------------------------------------------------------------------

    @abstractmethod
    def state_of(self, slot: Slot) -> SlotState:
        """Return the state of a slot."""

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        """Allocate the state of some slots together."""
        for slot in slots:
            self.state_of(slot).live()

    def memory_moved(self, slot: Slot | None = None) -> None:
        """Drop cached addresses after a caller moved main params and state to other memory
        (``tensor.data = ...``).

        Args:
            slot: the slot; None for all.
        """

    def follow_memory(self) -> None:
        """Use the present memory of main params and state, after callers replaced it. Called before
        each step.

        Raises:
            ValueError: state has another shape or dtype now; the message has slot and key.
        """

    # -- main params: the stepped tensors, FP32 unless a subclass stores another dtype ------------

    def stepped(self, slot: Slot) -> Tensor:
        """Return the tensor that a step updates for a slot: the main param, or the parameter itself
        if there is no separate main param."""
        return param_at(self.param_groups, slot)

    def step_instead(self, slot: Slot, tensor: Tensor) -> None:
        """Replace the tensor that a step updates for a slot, for example by a main param."""
        self.param_groups[slot.group]["params"][slot.position] = tensor

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the main param of a parameter with this dtype."""
        return torch.float32

    def new_main_param(self, slot: Slot, source: Tensor) -> Tensor:
        """Create the main param of a slot, and return it.

        Args:
            slot: the parameter.
            source: local model parameter of any floating dtype. A source in the dtype of main
                params becomes the main param. Values of another dtype are copied to a new tensor.
        """
        main, dtype = source, self.main_dtype(source.dtype)
        if source.dtype != dtype:
            memory = next(self._reserved, None) if source.device.type == "cpu" else None
            if memory is None or (memory.shape, memory.dtype) != (source.shape, dtype):
                memory = zeros(source.shape, dtype, source.device)
            main = memory.copy_(source)
        self.step_instead(slot, main)
        return main

    def reserve_main_params(self, coming: Sequence[tuple[Slot, Tensor]]) -> None:
        """Reserve contiguous memory for main params on the host.

        Args:
            coming: slot and source of each later call of :meth:`new_main_param`, in order.
        """
        forms = []
        for _, source in coming:
            dtype = self.main_dtype(source.dtype)
            if source.device.type == "cpu" and source.dtype != dtype:
                forms.append((source.shape, dtype))
        self._reserved = iter(allocate_contiguous(forms))

    def main_param(self, slot: Slot) -> Tensor:
        """Return the FP32 main param of a slot: the stepped tensor, or a copy if the main param is
        stored in parts."""
        return self.stepped(slot)

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        """Copy a value of any floating dtype into the main param."""
        self.stepped(slot).copy_(value)

    def main_written(self, slot: Slot) -> None:
        """Discard pending work that read an old main param, after the main param was overwritten
        with the model's value."""
