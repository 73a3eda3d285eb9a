"""Executor that steps slots by a rule of this package. One launch steps many slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.config.fields import check_field
from mp_optim.config.rules import audit_refusal, cautious_decay_refusal, refusal
from mp_optim.config.setting_checks import RefusedSettings
from mp_optim.core import (
    CachedTensorList,
    DeviceMultiplier,
    Multiplier,
    ParamGroups,
    Slot,
    SlotUpdate,
    SlotUpdates,
    StepPlan,
    UpdateSelection,
    all_same,
    group_settings,
    slot_name,
    stream_of,
)
from mp_optim.core.executor import Executor, Place
from mp_optim.core.interrupted_step import StepMark
from mp_optim.core.slot_state import REMAINDER, SlotState
from mp_optim.core.tensor_layout import region_of
from mp_optim.core.tensors import continue_from
from mp_optim.host.calls import in_own_modes
from mp_optim.host.leases import before_writing, borrows, give_memory
from mp_optim.kernels import choose_backend
from mp_optim.kernels.codecs import Noise, join, mix
from mp_optim.kernels.kernel_args import RULE_SCALARS, TensorLists, contiguous, contiguous_outputs
from mp_optim.kernels.state_format import StatePrecision
from mp_optim.rules.audit import Audit, AuditError
from mp_optim.rules.rule import ElementRule, Launch, Rule, Settings
from mp_optim.rules.rule_state import GroupState, RuleState, SlotSet

_HOST = torch.device("cpu")
_Shared = tuple[torch.device, torch.dtype, float, Multiplier, tuple[str, ...]]
"""Properties that all updates of a launch share: device, dtype, number of steps, multiplier, and
keys of the state."""


class GroupPlan(NamedTuple):
    """The slots of a step that are in one param group, as a part of a step plan.

    Attributes:
        group: index of the group.
        members: selection of the updates of these slots.
        positions: position of each slot in the group.
        together: the cached :class:`SlotSet` with exactly these slots, or None.
    """

    group: int
    members: UpdateSelection
    positions: list[int]
    together: SlotSet | None


_Planned = list[tuple[GroupPlan, list[Launch]]]


class RuleExecutor(Executor):
    """Executor that steps FP32 tensors, and bfloat16 tensors with remainders, by a rule.

    Args:
        param_groups: live groups, to which the optimizer adds.
        rule: the rule.
        precision: storage formats of the state.
        backend: see ``OptimizerConfig.fused_backend``.
        audit_rate: see ``OptimizerConfig.audit_rate``.
        audit_action: see ``OptimizerConfig.audit_action``.

    Attributes:
        rows: state of the slots.
        workspace: the rule's counters, or None.
        audit: the audit that repeats samples of steps; None without an audit.
        backend_for: function from a device to the backend that steps tensors there, and the reason
            for this backend.

    Raises:
        ValueError: the backend is not usable, has no kernels for the rule, or does not support the
            storage formats; or steps of the rule by the backend cannot be audited.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        rule: Rule,
        precision: StatePrecision,
        backend: str,
        audit_rate: float = 0.0,
        audit_action: str = "warn",
    ) -> None:
        super().__init__(param_groups)
        choose_backend(backend, _HOST)
        refused = refusal(
            backend,
            rule.kernels,
            (precision.exp_avg_dtype, precision.exp_avg_sq_dtype),
            precision.param_remainder_bits if precision.store_param_remainders else None,
            precision.stochastic_rounding,
        )
        if refused is not None:
            field, reason = refused
            value = backend if field == "fused_backend" else getattr(precision, field)
            raise ValueError(f"{field}={value!r}: {reason}")
        self.rule, self.workspace = rule, rule.new_workspace()
        self._backend = backend
        self.backend_for = partial(choose_backend, backend, rule=rule.kernels)
        self.rows, self.clips = RuleState(rule, precision, param_groups), rule.clips
        self.audit = None
        if check_field("audit_rate", audit_rate):
            if why := audit_refusal(rule.name, backend):
                raise ValueError(f"audit_rate={audit_rate!r}: {why}")
            action = check_field("audit_action", audit_action)
            self.audit = Audit(audit_rate, action, partial(slot_name, param_groups))

    # -- groups and settings ----------------------------------------------------------------------

    def step_together(self, group: int, sets: Sequence[Sequence[int]]) -> None:
        self.step_mark.invalidate_plans()
        self.rows.groups[group].step_together(sets)

    def group_added(self) -> None:
        super().group_added()
        group = self.param_groups[-1]
        self.check_settings(group)
        self.rows.groups.append(GroupState(group["params"], self.rule.of(group)))

    def forget_groups(self, count: int) -> None:
        super().forget_groups(count)
        del self.rows.groups[count:]
        self.step_mark.invalidate_plans()

    def check_settings(self, group: dict[str, Any]) -> None:
        self.rule.check_settings(group)
        if group.get("cautious_wd") and (why := cautious_decay_refusal(self._backend)):
            raise ValueError(f"cautious_wd=True: {why}")
        known = zip(self.param_groups, self.rows.groups, strict=False)
        found = (state.regions for other, state in known if other["params"] is group["params"])
        regions = next(found, None) or map(region_of, group["params"])
        self.rule.check_shapes(group, (region.shape for region in regions))

    def check_groups(self) -> None:
        for index, (group, checked) in enumerate(
            zip(self.param_groups, self.rows.groups, strict=True)
        ):
            values = list(group.values())
            if all_same(values, checked.values):
                continue
            try:
                self.check_settings(group)
            except (TypeError, ValueError) as error:
                text = f"param_groups[{index}]: {error}; nothing was stepped"
                raise RefusedSettings(text) from error
            is_fixed = not any(isinstance(value, Tensor) for value in values)
            checked.values, checked.rule = values if is_fixed else [], self.rule.of(group)
            moments = checked.rule.moments(group)
            # Keep the old tuple if the names are equal, because a launch is reused only if the
            # tuple is the same object.
            if checked.moments != moments:
                checked.moments = moments

    def is_collective(self, update: SlotUpdate) -> bool:
        """True if all ranks with shards of a slot must step the slot together."""
        group = self.param_groups[update.slot.group]
        return self.rule.of(group).is_collective(group, update)

    def is_elementwise(self, group: Settings) -> bool:
        """True if each element of a group's parameters is stepped independently of other
        elements."""
        return self.rule.of(group).is_elementwise(group)

    # -- steps ------------------------------------------------------------------------------------

    def clipped(self, updates: SlotUpdates, grad_norm: float) -> SlotUpdates:
        groups = [slot.group for slot in updates.slots]
        of_slots = list(zip(groups, updates.multipliers, strict=True))
        known: dict[tuple[int, Multiplier], Multiplier] = {}
        for group, value in set(of_slots):
            known[group, value] = value
            if not isinstance(value, DeviceMultiplier):
                settings = self.param_groups[group]
                known[group, value] = self.rule.effective_multiplier(settings, value, grad_norm)
        return replace(updates, multipliers=list(map(known.__getitem__, of_slots)))

    def step_slots(self, updates: SlotUpdates) -> None:
        self.run_step(self.plan_step(updates))

    def run_step(self, planned: _Planned, queue: list[Callable[[], None]] | None = None) -> None:
        rows = self.rows
        self.step_mark.touch()
        for plan, launches in planned:
            for launch in launches:
                self.carry_out(launch if queue is None else launch._replace(queue=queue))
            rows.groups[plan.group].count(plan.positions)
            if isinstance(multiplier := launches[0].multiplier, DeviceMultiplier):
                rows.pending_skips.append((rows.groups[plan.group], plan.positions, multiplier))

    def plan(self, updates: SlotUpdates) -> list[Launch]:
        """Return the launches with which :meth:`step_slots` would step these updates.

        The launches have copies of the settings, so later changes of a group do not affect the
        launches. State is allocated, but nothing is stepped or counted.
        """
        self.follow_memory()
        # NOTE: plan() also runs during backward, and other code may have changed settings since the
        # last check. So check the settings again.
        self.check_groups()
        planned = self.plan_step(updates, has_copies=True)
        return [launch for _, launches in planned for launch in launches]

    def plan_step(self, updates: SlotUpdates, *, has_copies: bool = False) -> _Planned:
        """Return the launches of each group.

        All launches are built before any launch starts, so an error leaves all parameters
        unstepped.

        Args:
            updates: updates of the step.
            has_copies: True to copy the settings of the groups into the launches.
        """
        if self.rows.pending_skips:
            self.rows.subtract_skipped()
        make = partial(_by_group, updates.slots, self.rows.groups)
        plans = updates.slots.part("groups", (self.step_mark.plan_key,), make)
        found = []
        for plan in plans:
            chosen = updates if len(plans) == 1 else plan.members.take(updates)
            group = self.param_groups[plan.group]
            settings = group
            if has_copies:
                # Copy tensors of one element as numbers, because other code may write the tensors.
                settings = {
                    key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                    for key, value in group_settings(group).items()
                }
            found.append((plan, self._plan_group(plan, chosen, settings)))
        return found

    def use_mark(self, mark: StepMark) -> None:
        super().use_mark(mark)
        self.rows.parked = mark.parked

    def recover(self) -> None:
        self.rows.recover()
        if self.audit is not None:
            self.audit.forget()

    def _plan_group(
        self, plan: GroupPlan, updates: SlotUpdates, settings: dict[str, Any]
    ) -> list[Launch]:
        index, _, positions, together = plan
        rows, kept = self.rows, self.rows.groups[index]
        mains = rows.mains(index, positions, together)
        counts = kept.counts(positions, together)
        is_common = len(set(updates.multipliers)) == 1 and len(set(counts)) == 1
        multiplier = updates.multipliers[0]
        # NOTE: reuse the launch only if all sources are the same objects. follow_memory() replaces
        # the list of main params if main params or state have other memory. A plan for another
        # thread has copied settings, so it never reuses a launch.
        sources = mains, settings, updates.outputs, updates.changed, kept.moments
        if is_common and together is not None and all_same(sources, together.sources):
            return [self._with_grads(together.launch, updates, int(counts[0]) + 1)]
        keys = rows.stored_keys(index, positions, mains)
        if is_common and all(len(each) == 1 for each in (mains.devices, mains.dtypes, set(keys))):
            shared = mains[0].device, mains[0].dtype, counts[0], multiplier, keys[0]
            planned = self._planned(index, shared, updates, positions, mains, settings)
            # Do not keep a launch with copies of strided tensors, or with memory that other code
            # may replace, because later steps would write to wrong memory.
            may_stay = planned.lists.main is mains and planned.lists.output is planned.outputs
            is_live = settings is self.param_groups[index]
            if together is not None and mains is together.mains and may_stay and is_live:
                # Remove gradients and step plan from the kept launch, because the kept launch would
                # keep both objects allocated.
                lists = replace(planned.lists, grad=[])
                together.launch = planned._replace(updates=_NO_UPDATES, lists=lists)
                together.sources = sources
            return [planned]
        if len(counts) < len(positions):
            counts = counts * len(positions)
        devices, dtypes = ([main.device for main in mains], [main.dtype for main in mains])
        of_each = list(zip(devices, dtypes, counts, updates.multipliers, keys, strict=True))
        several = []
        for shared in dict.fromkeys(of_each):
            members = [i for i, other in enumerate(of_each) if other == shared]
            chosen, of_launch = updates.take(members), [positions[member] for member in members]
            some = CachedTensorList(map(mains.__getitem__, members))
            several.append(self._planned(index, shared, chosen, of_launch, some, settings))
        return several

    def _with_grads(self, last: Launch, updates: SlotUpdates, step: int) -> Launch:
        """Return a kept launch with the gradients, step number, multiplier and random bits of this
        step.

        Args:
            last: the kept launch.
            updates: updates of the step.
            step: number of the step of these parameters, from 1 on.
        """
        grads = updates.grads
        if not isinstance(grads, CachedTensorList) or not grads.contiguous:
            grads = contiguous(CachedTensorList.of(grads))
        lists, precision = replace(last.lists, grad=grads), self.rows.precision
        if precision.stochastic_rounding:
            lists = replace(lists, noise=self._noise(step, updates))
        if precision.ema_decay is not None:
            lists = replace(lists, average_weight=precision.average_weight(step))
        multiplier = updates.multipliers[0]
        return last._replace(step=step, multiplier=multiplier, updates=updates, lists=lists)

    def _planned(
        self,
        index: int,
        shared: _Shared,
        updates: SlotUpdates,
        positions: list[int],
        mains: CachedTensorList,
        settings: dict[str, Any],
    ) -> Launch:
        outputs, rows = updates.outputs, self.rows
        device, _, count, multiplier, keys = shared
        step, regions = int(count) + 1, rows.groups[index].regions
        if not isinstance(outputs, CachedTensorList):
            outputs = list(outputs)
        lists = TensorLists(
            main=contiguous(mains),
            grad=contiguous(CachedTensorList.of(updates.grads)),
            state={key: rows.state_tensors(index, key, positions) for key in keys},
            output=contiguous_outputs(outputs),
            noise=self._noise(step, updates),
            average_weight=rows.precision.average_weight(step),
            prepared={},
            changed=updates.bitmaps,
            follows=not updates.is_staged and any(output is not None for output in outputs),
        )
        return Launch(
            group=index,
            positions=positions,
            settings=settings,
            regions=[regions[position] for position in positions],
            device=device,
            step=step,
            multiplier=multiplier,
            updates=updates,
            mains=mains,
            outputs=outputs,
            lists=lists,
            workspace=self.workspace,
            rule=rows.groups[index].rule,
        )

    def _noise(self, step: int, updates: SlotUpdates) -> list[Noise] | None:
        """Return random bits that depend only on seed, step and parameter; None without stochastic
        rounding."""
        precision = self.rows.precision
        if not precision.stochastic_rounding:
            return None
        seed = mix(precision.seed ^ mix(step))
        streams = [
            stream_of(self.slot_name(slot)) if stream is None else stream
            for slot, stream in zip(updates.slots, updates.slots.streams, strict=True)
        ]
        return [Noise(seed, stream & 0xFFFFFFFF, stream >> 32) for stream in streams]

    def announce(self, launch: Launch, device: torch.device) -> None:
        """Copy the scalars of a launch to the device before windows of the launch are copied there.

        Otherwise the scalars would arrive after all bytes of the first window.
        """
        if isinstance(launch.rule, ElementRule):
            scalars = RULE_SCALARS[launch.rule.name].at(launch.settings, launch.step)
            self.backend_for(device)[0].announce(launch.lists, scalars, device)

    def carry_out(self, launch: Launch) -> None:
        """Step the tensors of a launch. Any thread may call this method, because the method reads
        no field of the executor that a step changes."""
        if borrows:
            lists = launch.lists
            before_writing(launch.mains, lists.main, *lists.state.values())
        backend, _ = self.backend_for(launch.device)
        if launch.lists.source is not None and not backend.reads_source:
            launch = launch._replace(lists=launch.lists.in_place())
        if launch.lists.follows and not (launch.rule.has_one_pass and backend.follows_weights):
            continue_from(
                launch.lists.main,
                launch.lists.output,
                launch.lists.changed,
                may_read=not backend.takes_device_multipliers,
            )
            launch = launch._replace(lists=replace(launch.lists, follows=False))
        if self.audit is not None:
            launch = launch._replace(begin_audit=partial(self.audit.begin, launch))
        launch.rule.apply(launch, backend)
        if launch.lists.main is not launch.mains or launch.lists.output is not launch.outputs:
            launch.copy_back()

    # -- audits -----------------------------------------------------------------------------------

    def finish_step(self) -> None:
        if self.audit is not None:
            self._report_audit(self.audit, wait=False)

    def _report_audit(self, audit: Audit, wait: bool) -> None:
        try:
            audit.report(wait)
        # An audit can also fail while a caller reads state between steps. No interrupted step then
        # makes later steps raise, so mark the state as inconsistent here.
        except AuditError as error:
            self.step_mark.break_off(error)
            raise

    # -- backends ---------------------------------------------------------------------------------

    def backend_and_reason(self, group: int, place: Place, device: torch.device) -> tuple[str, str]:
        found = self.backend_for(_HOST if place == "host" else device)
        settings = self.param_groups[group]
        return self.rule.of(settings).backend_and_reason(*found, settings)

    def verdict_device(self) -> torch.device | None:
        first = next((group["params"][0] for group in self.param_groups if group["params"]), None)
        if self.rule.needs_numbers or first is None:
            return None
        if not self.backend_for(first.device)[0].takes_device_multipliers:
            return None  # Return early to avoid reading the devices of thousands of parameters.
        if any(group.get("max_grad_norm") for group in self.param_groups):
            return None
        devices = {param.device for group in self.param_groups for param in group["params"]}
        return devices.pop() if len(devices) == 1 else None

    def marks_changes(self, slot: Slot) -> bool:
        device = self.stepped(slot).device
        return self.rule.has_one_pass and self.backend_for(device)[0].marks_changes

    def metrics(self) -> dict[str, float]:
        counted = {} if self.workspace is None else self.workspace.metrics()
        return counted if self.audit is None else counted | self.audit.metrics()

    # -- state and main params --------------------------------------------------------------------

    def state_of(self, slot: Slot) -> SlotState:
        if self.audit is not None:
            self._report_audit(self.audit, wait=True)
        self.rows.groups[slot.group].show(slot.position)
        return SlotState(self.rows, slot, self.slot_name(slot))

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        self.rows.subtract_skipped()
        self.rows.allocate_state(slots)

    def memory_moved(self, slot: Slot | None = None) -> None:
        self.step_mark.invalidate_plans()
        self.rows.replaced(slot)

    def follow_memory(self) -> None:
        """Use the current memory of main params and state, which callers may have replaced by
        ``tensor.data = ...``, ``set_`` or ``swap_tensors``.

        Raises:
            ValueError: state has another shape or dtype now. The message names slot and key. The
                former memory is restored, if the former memory is known.
        """
        for index, group_state in enumerate(self.rows.groups):
            for kept in group_state.sets:
                has_moved = kept.mains is not None and kept.mains.has_moved()
                if kept.mains is not None and has_moved:
                    # Move main params back to their device of the last step. Offloaded main params
                    # stay on the host.
                    for main, before in zip(kept.mains, kept.mains.held, strict=False):
                        if main.device != before.device and id(main) not in self.rows.parked.homes:
                            give_memory(main, main.data.to(before.device))
                if group_state.is_shown and group_state.has_moved(kept):
                    has_moved = True
                    for position in kept.positions:
                        self.rows.check_memory(Slot(index, position), kept)
                    kept.watched = CachedTensorList()
                    kept.forms = group_state.forms_of(kept)
                if has_moved:
                    kept.forget()

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.rows.precision.main_dtype(dtype)

    @in_own_modes
    def main_param(self, slot: Slot) -> Tensor:
        main = self.rows.stepped(slot)
        if not self.rows.is_split(main.dtype):
            return self.stepped(slot)
        remainder = self.rows.uncounted_live(slot).get(REMAINDER)
        return join(main, None if remainder is None else remainder.to(main.device))

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        self.rows.set_main_param(slot, value)


_NO_UPDATES = SlotUpdates.of([])


def _by_group(slots: StepPlan, groups: Sequence[GroupState]) -> list[GroupPlan]:
    """Return a plan for each group of the slots, in the order in which the groups occur."""
    members: dict[int, list[int]] = {}
    for index, slot in enumerate(slots):
        members.setdefault(slot.group, []).append(index)
    plans = []
    for group, indices in members.items():
        positions = [slots[index].position for index in indices]
        together = groups[group].set_at(positions)
        if together is not None:
            positions = together.positions
        plans.append(GroupPlan(group, UpdateSelection(indices, slots), positions, together))
    return plans
