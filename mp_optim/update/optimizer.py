"""Torch optimizers over an executor: what users hold, and hand to a wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mp_optim.process.calls import in_own_modes
from mp_optim.slots import Slot, SlotUpdate, SlotUpdates, current_grad, iter_slots, update_of
from mp_optim.slots.executor import Executor
from mp_optim.slots.keyed_optimizer import Closure, SlotKeyedOptimizer
from mp_optim.slots.seen_params import check_memory
from mp_optim.update.backends.selection import warn_of_missing_kernels
from mp_optim.update.executor import RuleExecutor
from mp_optim.update.measures import global_grad_norm
from mp_optim.update.rule import Rule
from mp_optim.update.state_format import StatePrecision

E = TypeVar("E", bound=Executor)


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
        self._last = SlotUpdates.of([])  # without gradients
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
        updates = []
        for slot, param in iter_slots(self.param_groups):
            if (grad := current_grad(param)) is not None:
                name = self.slot_name(slot)
                _check_grad(name, grad)
                updates.append(update_of(slot, name, param, grad))
        clips = any(group.get("max_grad_norm", 0.0) for group in self.param_groups)
        grad_norm = global_grad_norm(updates) if clips else None
        columns = SlotUpdates.of(updates)
        if columns.slots == self._last.slots:  # a launch is kept for these very objects
            kept = self._last
            columns = replace(columns, slots=kept.slots, outputs=kept.outputs, changed=kept.changed)
        self._last = replace(columns, grads=())
        self.step_slots(columns, grad_norm=grad_norm)
        return loss

    @in_own_modes
    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        """Step the given slots, and only those.

        Args:
            updates, grad_norm: see :meth:`~mp_optim.slots.executor.Executor.step_slots`.
        """
        self.share_settings()
        self.executor.check_groups()
        with self.step_mark.step(self):
            self.executor.step_slots(SlotUpdates.of(updates), grad_norm=grad_norm)
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


def _check_grad(name: str, grad: Tensor) -> None:
    if grad.layout != torch.strided or not grad.is_floating_point():
        raise TypeError(
            f"{name}: gradient is {grad.dtype}, layout {grad.layout}; dense "
            "floating-point gradients are supported"
        )
