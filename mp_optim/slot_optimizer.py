"""The common shape of every optimizer in this package: a torch optimizer whose state lives in slots.

The layers differ in *where* a slot's state is (in the rule itself, in a sub-optimizer, in the layer
below) and in what ``step`` does; how state is shown, saved, matched and loaded is the same for all
and is written here once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.checkpoint.state_dict import match_groups, plain_groups
from mp_optim.slots import ParamGroups, Slot, SlotStateView, SlotUpdate, iter_slots, slot_name

__all__ = ["SlotOptimizer"]

Closure = Callable[[], Any]


class SlotOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose state is keyed by ``(group, position)``.

    Subclasses provide :meth:`slot_state`, :meth:`load_slot_state` and :meth:`step_slots`.
    """

    param_groups: ParamGroups

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._state_view = SlotStateView(lambda: self.param_groups, self.slot_state, self.load_slot_state)
        super().__init__(params, defaults)

    # -- what a subclass provides ---------------------------------------------------------------

    @abstractmethod
    def slot_state(self, slot: Slot) -> dict[str, Any]:
        """The live state tensors of a slot, allocated if they did not exist. Never copies."""

    @abstractmethod
    def load_slot_state(self, slot: Slot, state: dict[str, Any]) -> None:
        """Copy ``state`` into the slot. Raises ValueError if a key is missing, unknown or mis-shaped."""

    @abstractmethod
    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        """Step the given slots, and only those.

        Args:
            updates: gradients and outputs; each slot at most once.
            grad_norm: global L2 norm of the gradients after their multipliers, for rules that clip by
                it themselves (LAMB's ``max_grad_norm``). None if nobody computed it.
        """

    def new_main_param(self, slot: Slot, source: Tensor) -> Tensor:
        """Replace a slot's tensor by the FP32 one that will be stepped, and return it.

        Args:
            slot: which parameter.
            source: local model parameter (any floating dtype); its values are copied, unless it is
                FP32 already and is stepped where it lies, in which case it is used itself.
        """
        main = source if source.dtype == torch.float32 else source.detach().to(torch.float32)
        self.param_groups[slot.group]["params"][slot.position] = main
        return main

    # -- torch's contract -----------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy would share main params and state with the original.

        Raises:
            TypeError: always; copy ``state_dict()`` instead.
        """
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled; build another one for the copied model "
                        "and give it load_state_dict(optimizer.state_dict())")

    @property  # type: ignore[override]
    def state(self) -> SlotStateView:
        """Current tensors to their state; a view, complete as soon as anybody looks."""
        return self._state_view

    @state.setter
    def state(self, value: dict[Tensor, dict[str, Any]]) -> None:
        for param, state in value.items():
            self._state_view[param] = state

    def slot_name(self, slot: Slot) -> str:
        """FQN of a slot, for messages and checkpoints."""
        return slot_name(self.param_groups, slot)

    def slots(self) -> list[Slot]:
        """All slots in order."""
        return [slot for slot, _ in iter_slots(self.param_groups)]

    def init_state(self) -> None:
        """Allocate the state of every slot without stepping."""
        for slot in self.slots():
            self.slot_state(slot)

    def state_dict(self) -> dict[str, Any]:
        """Torch-shaped and plain: ``{"state": {index: {...}}, "param_groups": [...]}``.

        Tensors are the live ones, as torch's are: clone (or save) before the next step.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        groups = plain_groups(self.param_groups)
        states = (self.slot_state(slot) for slot in self.slots())
        result: dict[str, Any] = {
            "state": {index: dict(state) for index, state in enumerate(states) if state},
            "param_groups": groups,
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            hooked = post_hook(self, result)
            result = result if hooked is None else hooked
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` made: by FQN where both sides have names, else by position.

        State is copied into the tensors that exist, so placement and dtypes stay what they are
        configured to be. The argument is not modified. Nothing is written before everything that can
        be checked without writing has been checked.

        Raises:
            ValueError: a parameter is missing on either side, or a tensor's shape or dtype does not fit.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            hooked = pre_hook(self, state_dict)
            state_dict = state_dict if hooked is None else hooked
        match = match_groups(self.param_groups, state_dict["param_groups"])
        saved_state = state_dict["state"]
        loads = [(slot, saved_state[index]) for slot, index in match.index_of.items() if index in saved_state]
        for slot, state in loads:
            self.check_slot_state(slot, state)
        for slot, state in loads:
            self.load_slot_state(slot, state)
        for group, saved in zip(self.param_groups, match.settings, strict=True):
            group.update(saved)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def check_slot_state(self, slot: Slot, state: dict[str, Any]) -> None:
        """Raise ValueError if ``state`` does not fit the slot; write nothing."""
        mine = self.slot_state(slot)
        name = self.slot_name(slot)
        missing, unknown = sorted(mine.keys() - state.keys()), sorted(state.keys() - mine.keys())
        if missing or unknown:
            raise ValueError(f"state of {name}: missing {missing}, unknown {unknown}; this optimizer keeps "
                             f"{sorted(mine)}. Was the state saved by another optimizer?")
        for key, own in mine.items():
            check_fits(f"{name}.{key}", own, state[key])


def check_fits(label: str, own: Tensor, saved: Any) -> None:
    """Raise ValueError unless ``saved`` can be copied into ``own`` without losing anything."""
    saved = torch.as_tensor(saved)
    if saved.shape != own.shape:
        raise ValueError(f"{label}: saved shape {tuple(saved.shape)}, expected {tuple(own.shape)}")
    if own.is_floating_point() and torch.promote_types(saved.dtype, own.dtype) != own.dtype:
        raise ValueError(f"{label}: saved as {saved.dtype}, which {own.dtype} cannot hold without loss; "
                         f"convert it explicitly, or configure this state as {saved.dtype}")
