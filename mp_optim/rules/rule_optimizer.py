"""Torch optimizers over an executor, for users and wrappers.

The executor steps by a rule, or is a :class:`~mp_optim.rules.foreign_executor.ForeignExecutor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.core import (
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
from mp_optim.core.executor import Executor
from mp_optim.core.keyed_optimizer import Closure, SlotKeyedOptimizer
from mp_optim.core.tensors import ParamWatcher, check_memory
from mp_optim.host.calls import in_own_modes
from mp_optim.kernels.checksums import global_grad_norm
from mp_optim.kernels.selection import warn_of_missing_kernels
from mp_optim.kernels.state_format import StatePrecision
from mp_optim.rules.foreign_executor import ForeignExecutor
from mp_optim.rules.rule import NAMED_RULES, Rule
from mp_optim.rules.rule_executor import RuleExecutor

E = TypeVar("E", bound=Executor)


class SlotOptimizer(SlotKeyedOptimizer, Generic[E]):
    """Torch optimizer over an executor. The optimizer adds param groups, passes the parameters'
    gradients to the executor, and shows the executor's state.

    Args:
        params: parameters, named parameters or param groups.
        defaults: settings for groups without their own settings.
        executor: new executor without groups.

    Attributes:
        executor: executor that steps the parameters. A mixed-precision wrapper of this optimizer
            calls the executor directly. The groups of this optimizer then have main params.
    """

    executor: E

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], executor: E) -> None:
        self.executor = executor
        self._reused: tuple[object, list[int], ParamWatcher, SlotUpdates]
        self._reused = None, [], ParamWatcher(), SlotUpdates.of([])
        executor.label = type(self).__name__
        self._live_groups, self._sizes = executor.param_groups, executor.sizes
        super().__init__(params, defaults)
        self.use_mark(self.step_mark)

    # -- groups -----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group.

        Raises:
            ValueError: a setting is out of range, or parameters share memory. The message names the
                setting or the parameters.
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
        """Do nothing, because the executor already has the number of parameters of each group."""

    def forget_groups(self, count: int) -> None:
        self.executor.forget_groups(count)
        self.shared_settings.forget_groups(count)

    # -- steps ------------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: function that computes the loss, with autograd on; None to use present
                gradients.

        Returns:
            The closure's loss, or None.

        Raises:
            TypeError: a parameter is not FP32, or a gradient is sparse or complex. The message
                names the parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    @in_own_modes
    def _step_all(self) -> None:
        self.check_lists()
        updates = self._updates()
        clips = any(group.get("max_grad_norm", 0.0) for group in self.param_groups)
        grad_norm = global_grad_norm(updates) if clips else None
        self.step_slots(updates, grad_norm=grad_norm)

    def _updates(self) -> SlotUpdates:
        """Return the updates of a step.

        All columns except gradients are reused from the last step while the same parameters have
        gradients and keep their memory.
        """
        every = all_params(self.param_groups)
        present = current_grads(every)
        indices = [index for index, grad in enumerate(present) if grad is not None]
        grads = [grad for grad in present if grad is not None]
        are_dense = {grad.layout for grad in grads} <= {torch.strided}
        if not (are_dense and all(map(Tensor.is_floating_point, grads))):
            for slot, grad in zip(self._slots_at(indices), grads, strict=True):
                if grad.layout != torch.strided or not grad.is_floating_point():
                    raise TypeError(
                        f"{self.slot_name(slot)}: the gradient is {grad.dtype} with layout "
                        f"{grad.layout}, but only dense floating-point gradients are supported; "
                        "build the embedding with sparse=False, or train the parameter by another "
                        "optimizer"
                    )
        params = [every[index] for index in indices]
        source, known, seen, last = self._reused
        is_current = source is self.step_mark.plan_key and indices == known
        if not is_current or seen.moved(params):
            slots = self._slots_at(indices)
            last = SlotUpdates.of(
                [
                    update_of(slot, self.slot_name(slot), param, grad)
                    for slot, param, grad in zip(slots, params, grads, strict=True)
                ]
            )
            # Drop the gradients, because stored gradients would stay allocated until the next step.
            seen, last = ParamWatcher(params), replace(last, grads=())
            self._reused = self.step_mark.plan_key, indices, seen, last
        if not (seen.plain and are_plain(grads)):
            grads = list(map(local_grad, params, grads))
        return replace(last, grads=CachedTensorList(grads))

    def _slots_at(self, indices: Sequence[int]) -> list[Slot]:
        slots = [slot for slot, _ in iter_slots(self.param_groups)]
        return [slots[index] for index in indices]

    @in_own_modes
    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        """Step the given slots only.

        Args:
            updates: update of each slot (:meth:`~mp_optim.core.executor.Executor.step_slots`).
            grad_norm: global L2 norm of the gradients after their multipliers, for a rule that
                clips; None to step without clipping.
        """
        self.share_settings()
        self.executor.check_groups()
        self.executor.follow_memory()
        with self.step_mark.step(self):
            chosen = SlotUpdates.of(updates)
            if self.executor.clips and grad_norm is not None:
                chosen = self.executor.clipped(chosen, grad_norm)
            self.executor.step_slots(chosen)
            self.executor.finish_step()
        if self.executor.writes_settings:
            self.share_settings()

    # -- main params and metrics -------------------------------------------------------------------

    def main_param(self, slot: Slot) -> Tensor:
        """Return the FP32 main param of a slot.

        For a main param that is stored in parts, the result is a copy.
        """
        return self.executor.main_param(slot)

    def metrics(self) -> dict[str, float]:
        """Return counters of the last step, by name."""
        return self.executor.metrics()


class RuleOptimizer(SlotOptimizer[RuleExecutor]):
    """Optimizer that steps FP32 tensors, and bfloat16 tensors with remainders, by a rule of this
    package.

    Args:
        rule: a name in ``NAMED_RULES``, or a rule, such as ``MuonRule("adam")``.
        params: parameters, named parameters or param groups.
        lr: learning rate.
        weight_decay: factor of the weight decay.
        backend: see ``OptimizerConfig.fused_backend``.
        **settings: hyperparameters of the rule (:mod:`mp_optim.config.rules` has names and
            defaults), for groups without their own; fields of
            :class:`~mp_optim.kernels.state_format.StatePrecision`, such as ``exp_avg_dtype``; and
            ``audit_rate`` and ``audit_action`` of ``OptimizerConfig``.

    Raises:
        ValueError: the backend is not usable, has no kernels for the rule, or does not support the
            storage format.
        TypeError: a setting is unknown.
    """

    def __init__(
        self,
        rule: str | Rule,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        *,
        backend: str = "auto",
        **settings: Any,
    ) -> None:
        if isinstance(rule, str):
            rule = NAMED_RULES[rule]
        defaults = {**RULES[rule.name].defaults, **rule.group_settings}
        kept = {name: settings.pop(name) for name in settings.keys() - defaults.keys()}
        audit = kept.pop("audit_rate", 0.0), kept.pop("audit_action", "warn")
        executor = RuleExecutor([], rule, StatePrecision(**kept), backend, *audit)
        given = {"lr": lr, "weight_decay": weight_decay, **defaults, **settings}
        super().__init__(params, given, executor)
        executor.label = rule.name if type(self) is RuleOptimizer else type(self).__name__
        warn_of_missing_kernels(backend, rule.kernels, self.param_groups)


def executor_of(optimizer: torch.optim.Optimizer) -> Executor:
    """Return the executor of an optimizer. For an optimizer of another package, create a
    :class:`ForeignExecutor`."""
    if isinstance(optimizer, SlotOptimizer):
        executor: Executor = optimizer.executor
        return executor
    return ForeignExecutor(optimizer)
