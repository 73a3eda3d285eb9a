"""Torch optimizers over an executor: what users hold, and hand to a wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from mp_optim.process.calls import in_own_modes, uncollected
from mp_optim.slots import (
    CachedTensorList,
    Slot,
    SlotUpdate,
    SlotUpdates,
    all_params,
    are_plain,
    current_grads,
    iter_slots,
    local_grad,
    update_of,
)
from mp_optim.slots.executor import Executor
from mp_optim.slots.keyed_optimizer import Closure, SlotKeyedOptimizer
from mp_optim.slots.seen_params import SeenParams, check_memory
from mp_optim.update.backends.selection import warn_of_missing_kernels
from mp_optim.update.executor import RuleExecutor
from mp_optim.update.measures import global_grad_norm
from mp_optim.update.rule import Rule
from mp_optim.update.state_format import StatePrecision

E = TypeVar("E", bound=Executor)
_NAMES = ("param_names", "fqns")


class _LastStep(NamedTuple):
    """What the last step's updates were made of: which parameters had a gradient, their names, and
    where they were."""

    indices: list[int]
    names: list[list[str]]
    seen: SeenParams
    updates: SlotUpdates


class SlotOptimizer(SlotKeyedOptimizer, Generic[E]):
    """The face of an executor: adds groups, steps from the parameters' gradients, shows state.

    Args:
        executor: new, without groups.

    Attributes:
        executor: does the work. A wrapper takes it over and steps it itself; this optimizer's
            groups then hold main params.
    """

    executor: E

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], executor: E) -> None:
        self.executor = executor
        executor.label = type(self).__name__
        self._live_groups, self._sizes = executor.param_groups, executor.sizes
        self._last = _LastStep([], [], SeenParams(), SlotUpdates.of([]))
        super().__init__(params, defaults)
        self.use_mark(self.step_mark)

    # -- groups -----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ValueError: a setting is out of range, or parameters share memory, naming them.
        """
        with self.added_whole():
            super().add_param_group(param_group)
            check_memory(
                (self.slot_name(slot), param)
                for slot, param in iter_slots(self.param_groups)
                if param.requires_grad
            )
            in_own_modes(self.executor.group_added)()

    def lists_are_known(self) -> None:
        """The executor knows how many parameters each group has."""

    def forget_groups(self, count: int) -> None:
        self.executor.forget_groups(count)
        self._settings.forget_groups(count)

    # -- steps ------------------------------------------------------------------------------------

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
        updates = self._updates()
        clips = any(group.get("max_grad_norm", 0.0) for group in self.param_groups)
        grad_norm = global_grad_norm(updates) if clips else None
        self.step_slots(updates, grad_norm=grad_norm)
        return loss

    def _updates(self) -> SlotUpdates:
        """The updates of a step. What they say beside gradients stays that of the last step, in the
        same objects, while the parameters with gradients are where they were."""
        every = all_params(self.param_groups)
        present = current_grads(every)
        indices = [index for index, grad in enumerate(present) if grad is not None]
        grads = [grad for grad in present if grad is not None]
        self._check_grads(indices, grads)
        params = [every[index] for index in indices]
        names = [list(group.get(key, ())) for group in self.param_groups for key in _NAMES]
        last = self._last
        if indices != last.indices or names != last.names or last.seen.moved(params):
            slots = self._slots_at(indices)
            updates = SlotUpdates.of(
                [
                    update_of(slot, self.slot_name(slot), param, grad)
                    for slot, param, grad in zip(slots, params, grads, strict=True)
                ]
            )
            last = self._last = _LastStep(indices, names, SeenParams(params), updates)
        if not (last.seen.plain and are_plain(grads)):
            grads = list(map(local_grad, params, grads))
        return replace(last.updates, grads=CachedTensorList(grads))

    def _check_grads(self, indices: Sequence[int], grads: Sequence[Tensor]) -> None:
        if {grad.layout for grad in grads} <= {torch.strided} and all(
            map(Tensor.is_floating_point, grads)
        ):
            return
        for slot, grad in zip(self._slots_at(indices), grads, strict=True):
            if grad.layout != torch.strided or not grad.is_floating_point():
                raise TypeError(
                    f"{self.slot_name(slot)}: gradient is {grad.dtype}, layout {grad.layout}; "
                    "dense floating-point gradients are supported"
                )

    def _slots_at(self, indices: Sequence[int]) -> list[Slot]:
        slots = [slot for slot, _ in iter_slots(self.param_groups)]
        return [slots[index] for index in indices]

    @in_own_modes
    @uncollected
    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        """Step the given slots, and only those.

        Args:
            updates, grad_norm: see :meth:`~mp_optim.slots.executor.Executor.step_slots` and
                :meth:`~mp_optim.slots.executor.Executor.clipped`.
        """
        self.share_settings()
        self.executor.check_groups()
        with self.step_mark.step(self):
            self.executor.step_slots(self.executor.clipped(SlotUpdates.of(updates), grad_norm))
            self.executor.report_audit()
        if self.executor.writes_settings:
            self.share_settings()

    # -- what is going on -------------------------------------------------------------------------

    def main_param(self, slot: Slot) -> Tensor:
        """The FP32 main param of a slot: what is stepped, or a copy if that is stored in parts."""
        return self.executor.main_param(slot)

    def metrics(self) -> dict[str, float]:
        """Numbers about the last step."""
        return self.executor.metrics()


class RuleOptimizer(SlotOptimizer[RuleExecutor]):
    """Steps FP32 tensors, and bfloat16 ones beside remainders, by a rule of this package.

    Args:
        settings: hyperparameters, for groups that do not have their own.
        backend: ``fused_backend`` of the config.
        precision: fields of :class:`~mp_optim.update.state_format.StatePrecision`: how state is
            stored; ``audit_rate`` and ``audit_action`` of the config may be among them.

    Raises:
        ValueError: the backend is not usable, has no kernels for the rule, or does not store state
            so.
    """

    def __init__(
        self,
        rule: Rule,
        params: Iterable[Any],
        settings: dict[str, Any],
        backend: str,
        precision: Mapping[str, Any],
    ) -> None:
        kept = dict(precision)
        audit = kept.pop("audit_rate", 0.0), kept.pop("audit_action", "warn")
        executor = RuleExecutor([], rule, StatePrecision(**kept), backend, *audit)
        super().__init__(params, settings, executor)
        warn_of_missing_kernels(backend, rule.kernels, self.param_groups)
