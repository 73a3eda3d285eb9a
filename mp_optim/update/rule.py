"""RuleOptimizer: how the rules of this package are stepped, many slots in a launch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.capabilities import refusal
from mp_optim.process.leases import before_writing
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots import (
    CachedTensorList,
    DeviceMultiplier,
    Slot,
    SlotUpdate,
    SlotUpdates,
    current_grad,
    iter_slots,
    stream_of,
    update_of,
)
from mp_optim.slots.keyed_optimizer import Closure
from mp_optim.update.backends import Backend, check_forms, choose_backend, rule_note
from mp_optim.update.backends.missing_kernels import warn_of_missing_kernels
from mp_optim.update.codecs import Noise, mix
from mp_optim.update.grad_norm import global_grad_norm
from mp_optim.update.group_state import GroupState, Share, updates_by_group
from mp_optim.update.kernel_args import TensorLists
from mp_optim.update.launches import (
    PlannedLaunch,
    SharedByLaunch,
    contiguous,
    contiguous_outputs,
)
from mp_optim.update.rule_state import RuleState
from mp_optim.update.state_format import StatePrecision

_HOST = torch.device("cpu")
_NO_SETTINGS = ("params", "param_names", "fqns")


class RuleOptimizer(RuleState):
    """A rule over FP32 tensors, and over bfloat16 ones beside remainders.

    Args:
        backend: ``fused_backend`` of the config.
        precision: how state is stored.

    Raises:
        ValueError: the backend is not usable, has no kernels for the rule, or does not store state
            so.
    """

    needs_numbers = True
    """Whether :meth:`apply` works with the multiplier itself, rather than hand it to a backend."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        backend: str = "auto",
        precision: StatePrecision | None = None,
    ) -> None:
        choose_backend(backend, _HOST)
        self._backend, how = backend, precision or StatePrecision()
        self._check_backend(how)
        self._shares: tuple[Sequence[Slot], list[Share]] | None = None
        self._unsettled: list[tuple[GroupState, list[int], DeviceMultiplier]] = []
        self._settled_settings: dict[int, dict[str, Any]] = {}
        super().__init__(params, defaults, how)
        warn_of_missing_kernels(backend, self.rule, self.param_groups)

    def _check_backend(self, how: StatePrecision) -> None:
        name = self._backend
        refused = refusal(
            name,
            self.rule,
            (how.exp_avg_dtype, how.exp_avg_sq_dtype),
            how.param_remainder_bits if how.store_param_remainders else None,
            how.stochastic_rounding,
        )
        if refused is not None:
            field, reason = refused
            raise ValueError(
                f"{field}={(name if field == 'fused_backend' else getattr(how, field))!r}: {reason}"
            )
        check_forms(
            name, _HOST, how.exp_avg_dtype == torch.bfloat16, how.store_param_remainders
        )

    # -- what a rule provides -------------------------------------------------------------------

    @abstractmethod
    def apply(
        self,
        backend: Backend,
        lists: TensorLists,
        group: dict[str, Any],
        step: int,
        multiplier: float | Tensor,
        updates: SlotUpdates,
    ) -> None:
        """Carry out the rule for tensors that share device, group, step and multiplier, which is a
        tensor only if ``backend.takes_device_multipliers`` and not :attr:`needs_numbers`.

        A rule with kernels calls its backend's method. One without does it all here: multiplies the
        gradients, reads moments and main params in FP32 and stores the new ones (
        :mod:`mp_optim.update.stored_values`), which also writes remainders and outputs.
        """

    def is_collective(self, update: SlotUpdate) -> bool:
        """Whether stepping a slot is a collective of the ranks that hold its parts, so that all
        have to do it in one order."""
        return False

    # -- stepping -------------------------------------------------------------------------------

    @in_own_modes
    def step(self, closure: Closure | None = None) -> Any:
        """Step every parameter that has a gradient; returns the closure's loss if one is given.

        Raises:
            TypeError: a parameter is not FP32, or a gradient is sparse or complex, naming it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_lists()
        updates = []
        for slot, param in iter_slots(self.param_groups):
            if (grad := current_grad(param)) is None:
                continue
            if grad.layout != torch.strided or not grad.is_floating_point():
                raise TypeError(
                    f"{self.slot_name(slot)}: gradient is {grad.dtype}, layout {grad.layout}; "
                    "dense "
                    "floating-point gradients are supported"
                )
            updates.append(update_of(slot, self.slot_name(slot), param, grad))
        clips = any(group.get("max_grad_norm", 0.0) for group in self.param_groups)
        self.step_slots(updates, grad_norm=global_grad_norm(updates) if clips else None)
        return loss

    @in_own_modes
    def step_slots(
        self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None
    ) -> None:
        self.settle()
        self.check_groups()
        # All launches are formed before the first is carried out: what does not fit is found while
        # nothing is stepped.
        planned = [
            (share, part, list(self._plan_group(share, part, group, grad_norm)))
            for share, part, group in self._shares_of(SlotUpdates.of(updates))
        ]
        with self.step_mark.step(self):
            self.step_mark.touch()
            for share, part, launches in planned:
                for launch in launches:
                    self.carry_out(launch)
                group_state = self._groups[share.group]
                group_state.count(share.positions)
                waits = [
                    value
                    for value in set(part.multipliers)
                    if isinstance(value, DeviceMultiplier)
                ]
                self._unsettled += [
                    (group_state, share.positions, value) for value in waits[:1]
                ]

    def check_groups(self) -> None:
        """Raise ValueError, naming group and setting, if one is out of range; looks again only at
        what was changed."""
        for index, group in enumerate(self.param_groups):
            now = {
                key: value for key, value in group.items() if key not in _NO_SETTINGS
            }
            if any(isinstance(value, Tensor) for value in now.values()):
                self._settled_settings.pop(index, None)  # it can be written in place
            elif self._settled_settings.get(index) == now:
                continue
            try:
                self.check_settings(group)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"param_groups[{index}]: {error}; nothing was stepped"
                ) from error
            self._settled_settings[index] = now

    def recover(self) -> None:
        self._unsettled = []
        for group_state in self._groups:
            group_state.replaced()

    def plan(
        self, updates: Sequence[SlotUpdate], grad_norm: float | None = None
    ) -> list[PlannedLaunch]:
        """What :meth:`step_slots` would do now, with settings of its own: later changes of a group
        do not reach it.

        Nothing is stepped or counted; state is allocated.
        """
        self.settle()
        self.check_groups()
        return [
            planned
            for share, part, group in self._shares_of(SlotUpdates.of(updates))
            for planned in self._plan_group(share, part, settings_now(group), grad_norm)
        ]

    def count(self, planned: PlannedLaunch) -> None:
        """Add a step to the slots of a launch that was carried out apart from
        :meth:`step_slots`."""
        self._groups[planned.group].count(planned.positions)

    def moved(self, planned: PlannedLaunch) -> None:
        """The tensors of a launch's slots have other memory now."""
        self._groups[planned.group].replaced()

    def _shares_of(
        self, columns: SlotUpdates
    ) -> Iterator[tuple[Share, SlotUpdates, dict[str, Any]]]:
        """The updates by group, with the group."""
        if self._shares is None or self._shares[0] is not columns.slots:
            self._shares = (columns.slots, updates_by_group(columns.slots))
        shares = self._shares[1]
        for share in shares:
            part = columns if len(shares) == 1 else columns.take(share.members)
            yield share, part, self.param_groups[share.group]
        if not isinstance(columns.slots, tuple):
            self._shares = None  # a list may hold others at the next step

    def _plan_group(
        self,
        share: Share,
        updates: SlotUpdates,
        settings: dict[str, Any],
        grad_norm: float | None,
    ) -> Iterator[PlannedLaunch]:
        index, positions = share.group, share.positions
        group_state = self._groups[index]
        mains = self._mains(index, positions)
        multipliers = {
            value: value
            if isinstance(value, DeviceMultiplier)
            else self.effective_multiplier(settings, value, grad_norm)
            for value in set(updates.multipliers)
        }
        counts = group_state.steps.tolist()
        if not group_state.is_whole(positions):
            counts = [counts[position] for position in positions]
        kept = self._kept(index, positions)
        alike = (mains.devices, mains.dtypes, set(counts), multipliers, set(kept))
        if all(len(values) == 1 for values in alike):
            launch = SharedByLaunch(
                mains[0].device,
                mains[0].dtype,
                counts[0],
                multipliers[updates.multipliers[0]],
                kept[0],
            )
            yield self._planned(index, launch, updates, positions, mains, settings)
            return
        values = [multipliers[value] for value in updates.multipliers]
        launches = [
            SharedByLaunch(main.device, main.dtype, count, value, names)
            for main, count, value, names in zip(
                mains, counts, values, kept, strict=True
            )
        ]
        for launch in dict.fromkeys(launches):
            members = [i for i, other in enumerate(launches) if other == launch]
            yield self._planned(
                index,
                launch,
                updates.take(members),
                [positions[index] for index in members],
                CachedTensorList(map(mains.__getitem__, members)),
                settings,
            )

    def settle(self) -> None:
        unsettled, self._unsettled = self._unsettled, []
        for group_state, positions, multiplier in unsettled:
            if multiplier.skipped():
                group_state.count(positions, -1)

    def verdict_device(self) -> torch.device | None:
        if self.needs_numbers or any(
            group.get("max_grad_norm") for group in self.param_groups
        ):
            return None
        params = [param for group in self.param_groups for param in group["params"]]
        if (
            not params
            or not self.backend_for(params[0].device)[0].takes_device_multipliers
        ):
            return None  # thousands of parameters need not be asked
        devices = {param.device for param in params}
        return devices.pop() if len(devices) == 1 else None

    def backend_for(self, device: torch.device) -> tuple[Backend, str]:
        """What carries the rule out on a device, and why."""
        backend, why = choose_backend(self._backend, device)
        if note := rule_note(backend.name, self.rule):
            return choose_backend("reference", device)[0], f"{why}; {note}"
        return backend, why

    def group_backend(
        self, group: dict[str, Any], device: torch.device
    ) -> tuple[str, str]:
        """Name of what steps a group on a device, and why."""
        backend, why = self.backend_for(device)
        return backend.name, why

    def effective_multiplier(
        self, group: dict[str, Any], multiplier: float, grad_norm: float | None
    ) -> float:
        """The multiplier after the rule's own clipping, if it has one."""
        return multiplier

    def _planned(
        self,
        index: int,
        launch: SharedByLaunch,
        updates: SlotUpdates,
        positions: list[int],
        mains: CachedTensorList,
        settings: dict[str, Any],
    ) -> PlannedLaunch:
        outputs = updates.outputs
        if not isinstance(outputs, CachedTensorList):
            outputs = list(outputs)
        lists = TensorLists(
            main=contiguous(mains),
            grad=contiguous(CachedTensorList.of(updates.grads)),
            state={
                key: self._state_tensors(index, key, positions)
                for key in self._stored_keys(launch.moments, launch.dtype)
            },
            output=contiguous_outputs(outputs),
            noise=_noise(
                self.precision, map(self.slot_name, updates.slots), launch, updates
            ),
            average_weight=self.precision.average_weight(int(launch.step) + 1),
        )
        return PlannedLaunch(
            index, positions, settings, launch, updates, mains, outputs, lists
        )

    def carry_out(self, planned: PlannedLaunch) -> None:
        """Step the tensors of a launch. Reads nothing of this object that a step changes, so any
        thread may do it."""
        launch, lists = planned.launch, planned.lists
        before_writing(planned.mains, lists.main, *lists.state.values())
        backend, _ = self.backend_for(launch.device)
        if not backend.reads_source:
            lists = lists.in_place()
        multiplier = (
            launch.multiplier.values
            if isinstance(launch.multiplier, DeviceMultiplier)
            else launch.multiplier
        )
        self.apply(
            backend,
            lists,
            planned.settings,
            int(launch.step) + 1,
            multiplier,
            planned.updates,
        )
        planned.copy_back()


def _noise(
    precision: StatePrecision,
    names: Iterable[str],
    launch: SharedByLaunch,
    updates: SlotUpdates,
) -> list[Noise] | None:
    """Random bits that depend on seed, step and parameter alone."""
    if not precision.stochastic_rounding:
        return None
    seed = mix(precision.seed ^ mix(int(launch.step) + 1))
    streams = [
        stream_of(name) if stream is None else stream
        for name, stream in zip(names, updates.streams, strict=True)
    ]
    return [Noise(seed, stream & 0xFFFFFFFF, stream >> 32) for stream in streams]


def settings_now(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings as plain values that stay what they are."""
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key not in _NO_SETTINGS
    }
