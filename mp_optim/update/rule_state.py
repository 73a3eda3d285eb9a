"""RuleState: the slots of a rule, and the state that is kept for each."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.rules import RULES, moment_of
from mp_optim.process.host_memory import (
    Form,
    beside,
    zeros,
)
from mp_optim.process.leases import before_writing
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots import (
    CachedTensorList,
    Slot,
    all_same,
    are_plain,
    local_tensor,
)
from mp_optim.slots.group_lists import added_whole
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.slots.slot_state import SlotState, State
from mp_optim.slots.state_keys import AVERAGE, REMAINDER, scale_key
from mp_optim.slots.tensor_layout import Part
from mp_optim.update.codecs import is_blocked, join, keep_valid, split_
from mp_optim.update.group_state import GroupState
from mp_optim.update.kernel_args import MAIN
from mp_optim.update.rule_slot_state import RuleSlotState
from mp_optim.update.state_format import StatePrecision, moment_forms
from mp_optim.update.unread_moments import stepped_without


class RuleState(SlotOptimizer):
    """What a rule keeps: per slot ``step`` (0-d FP32 on the CPU), its moments, with
    ``<moment>_scale`` if they are stored in blocks (as 4-bit codes they are 1-D, two codes a byte),
    ``remainder`` if there is one, and ``averaged_param`` if averages are kept (which begins with
    the first step).

    Args:
        precision: how state is stored.
    """

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], precision: StatePrecision
    ) -> None:
        self.precision = precision
        self._groups: list[GroupState] = []
        self._allocate: Callable[[Sequence[Form]], list[Tensor]] | None = None
        super().__init__(params, defaults)

    # -- what a rule provides -------------------------------------------------------------------

    rule = "custom"
    """The rule's name in the config, where it has one."""

    decides_moments = ""
    """The setting that :meth:`moments` reads, if there is one."""

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the moments the rule keeps under a group's settings."""
        return RULES[self.rule].moment_names

    def unread_moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of moments that the rule does without under a group's settings, though its formula
        has them. Where a slot has one from before, it is stepped on, so that other settings find
        it."""
        return ()

    def reads_steps(self, group: dict[str, Any]) -> bool:
        """Whether the formula needs to know how often a slot was stepped, beyond whether it was."""
        return True

    def is_elementwise(self, group: dict[str, Any]) -> bool:
        """Whether elements are stepped by themselves under a group's settings, so that a part of a
        parameter can be."""
        return self.rule in RULES and RULES[self.rule].reads == "elements"

    @abstractmethod
    def check_settings(self, group: dict[str, Any]) -> None:
        """Raise ValueError naming the setting and its value if it is out of range."""

    def settle(self) -> None:
        """Take back the counts of steps of which only the device knew, until now, that they were
        skipped."""

    # -- state ----------------------------------------------------------------------------------

    @in_own_modes
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ValueError: a setting is out of range, or parameters share memory, naming them.
        """
        with added_whole(self):
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            self.check_settings(group)
            self._groups.append(GroupState(group["params"]))

    def forget_groups(self, count: int) -> None:
        super().forget_groups(count)
        del self._groups[count:]

    def state_of(self, slot: Slot) -> SlotState:
        return RuleSlotState(self, slot)

    @in_own_modes
    def live_state(self, slot: Slot) -> State:
        """A slot's tensors, allocated where the slot is stepped now, with its count."""
        self.settle()
        return self._present_state(slot)

    def _present_state(self, slot: Slot) -> State:
        """The same, but that a step which the device skips may still be counted."""
        group_state, group = self._groups[slot.group], self.param_groups[slot.group]
        state = group_state.slots[slot.position]
        tensor = group["params"][slot.position]
        main = local_tensor(tensor)
        state.setdefault("step", group_state.steps[slot.position])
        missing = self._missing(slot, main)
        tensors = self._new_state(list(missing.values()), main.device)
        new = dict(zip(missing, tensors, strict=True))
        new |= {
            key: value.to(main.device)
            for key, value in state.items()
            if key != "step" and value.device != main.device
        }
        if new:
            state.update(new)
            group_state.replaced()
        if not self._is_split(main):
            state.pop(REMAINDER, None)  # the parameter was bfloat16 once
        if (
            group_state.mains[slot.position] is not tensor
            or group_state.shapes[slot.position] != main.shape
        ):
            group_state.mains[slot.position] = tensor
            group_state.shapes[slot.position] = main.shape
            group_state.steady_mains = None
        return state

    def step_counters(self) -> list[Tensor]:
        """For each group how often its slots were stepped: FP32, shape (slots,), on the CPU. The
        tensors themselves, which steps write."""
        return [group_state.steps for group_state in self._groups]

    def set_part(self, slot: Slot, part: Part) -> None:
        self._groups[slot.group].parts[slot.position] = part

    def kept(self, slot: Slot) -> tuple[str, ...]:
        """Names of the moments that are kept for a slot."""
        whole = self._groups[slot.group].parts[slot.position].shape
        names = self._names(slot.group, slot.position)
        return tuple(name for name in names if moment_of(name).shape(whole) is not None)

    def _names(self, index: int, position: int) -> tuple[str, ...]:
        """Names of a slot's moments, of whatever shape the parameter is."""
        group = self.param_groups[index]
        names = self.moments(group)
        state = self._groups[index].slots[position]
        present = [name for name in self.unread_moments(group) if name in state]
        return (*present, *names) if present else names

    def allocate_by(self, allocate: Callable[[Sequence[Form]], list[Tensor]]) -> None:
        """From now on, allocate state on the host by this: it returns zeroed tensors."""
        self._allocate = allocate

    def _new_state(self, forms: Sequence[Form], device: torch.device) -> list[Tensor]:
        if forms and self._allocate is not None and device.type == "cpu":
            return self._allocate(forms)
        return [zeros(*form, device) for form in forms]

    def forms(self, slot: Slot) -> dict[str, Form]:
        """Of all tensors that are stepped for a slot: its main param, by ``MAIN``, and its
        state."""
        param = self.stepped(slot)
        main = param.shape, self.main_dtype(param.dtype)
        return {MAIN: main, **self._state_forms(slot, main)}

    def _missing(self, slot: Slot, main: Tensor) -> dict[str, Form]:
        """State that a main param lacks."""
        state = self._groups[slot.group].slots[slot.position]
        forms = self._state_forms(slot, (main.shape, main.dtype))
        missing = {key: form for key, form in forms.items() if key not in state}
        if missing and self._groups[slot.group].was_stepped(slot.position):
            # the moment of a stepped slot would have to hold gradients that are gone
            moments = self._names(slot.group, slot.position)
            late = {key for name in moments for key in (name, scale_key(name))}
            missing = {key: form for key, form in missing.items() if key not in late}
        return missing

    def deciding_setting(self, group: dict[str, Any]) -> str:
        """The setting that decides which moments are kept, for messages."""
        name = self.decides_moments
        return f"{name}={group[name]!r}" if name in group else self.rule

    def _state_forms(self, slot: Slot, main: Form) -> dict[str, Form]:
        """State of a main param."""
        main_shape, dtype = main
        state = self._groups[slot.group].slots[slot.position]
        whole = self._groups[slot.group].parts[slot.position].shape
        forms: dict[str, Form] = {}
        for name in self._names(slot.group, slot.position):
            shape = moment_of(name).local_shape(main_shape, whole)
            if shape is None:
                continue
            forms |= moment_forms(name, shape, self.precision.stored_dtype(name))
        if self._is_split_dtype(dtype):
            forms[REMAINDER] = (main_shape, self.precision.remainder_dtype)
        if self.precision.ema_decay is not None:
            forms[AVERAGE] = (main_shape, self.precision.ema_dtype)
        for key, (form, _) in forms.items():
            if key in state and state[key].shape != form:
                raise ValueError(
                    f"{self.slot_name(slot)}: the parameter's shape is now {tuple(main_shape)}, "
                    f"its {key} has {tuple(state[key].shape)}; a replacement must keep the shape"
                )
        return forms

    @in_own_modes
    def allocate_state(self, slots: Sequence[Slot]) -> None:
        """Host tensors of one name lie one after the other, if together they are large."""
        missing: dict[str, list[tuple[Slot, Form]]] = defaultdict(list)
        for slot in slots:
            if (main := self.stepped(slot)).device.type == "cpu":
                for key, form in self._missing(slot, main).items():
                    missing[key].append((slot, form))
        for key, wanted in missing.items():
            forms = [form for _, form in wanted]
            tensors = beside(forms) if self._allocate is None else self._allocate(forms)
            for (slot, _), tensor in zip(wanted, tensors or (), strict=False):
                group_state = self._groups[slot.group]
                group_state.slots[slot.position].setdefault(
                    "step", group_state.steps[slot.position]
                )
                group_state.slots[slot.position][key] = tensor
                group_state.replaced()
        for slot in slots:
            self.live_state(slot)

    def _mains(self, index: int, positions: Sequence[int]) -> CachedTensorList:
        """The plain tensors to step at some positions of a group, with state that fits them."""
        params, group_state = self.param_groups[index]["params"], self._groups[index]
        whole = group_state.is_whole(positions)
        tensors, fitting = list(params), group_state.mains
        shapes = group_state.shapes
        if not whole:
            tensors = [params[position] for position in positions]
            fitting = [group_state.mains[position] for position in positions]
            shapes = [group_state.shapes[position] for position in positions]
        same = all_same(tensors, fitting)
        if same and whole and group_state.steady_mains is not None:
            return group_state.steady_mains
        mains = CachedTensorList(
            tensors if are_plain(tensors) else map(local_tensor, tensors)
        )
        if not (same and list(map(Tensor.size, mains)) == shapes):
            self.allocate_state([Slot(index, position) for position in positions])
        for dtype in mains.dtypes:
            if dtype != self.precision.main_dtype(dtype):
                position = next(
                    p
                    for p, main in zip(positions, mains, strict=True)
                    if main.dtype == dtype
                )
                raise TypeError(
                    f"{self.slot_name(Slot(index, position))} is {dtype}: {type(self).__name__} "
                    "steps "
                    "float32, and bfloat16 with store_param_remainders=True; wrap it in "
                    "Float16OptimizerWithFloat16Params, or use get_megatron_optimizer"
                )
        if whole and set(map(type, tensors)) == {Tensor}:
            group_state.steady_mains = mains.hold()
        return mains

    def _kept(self, index: int, positions: Sequence[int]) -> Sequence[tuple[str, ...]]:
        """Names of the moments that are kept at some positions of a group."""
        group = self.param_groups[index]
        names = self.moments(group)
        if all(moment_of(name).is_always_kept for name in names):
            if self.unread_moments(group):
                return [self._names(index, position) for position in positions]
            return [names] * len(positions)
        return [self.kept(Slot(index, position)) for position in positions]

    def _state_tensors(
        self, index: int, key: str, positions: Sequence[int]
    ) -> list[Tensor]:
        """State of that name at some positions of a group."""
        group_state = self._groups[index]
        try:
            return group_state.tensors(key, positions)
        except KeyError:  # settings that need it are new
            self.allocate_state([Slot(index, position) for position in positions])
        for position in positions:
            if key not in group_state.slots[position]:
                decided = self.deciding_setting(self.param_groups[index])
                name = self.slot_name(Slot(index, position))
                raise stepped_without(f"param_groups[{index}]: {name}", key, decided)
        return group_state.tensors(key, positions)

    def _stored_keys(self, names: tuple[str, ...], dtype: torch.dtype) -> list[str]:
        """Keys of the state tensors that are stepped along with main params of a dtype."""
        scales = [
            scale_key(name)
            for name in names
            if is_blocked(self.precision.stored_dtype(name))
        ]
        remainder = [REMAINDER] if dtype != torch.float32 else []
        average = [] if self.precision.ema_decay is None else [AVERAGE]
        return [*names, *scales, *remainder, *average]

    # -- main params ----------------------------------------------------------------------------

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.precision.main_dtype(dtype)

    def stepped(self, slot: Slot) -> Tensor:
        """The plain tensor that is stepped for a slot."""
        return local_tensor(self.param_groups[slot.group]["params"][slot.position])

    def _is_split(self, main: Tensor) -> bool:
        return self._is_split_dtype(main.dtype)

    def _is_split_dtype(self, dtype: torch.dtype) -> bool:
        return dtype != torch.float32 and self.precision.main_dtype(dtype) == dtype

    @in_own_modes
    def main_param(self, slot: Slot) -> Tensor:
        main = self.stepped(slot)
        return (
            join(main, self._present_state(slot)[REMAINDER])
            if self._is_split(main)
            else super().main_param(slot)
        )

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        main = self.stepped(slot)
        before_writing([main], self.live_state(slot).values())
        if self._is_split(main):
            split_(
                value.to(main.device, torch.float32),
                main,
                self.live_state(slot)[REMAINDER],
            )
        else:
            main.copy_(value)

    def written_outside(self, slot: Slot) -> None:
        main = self.stepped(slot)
        if self._is_split(main):
            remainder = self.live_state(slot)[REMAINDER]
            before_writing([remainder])
            keep_valid(main, remainder)

    def memory_moved(self) -> None:
        for group_state in self._groups:
            group_state.replaced()
