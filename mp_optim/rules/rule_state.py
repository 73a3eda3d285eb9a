"""State of a rule: step counts and state tensors of each slot, with export, checks and loads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.rules import moment_of
from mp_optim.core import (
    CachedTensorList,
    DeviceMultiplier,
    ParamGroups,
    Slot,
    all_same,
    are_plain,
    local_tensor,
    slot_name,
)
from mp_optim.core.interrupted_step import ParkedTensors
from mp_optim.core.slot_state import (
    AVERAGE,
    MASTER,
    MOMENT2,
    REMAINDER,
    SECOND,
    STEP,
    Coded,
    State,
    StateStore,
    check_fits,
    check_state,
    check_step,
    scale_key,
)
from mp_optim.core.tensor_layout import region_of
from mp_optim.core.tensors import ParamWatcher
from mp_optim.host.calls import in_own_modes
from mp_optim.host.host_memory import TensorSpec, allocate_contiguous, as_tensor, zeros
from mp_optim.host.leases import give_memory
from mp_optim.kernels.codecs import is_blocked, split_
from mp_optim.kernels.kernel_args import MAIN
from mp_optim.kernels.state_format import (
    StatePrecision,
    check_moment,
    coded,
    fitted,
    full_precision,
    moment_specs,
    shape_of,
    unpacked,
)
from mp_optim.rules.rule import Rule

Allocate = Callable[[Sequence[TensorSpec]], list[Tensor]]
"""Function that returns zeroed tensors of the given shapes and dtypes."""


class SlotSet:
    """Slots of a group that a step usually steps together, such as all slots on the host or all
    slots of a bucket. The set caches lists of the slots' tensors and their last launch.

    The lists and the launch are dropped when a tensor gets other memory.

    Attributes:
        positions: position of each slot in the group.
        watched: all state tensors of the slots, with their memory in the last step; empty if
            unknown.
        forms: shape, dtype and device of these state tensors when they were last checked.
        count: number of steps, if all slots have the same number; else None.
        mains: the stepped tensors; None if unknown.
        seen: fingerprints of the stepped tensors if a model's parameters are stepped. Other code
            may replace the memory of parameters (``param.data = ...``).
        lists: state tensors of all slots, by key.
        launch: the last launch over all slots, without gradients and updates; None if unknown.
        sources: the objects from which ``launch`` was made. A step with the same objects reuses the
            launch.
    """

    def __init__(self, positions: Iterable[int]) -> None:
        self.positions = list(positions)
        self.count: float | None = None
        self.forms: list[tuple[object, ...]] = []
        self.forget()

    def forget(self) -> None:
        """Drop the lists and the launch, because a tensor or its memory was replaced.

        Kept lists would keep the old memory allocated.
        """
        self.watched = CachedTensorList()
        self.lists: dict[str, CachedTensorList] = {}
        self.mains: CachedTensorList | None = None
        self.seen: ParamWatcher | None = None
        self.launch: Any = None
        self.sources: tuple[object, ...] = ()


class GroupState:
    """State of one param group, kept for the optimizer's life.

    Attributes:
        regions: for each slot, the region of the parameter that this rank has.
        steps: number of steps of each slot: FP32, shape (slots,), on the CPU. A slot's ``step``
            tensor is a view of this tensor.
        slots: state tensors of each slot by key; empty before the slot's state is first used.
        mains: for each slot, the tensor for which the state was last allocated or checked.
        shapes: shape of each tensor in ``mains`` at that time.
        is_shown: True if callers have references to state tensors, so callers may replace memory.
        sets: the sets of slots that are stepped together. Each slot is in one set.
        rule: rule that steps the group.
        values: the settings that were checked last. Empty if a setting is a tensor, because other
            code may write it in place.
        moments: names of the moments that these settings require.
    """

    def __init__(self, params: Sequence[Tensor], rule: Rule) -> None:
        count = len(params)
        self.regions = [region_of(param) for param in params]
        self.steps = torch.zeros(count, dtype=torch.float32, device="cpu")
        self.slots: list[dict[str, Tensor]] = [{} for _ in range(count)]
        self.mains: list[Tensor | None] = [None] * count
        self.shapes: list[torch.Size | None] = [None] * count
        self.is_shown = False
        self.rule, self.values, self.moments = rule, list[Any](), tuple[str, ...]()
        self._version = self.steps._version
        # Each position has an entry, so that the set of a slot is found without a search.
        self._set_of: list[SlotSet] = []
        self.step_together([])

    def step_together(self, sets: Iterable[Sequence[int]]) -> None:
        """Divide the group's slots into sets that are stepped together.

        Args:
            sets: positions of the slots of each set. The remaining slots are one more set.
        """
        found: dict[int, SlotSet] = {}
        for positions in sets:
            found |= dict.fromkeys(positions, SlotSet(positions))
        every = range(len(self.slots))
        rest = SlotSet(position for position in every if position not in found)
        self._set_of = [found.get(position, rest) for position in every]
        self.sets = list(dict.fromkeys(self._set_of))

    def set_at(self, positions: Sequence[int]) -> SlotSet | None:
        """Return the set with exactly the slots at these positions; None if no set has exactly
        these slots."""
        kept = self._set_of[positions[0]]
        is_whole = positions is kept.positions or positions == kept.positions
        return kept if is_whole else None

    def show(self, position: int) -> None:
        """Watch the memory of a slot's state from now on, because a caller gets the state
        tensors."""
        self.is_shown = True
        self._watched_of(self._set_of[position])

    def has_moved(self, kept: SlotSet) -> bool:
        """True if a state tensor of a set has other memory or another layout than in the last
        step."""
        # Check contiguity, too: .data = .data.t() of a square tensor keeps address and shape.
        if kept.watched:
            return kept.watched.has_moved() or not all(map(Tensor.is_contiguous, kept.watched))
        return self.forms_of(kept) != kept.forms

    def _watched_of(self, kept: SlotSet) -> CachedTensorList:
        if not kept.watched:
            kept.watched = CachedTensorList(
                value for position in kept.positions for value in self.slots[position].values()
            ).hold()
        return kept.watched

    def forms_of(self, kept: SlotSet) -> list[tuple[object, ...]]:
        """Return the layout of each state tensor of a set, and the addresses of step counts."""
        return [
            (t.shape, t.dtype, t.device, t.is_contiguous(), t.dim() or t.data_ptr())
            for t in self._watched_of(kept)
        ]

    def tensors(self, name: str, positions: Sequence[int]) -> list[Tensor]:
        """Return the state tensors of one name at some positions.

        For the positions of a set, the result is the same list at every call.
        """
        kept = self.set_at(positions)
        if kept is None:
            return [self.slots[position][name] for position in positions]
        if name not in kept.lists:
            tensors = CachedTensorList(self.slots[position][name] for position in positions)
            kept.lists[name] = tensors.hold()
        return kept.lists[name]

    def replaced(self, positions: Iterable[int] | None = None) -> None:
        """Drop the lists of tensors, because tensors at some positions were replaced.

        Args:
            positions: positions of the replaced tensors; None for all.
        """
        every = self._set_of
        sets = self.sets if positions is None else set(map(every.__getitem__, positions))
        for kept in sets:
            kept.forget()

    def count(self, positions: Sequence[int], by: int = 1) -> None:
        """Add ``by`` to the step counts of the slots at some positions."""
        kept = self._set_of[positions[0]]
        if positions is not kept.positions or self.steps._version != self._version:
            self._forget_counts()
        elif kept.count is not None:
            kept.count += by
        if len(positions) == len(self.slots):
            self.steps += by
        else:
            self.steps[torch.tensor(positions, device="cpu")] += by
        self._version = self.steps._version

    def counts(self, positions: Sequence[int], kept: SlotSet | None) -> list[float]:
        """Return the step count of each slot at some positions, or one number if a set's counts are
        equal.

        Args:
            positions: positions of the slots.
            kept: the set with exactly these slots (:meth:`set_at`), or None.
        """
        if self.steps._version != self._version:
            self._forget_counts()
        if kept is not None and kept.count is not None:
            return [kept.count]
        of_all: list[float] = self.steps.tolist()
        counts = [of_all[position] for position in positions]
        if kept is not None and len(set(counts)) == 1:
            kept.count = counts[0]
            return counts[:1]
        return counts

    def _forget_counts(self) -> None:
        """Drop cached counts because other code wrote to step counts.

        A slot's ``step`` tensor is a view, so a write increases the version of ``steps``.
        """
        self._version = self.steps._version
        for kept in self.sets:
            kept.count = None


class RuleState(StateStore):
    """State of the slots of a rule, kept for the optimizer's life.

    A slot has ``step`` (FP32, shape (), on the CPU) and the rule's moments. A moment in a block
    format has scales in ``<moment>_scale``; 4-bit codes are 1-D, two codes per byte. A bfloat16
    main param has a ``remainder``. With averages, a slot has ``averaged_param`` from the first step
    on.

    Args:
        rule: rule that names the moments.
        precision: storage formats of the state.
        param_groups: live groups of the stepped tensors.

    Attributes:
        groups: state of each group.
        allocators: by slot, the function that allocates the host memory of the slot's state.
        pending_skips: counted steps that a multiplier on the device may still skip, until
            :meth:`subtract_skipped` corrects the counts.
        parked: tensors that were moved to the host until they are restored.
    """

    allocates_late = False

    def __init__(self, rule: Rule, precision: StatePrecision, param_groups: ParamGroups) -> None:
        self.rule, self.precision, self.param_groups = rule, precision, param_groups
        self.groups: list[GroupState] = []
        self.allocators: dict[Slot, Allocate] = {}
        self.pending_skips: list[tuple[GroupState, list[int], DeviceMultiplier]] = []
        self.parked = ParkedTensors()

    def name(self, slot: Slot) -> str:
        """Return the FQN of a slot."""
        return slot_name(self.param_groups, slot)

    # -- counts of steps --------------------------------------------------------------------------

    def subtract_skipped(self) -> None:
        """Subtract the steps that the device skipped from the step counts."""
        pending, self.pending_skips = self.pending_skips, []
        for group_state, positions, multiplier in pending:
            if multiplier.skipped():
                group_state.count(positions, -1)

    def recover(self) -> None:
        """Discard pending corrections of step counts after an interrupted step. The load that has
        to follow replaces the counts."""
        self.pending_skips = []
        self.replaced()

    def replaced(self, slot: Slot | None = None) -> None:
        """Drop cached lists, because the memory of a slot's tensors was replaced.

        Args:
            slot: the slot; None for all.
        """
        if slot is not None:
            group_state = self.groups[slot.group]
            # Reset to None, so that the next step checks the state against the new tensor.
            group_state.mains[slot.position] = None
            group_state.replaced([slot.position])
            return
        for group_state in self.groups:
            group_state.replaced()

    # -- state ------------------------------------------------------------------------------------

    @in_own_modes
    def live_state(self, slot: Slot) -> State:
        """Return a slot's state tensors by key, allocated on the device where the slot is stepped.

        The step count is exact: pending skips of the device are subtracted first.
        """
        self.subtract_skipped()
        return self.uncounted_live(slot)

    def uncounted_live(self, slot: Slot) -> State:
        """Return a slot's state tensors by key, allocated on the device where the slot is stepped.

        The step count may include a step that the device skips.
        """
        group_state, group = self.groups[slot.group], self.param_groups[slot.group]
        state = group_state.slots[slot.position]
        tensor = group["params"][slot.position]
        main, mine = local_tensor(tensor), group_state.steps[slot.position]
        shown = state.setdefault(STEP, mine)
        if shown.data_ptr() != mine.data_ptr():
            # A caller replaced the memory of the slot's step count, so use the caller's count.
            check_step(self.name(slot), shown)
            mine.copy_(shown)
            shown.data = mine
        missing = self._missing(slot, main)
        allocate, home = self.allocators.get(slot), self._home(slot, main)
        if missing and allocate is not None and home.type == "cpu":
            tensors = allocate(list(missing.values()))
        else:
            tensors = [zeros(*spec, home) for spec in missing.values()]
        away = [
            value
            for key, value in state.items()
            if key != STEP and value.device != home and id(value) not in self.parked.homes
        ]
        # Replace the memory and keep the tensor object, because callers may have references to the
        # object.
        for value in away:
            give_memory(value, value.data.to(home))
        if missing or away:
            state.update(zip(missing, tensors, strict=True))
            group_state.replaced([slot.position])
        if not self.is_split(main.dtype):
            # The main param was bfloat16 before and is FP32 now, so its remainder is obsolete.
            state.pop(REMAINDER, None)
        if (
            group_state.mains[slot.position] is not tensor
            or group_state.shapes[slot.position] != main.shape
        ):
            group_state.mains[slot.position] = tensor
            group_state.shapes[slot.position] = main.shape
            group_state.replaced([slot.position])
        return state

    def _names(self, index: int) -> tuple[str, ...]:
        """Return the names of the moments that the settings of a group require."""
        group = self.param_groups[index]
        return self.rule.of(group).moments(group)

    def _home(self, slot: Slot, main: Tensor) -> torch.device:
        """Return the device that stores a main param's state: the CPU for windows, else the main
        param's device."""
        is_lent = slot in self.allocators and main.device.type != "meta"
        return torch.device("cpu") if is_lent else main.device

    def specs(self, slot: Slot) -> dict[str, TensorSpec]:
        """Return shape and dtype of a slot's stepped tensors, by key: the main param (``MAIN``) and
        the state."""
        param = self.stepped(slot)
        main = param.shape, self.precision.main_dtype(param.dtype)
        return {MAIN: main, **self._state_specs(slot, main)}

    def _missing(self, slot: Slot, main: Tensor) -> dict[str, TensorSpec]:
        """Return shape and dtype of the state tensors that a slot needs and does not have."""
        group_state, position = self.groups[slot.group], slot.position
        specs = self._state_specs(slot, (main.shape, main.dtype))
        state = group_state.slots[position]
        missing = {key: spec for key, spec in specs.items() if key not in state}
        # tolist() reads a CPU tensor's memory directly. item() would also not wait, but tests of
        # synchronization refuse every item() in a step.
        if missing and group_state.steps[position : position + 1].tolist()[0] > 0:
            # A new moment of a stepped slot would lack earlier gradients, so leave moments out.
            moments = self._names(slot.group)
            late = {key for name in moments for key in (name, scale_key(name))}
            missing = {key: spec for key, spec in missing.items() if key not in late}
        return missing

    def _state_specs(
        self, slot: Slot, main: TensorSpec, check: bool = True
    ) -> dict[str, TensorSpec]:
        """Return shape and dtype of a slot's state tensors, by key.

        Args:
            slot: the slot.
            main: shape and dtype of the main param.
            check: True to raise ValueError if an existing tensor has another shape.
        """
        main_shape, dtype = main
        state = self.groups[slot.group].slots[slot.position]
        whole = self.groups[slot.group].regions[slot.position].shape
        is_small = self.precision.is_small(whole.numel())
        specs: dict[str, TensorSpec] = {}
        for name in self._names(slot.group):
            shape = moment_of(name).local_shape(main_shape, whole)
            specs |= moment_specs(name, shape, self.precision.stored_dtype(name, is_small))
        rest = self.precision.remainder_dtype if self.is_split(dtype) else None
        if rest is not None:
            specs[REMAINDER] = (main_shape, rest)
        if self.precision.ema_decay is not None:
            specs[AVERAGE] = (main_shape, self.precision.ema_dtype)
        for key, (spec, _) in specs.items():
            if check and key in state and state[key].shape != spec:
                raise ValueError(
                    f"{self.name(slot)}: the parameter has shape {tuple(main_shape)} now, but its "
                    f"{key} has shape {tuple(state[key].shape)}; replace the parameter by a tensor "
                    "of its former shape, or build a new optimizer"
                )
        return specs

    @in_own_modes
    def allocate_state(self, slots: Sequence[Slot]) -> None:
        """Allocate the state of some slots. On the host, tensors of one name are contiguous in
        memory."""
        missing: dict[tuple[str, Allocate | None], list[tuple[Slot, TensorSpec]]] = defaultdict(
            list
        )
        for slot in slots:
            main = self.stepped(slot)
            if self._home(slot, main).type == "cpu":
                for key, spec in self._missing(slot, main).items():
                    missing[key, self.allocators.get(slot)].append((slot, spec))
        for (key, allocate), wanted in missing.items():
            specs = [spec for _, spec in wanted]
            tensors = (allocate or allocate_contiguous)(specs)
            for (slot, _), tensor in zip(wanted, tensors, strict=True):
                group_state = self.groups[slot.group]
                group_state.slots[slot.position].setdefault(
                    "step", group_state.steps[slot.position]
                )
                group_state.slots[slot.position][key] = tensor
                group_state.replaced([slot.position])
        for slot in slots:
            self.uncounted_live(slot)

    def mains(self, index: int, positions: Sequence[int], kept: SlotSet | None) -> CachedTensorList:
        """Return the plain tensors to step at some positions of a group, and allocate missing
        state.

        Args:
            index: index of the group.
            positions: positions of the slots.
            kept: the set with exactly these slots (:meth:`GroupState.set_at`), or None.

        Raises:
            TypeError: a tensor's dtype is not that of a main param. The message names the
                parameter.
        """
        params, group_state = self.param_groups[index]["params"], self.groups[index]
        tensors, fitting = list(params), group_state.mains
        shapes = group_state.shapes
        if kept is None or len(positions) < len(params):
            tensors = [params[position] for position in positions]
            fitting = [group_state.mains[position] for position in positions]
            shapes = [group_state.shapes[position] for position in positions]
        same = all_same(tensors, fitting)
        if kept is not None and kept.mains is not None and same:
            moved = kept.seen is not None and kept.seen.moved(tensors)
            if not moved:
                return kept.mains
        mains = CachedTensorList(tensors if are_plain(tensors) else map(local_tensor, tensors))
        if not (same and list(map(Tensor.size, mains)) == shapes):
            self.allocate_state([Slot(index, position) for position in positions])
        for dtype in mains.dtypes:
            if dtype != self.precision.main_dtype(dtype):
                position = next(
                    p for p, main in zip(positions, mains, strict=True) if main.dtype == dtype
                )
                raise TypeError(
                    f"{self.name(Slot(index, position))}: {self.rule.name} does not step {dtype}, "
                    "only float32, and bfloat16 with store_param_remainders=True; wrap the "
                    "optimizer in Float16OptimizerWithFloat16Params, or use get_megatron_optimizer"
                )
        if kept is not None and are_plain(tensors):
            is_own = set(map(type, tensors)) == {Tensor}
            kept.mains = mains.hold() if is_own else mains
            kept.seen = None if is_own else ParamWatcher(tensors)
        return mains

    # -- memory that callers replaced -------------------------------------------------------------

    def check_memory(self, slot: Slot, kept: SlotSet) -> None:
        """Check and adopt the memory of a slot's state tensors, which callers may have replaced.

        Args:
            slot: the slot.
            kept: the slot's set, with the former memory.

        Raises:
            ValueError: a state tensor has another shape or dtype. The message names slot and key.
        """
        main, state = self.stepped(slot), self.groups[slot.group].slots[slot.position]
        if not state:
            return  # A slot that was never stepped has no state, so return.
        specs = self._state_specs(slot, (main.shape, main.dtype), check=False)
        for key, value in state.items():
            form = value.shape, value.dtype
            if key != STEP and form != specs.get(key, form):
                for each in (kept.watched, *kept.lists.values()):
                    memory = each.memory_of(value)
                    if memory is not None and (memory.shape, memory.dtype) == specs[key]:
                        value.data = memory
                (given, given_dtype), (shape, dtype) = form, specs[key]
                raise ValueError(
                    f"optimizer.state: the memory assigned to {self.name(slot)}.{key} has shape "
                    f"{tuple(given)} and {given_dtype}; assign memory of shape {tuple(shape)} and "
                    f"{dtype}"
                )
            # Kernels read memory in storage order, so the memory must be contiguous.
            if not value.is_contiguous():
                give_memory(value, value.data.contiguous())
            if not value.is_contiguous():
                value.data = value.data.contiguous()
        self.uncounted_live(slot)

    def stored_keys(
        self, index: int, positions: Sequence[int], mains: CachedTensorList
    ) -> list[tuple[str, ...]]:
        """Return, for each main param of a group, the keys of the state tensors that a step of this
        main param uses."""
        regions, moments = self.groups[index].regions, self._names(index)
        precision = self.precision
        of_each = [
            (precision.is_small(regions[position].shape.numel()), main.dtype)
            for position, main in zip(positions, mains, strict=True)
        ]
        keys = {}
        for is_small, dtype in set(of_each):
            stored = [(name, precision.stored_dtype(name, is_small)) for name in moments]
            scales = [scale_key(name) for name, form in stored if is_blocked(form)]
            is_beside = dtype != torch.float32 and precision.remainder_dtype is not None
            remainder = [REMAINDER] if is_beside else []
            average = [] if precision.ema_decay is None else [AVERAGE]
            keys[is_small, dtype] = (*moments, *scales, *remainder, *average)
        return list(map(keys.__getitem__, of_each))

    def state_tensors(self, index: int, key: str, positions: Sequence[int]) -> list[Tensor]:
        """Return the state tensors of one name at some positions of a group, allocated if missing.

        Raises:
            ValueError: a stepped slot lacks a moment that new settings require.
        """
        group_state = self.groups[index]
        try:
            return group_state.tensors(key, positions)
        # New settings may require a moment that no slot has yet, so allocate the moment.
        except KeyError:
            self.allocate_state([Slot(index, position) for position in positions])
        for position in positions:
            if key not in group_state.slots[position]:
                group = self.param_groups[index]
                name = self.rule.of(group).deciding_setting
                required = f"{name}={group[name]!r}" if name in group else self.rule.name
                raise ValueError(
                    f"param_groups[{index}]: {self.name(Slot(index, position))} was stepped "
                    f"without {key}, which {required} requires, so nothing was stepped now; "
                    "restore the former setting, or set the new value before the group's first step"
                )
        return group_state.tensors(key, positions)

    # -- main params ----------------------------------------------------------------------------

    def stepped(self, slot: Slot) -> Tensor:
        """Return the plain tensor that is stepped for a slot."""
        return local_tensor(self.param_groups[slot.group]["params"][slot.position])

    def is_split(self, dtype: torch.dtype) -> bool:
        """True if a stepped tensor of this dtype is the upper half of a main param."""
        return dtype != torch.float32 and self.precision.main_dtype(dtype) == dtype

    def has_no_fp32_main(self, slot: Slot) -> bool:
        return self.precision.has_no_main_params and self.is_split(self.stepped(slot).dtype)

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        """Copy a value of any floating dtype into a slot's main param."""
        main, state = self.stepped(slot), self.live_state(slot)
        if not self.is_split(main.dtype):
            main.copy_(value)
            return
        remainder = state.get(REMAINDER)
        # An offloaded remainder is on the host, but its parameter is on the model's device. So
        # split into a copy of the remainder on that device.
        beside = None if remainder is None else remainder.to(main.device)
        split_(value.to(main.device, torch.float32), main, beside)
        if remainder is not None and beside is not None:
            remainder.copy_(beside)

    # -- exported and loaded state ---------------------------------------------------------------

    def unpacked_state(self, slot: Slot) -> State:
        return unpacked(self.live_state(slot), self.stepped(slot))

    def full_state(self, slot: Slot) -> State:
        return full_precision(self.live_state(slot), self.stepped(slot))

    def coded_state(self, slot: Slot) -> dict[str, Coded]:
        live, main, found = self.live_state(slot), self.stepped(slot), {}
        for key in [key for key in live if scale_key(key) in live]:
            check = partial(check_moment, f"{self.name(slot)}.{key}", key)
            shape = shape_of(key, live[key], main)
            found[key] = coded(key, live[key], live[scale_key(key)], shape, check)
        return found

    def fit_state(self, slot: Slot, saved: State, convert: bool) -> State:
        stepped, live, name = self.stepped(slot), self.live_state(slot), self.name(slot)
        group = self.param_groups[slot.group]
        if saved and STEP not in saved and not self.rule.of(group).reads_steps:
            # torch stores no step count for a rule that needs none. A slot with state was stepped,
            # so set 1.
            saved = {key: value for key, value in saved.items() if value is not None}
            saved[STEP] = 1.0
        return fitted(name, live, stepped, saved, convert)

    def check_fitted(self, slot: Slot, state: State) -> None:
        live, rest = self.live_state(slot), dict(state)
        # A saved main param replaces the remainder, so check the main param's shape instead.
        if REMAINDER in live and MASTER in state:
            form = torch.empty(self.stepped(slot).shape, dtype=torch.float32, device="meta")
            check_fits(f"{self.name(slot)}.{MASTER}", form, rest.pop(MASTER))
            rest[REMAINDER] = live[REMAINDER]
        check_state(self.name(slot), live, rest)
        for key in rest.keys() & {SECOND, MOMENT2}:
            self.check_values(slot, key, rest[key])

    def check_values(self, slot: Slot, key: str, values: Tensor) -> None:
        if key == STEP:
            check_step(self.name(slot), values)
        check_moment(f"{self.name(slot)}.{key}", key, values)

    def load_state(self, slot: Slot, state: State) -> None:
        for key, tensor in self.live_state(slot).items():
            if key != REMAINDER or MASTER not in state:
                tensor.copy_(as_tensor(state[key]))
        if MASTER in state:
            self.set_main_param(slot, state[MASTER])

    def reset_state(self, slot: Slot) -> None:
        for key, tensor in self.live_state(slot).items():
            # Keep the remainder, because the remainder is a part of the main param.
            if key != REMAINDER:
                tensor.zero_()
