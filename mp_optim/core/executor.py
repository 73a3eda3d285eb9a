"""Executors: what steps the tensors at some slots, and keeps their state.

An executor is no torch optimizer. It has the groups of one (what is stepped, and the settings), and
a torch optimizer is its face: it adds groups, shows state, and calls :meth:`Executor.step_slots`.
What wraps such an optimizer takes its executor over; the face stays, to be looked at.

There are three kinds: a rule of this package (``rules/rule_executor.py``), any torch optimizer
(``rules/rule_optimizer.py``), and one that hands slots to others in their places
(``offload/hybrid_executor.py``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mp_optim.core import ParamGroups, Slot, SlotUpdates, local_tensor, param_at, slot_name
from mp_optim.core.interrupted_step import HOST, StepMark
from mp_optim.core.slot_state import SlotState
from mp_optim.host.host_memory import beside, zeros

Mode = Literal["train", "eval"]

Place = Literal["device", "host", "streamed"]
"""Where a slot is stepped: where its parameter lies, with its main param and state beside it
(``device``) or brought there from host memory for the step (``streamed``); or in host memory."""


class Executor:
    """Steps slots, each from a gradient it is given.

    NOTE: it checks no settings and enters no step mark by itself: the outermost optimizer does so
    once for all of a step (:meth:`check_groups`, :class:`StepMark`), before :meth:`step_slots`.

    Args:
        param_groups: live groups, to which a face adds.

    Attributes:
        label: the class that users know it by, for messages.
        sizes: parameters of each group, as they were added.
        step_mark: remembers steps that were broken off; the outermost optimizer's.
    """

    writes_settings = False
    """Whether a step may write into the groups: learning rates, counts of steps."""

    def __init__(self, param_groups: ParamGroups) -> None:
        self.param_groups = param_groups
        self.label = type(self).__name__
        self.sizes: list[int] = []
        self.step_mark = StepMark()
        self._reserved: Iterator[Tensor] = iter(())

    def slot_name(self, slot: Slot) -> str:
        """FQN of a slot, for messages."""
        return slot_name(self.param_groups, slot)

    # -- groups -----------------------------------------------------------------------------------

    def group_added(self) -> None:
        """The last group is new.

        Raises:
            ValueError: a setting is out of range, or a parameter cannot be stepped.
        """
        self.sizes.append(len(self.param_groups[-1]["params"]))

    def forget_groups(self, count: int) -> None:
        """Take back groups that were added after the first ``count``, however far adding them had
        come."""
        del self.param_groups[count:], self.sizes[count:]

    def has_only(self, group: int, positions: Sequence[int]) -> None:
        """Of a group just these slots are stepped here. The caller has names for all of them; a
        foreign optimizer has these alone."""

    def step_together(self, group: int, sets: Sequence[Sequence[int]]) -> None:
        """The slots at each of these positions of a group are mostly stepped at a time, and so are
        those that are left: what is made for them is kept for the next step."""

    def all_groups(self) -> list[ParamGroups]:
        """The groups here and in executors below: a setting of one is a setting of all."""
        return [self.param_groups]

    def use_mark(self, mark: StepMark) -> None:
        """Tell of broken-off steps by this mark, which belongs to the layer above."""
        self.step_mark = mark

    def recover(self) -> None:
        """A step was broken off: forget what it left under way. Values are loaded after this."""

    # -- settings ---------------------------------------------------------------------------------

    def check_settings(self, group: dict[str, Any]) -> None:
        """Raise ValueError naming a setting of a param group, and its value, if it cannot be
        stepped with."""

    def check_groups(self) -> None:
        """Raise RefusedSettings, naming group and setting, if a hyperparameter is out of range."""

    # -- steps ------------------------------------------------------------------------------------

    def clipped(self, updates: SlotUpdates, grad_norm: float | None) -> SlotUpdates:
        """The updates with the multipliers of a rule that clips by itself (LAMB's
        ``max_grad_norm``); of any other the same.

        Args:
            grad_norm: global L2 norm of the gradients after their multipliers; None if it was not
                computed.
        """
        return updates

    @abstractmethod
    def step_slots(self, updates: SlotUpdates) -> None:
        """Step the given slots, and only those: gradients and outputs, each slot at most once."""

    def finish_step(self) -> None:
        """Check a step, all of which is queued.

        Raises:
            AuditError: a repetition gave other bits, and ``audit_action`` is to raise.
        """

    def verdict_device(self) -> torch.device | None:
        """The one device on which every slot is stepped by kernels that read multipliers there;
        None if :meth:`step_slots` needs numbers."""
        return None

    @property
    def has_modes(self) -> bool:
        """Whether there are other weights for evaluation (``train()`` and ``eval()``, as
        Schedule-Free has them)."""
        return False

    def switch_mode(self, mode: Mode) -> None:
        """Have the weights that are trained, or those to evaluate."""

    # -- places -----------------------------------------------------------------------------------

    def place(self, slot: Slot) -> Place:
        """Where a slot is stepped."""
        return "device"

    def host_slots(self) -> Sequence[Slot]:
        """Slots whose main params the host steps: a step writes their weights by copies."""
        return ()

    def home(self, slot: Slot, param: Tensor) -> torch.device:
        """Where main param and state of a slot are stepped: where its parameter lies, or in host
        memory, where what is streamed rests."""
        return local_tensor(param).device if self.place(slot) == "device" else HOST

    @abstractmethod
    def carried_out_by(self, group: int, place: Place, device: torch.device) -> tuple[str, str]:
        """Name of what steps the slots of a group that are in a place, and why.

        Args:
            device: of the model's parameters.
        """

    def marks_changes(self, slot: Slot) -> bool:
        """Whether each step of a slot, by whatever it is stepped, marks the elements of its weights
        that get another value (``SlotUpdate.changed``)."""
        return False

    def metrics(self) -> dict[str, float]:
        """What was counted in the last step, by names as of ``optimizer.metrics()``."""
        return {}

    # -- state ------------------------------------------------------------------------------------

    @abstractmethod
    def state_of(self, slot: Slot) -> SlotState:
        """A slot's state."""

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        """Allocate the state of some slots together."""
        for slot in slots:
            self.state_of(slot).live()

    def memory_moved(self, slot: Slot | None = None) -> None:
        """Main params and state, of a slot or of any, were given other memory (``tensor.data =
        ...``); forget where it was."""

    def follow_memory(self) -> None:
        """Step main params and state in the memory that they have now, where callers gave them
        other memory. To be called before a step, before anything is stepped.

        Raises:
            ValueError: state has another shape or dtype now, naming slot and key.
        """

    # -- main params: what is stepped. FP32 tensors, unless a subclass says otherwise -------------

    def stepped(self, slot: Slot) -> Tensor:
        """The tensor that is stepped for a slot."""
        return param_at(self.param_groups, slot)

    def step_instead(self, slot: Slot, tensor: Tensor) -> None:
        """Step this tensor for a slot from now on."""
        self.param_groups[slot.group]["params"][slot.position] = tensor

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
            coming = next(self._reserved, None) if source.device.type == "cpu" else None
            if coming is None or (coming.shape, coming.dtype) != (source.shape, dtype):
                coming = zeros(source.shape, dtype, source.device)
            main = coming.copy_(source)
        self.step_instead(slot, main)
        return main

    def reserve_main_params(self, coming: Sequence[tuple[Slot, Tensor]]) -> None:
        """Calls of :meth:`new_main_param` will follow, with these arguments: let main params be
        contiguous."""
        forms = []
        for _, source in coming:
            dtype = self.main_dtype(source.dtype)
            if source.device.type == "cpu" and source.dtype != dtype:
                forms.append((source.shape, dtype))
        self._reserved = iter(beside(forms) or ())

    def main_param(self, slot: Slot) -> Tensor:
        """The FP32 main param: the stepped tensor, or a copy if it is stored in parts."""
        return self.stepped(slot)

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        """Give the main param another value of any floating dtype."""
        self.stepped(slot).copy_(value)

    def main_written(self, slot: Slot) -> None:
        """The stepped tensor of a slot took the model's value; drop work that read the old one."""
