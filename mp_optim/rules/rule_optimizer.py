"""Torch optimizers over an executor, for users and wrappers.

The executor steps by a rule, or calls a torch optimizer of another package. That optimizer gets
FP32 gradients in ``.grad`` and keeps its state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.config.setting_checks import check_schedule
from mp_optim.core import (
    CachedTensorList,
    DeviceMultiplier,
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
from mp_optim.core.executor import Executor, Place
from mp_optim.core.keyed_optimizer import Closure, SlotKeyedOptimizer
from mp_optim.core.slot_state import STEP, SlotState, State, StateStore, check_state, check_step
from mp_optim.core.tensors import ParamWatcher, check_memory, continue_from
from mp_optim.host.calls import in_own_modes
from mp_optim.host.host_memory import as_tensor
from mp_optim.kernels.checksums import global_grad_norm
from mp_optim.kernels.selection import warn_of_missing_kernels
from mp_optim.kernels.state_format import StatePrecision
from mp_optim.rules.rule import NAMED_RULES, Rule
from mp_optim.rules.rule_executor import RuleExecutor

E = TypeVar("E", bound=Executor)


class SlotOptimizer(SlotKeyedOptimizer, Generic[E]):
    """Torch optimizer over an executor. It adds param groups, passes the parameters' gradients to
    the executor, and shows the executor's state.

    Args:
        params: parameters, named parameters or param groups.
        defaults: settings for groups without their own settings.
        executor: new executor without groups.

    Attributes:
        executor: steps the parameters. A wrapper of this optimizer takes the executor over and
            calls it; the groups of this optimizer then have main params.
    """

    executor: E

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], executor: E) -> None:
        self.executor = executor
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
            closure: computes the loss, with autograd on; None to use present gradients.

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
        self._check_grads(indices, grads)
        params = [every[index] for index in indices]
        reused = self.step_mark.reused[id(self)]
        if indices != reused.get("indices") or reused["seen"].moved(params):
            slots = self._slots_at(indices)
            updates = SlotUpdates.of(
                [
                    update_of(slot, self.slot_name(slot), param, grad)
                    for slot, param, grad in zip(slots, params, grads, strict=True)
                ]
            )
            # Drop the gradients, because stored gradients would stay allocated until the next step.
            updates = replace(updates, grads=())
            reused.update(indices=indices, seen=ParamWatcher(params), updates=updates)
        if not (reused["seen"].plain and are_plain(grads)):
            grads = list(map(local_grad, params, grads))
        last: SlotUpdates = reused["updates"]
        return replace(last, grads=CachedTensorList(grads))

    def _check_grads(self, indices: Sequence[int], grads: Sequence[Tensor]) -> None:
        if {grad.layout for grad in grads} <= {torch.strided} and all(
            map(Tensor.is_floating_point, grads)
        ):
            return
        for slot, grad in zip(self._slots_at(indices), grads, strict=True):
            if grad.layout != torch.strided or not grad.is_floating_point():
                raise TypeError(
                    f"{self.slot_name(slot)}: the gradient is {grad.dtype} with layout "
                    f"{grad.layout}, but only dense floating-point gradients are supported; build "
                    "the embedding with sparse=False, or train the parameter by another optimizer"
                )

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


class ForeignExecutor(Executor, StateStore):
    """Executor over an optimizer of another package.

    That optimizer keys its state by tensors. When a tensor in ``param_groups`` is replaced, the
    executor moves the state to the new tensor.

    Args:
        optimizer: the optimizer. The executor uses its live param groups.

    Raises:
        TypeError: the optimizer has other weights for evaluation.
    """

    writes_settings = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups)
        self.optimizer, self.label = optimizer, type(optimizer).__name__
        if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
            raise TypeError(
                f"optimizer={self.label}: the optimizer has separate weights for evaluation "
                "(train(), eval()), which the model would not get; step the optimizer without a "
                "wrapper of mp_optim"
            )
        self.sizes = [len(group["params"]) for group in self.param_groups]
        self._state_keys = [list(group["params"]) for group in self.param_groups]
        self._own_positions: dict[int, dict[int, int]] = {}

    def has_only(self, group: int, positions: Sequence[int]) -> None:
        self._own_positions[group] = {given: own for own, given in enumerate(positions)}

    def _own(self, slot: Slot) -> Slot:
        """Return a slot's group and position in the optimizer's groups, which may lack some
        slots."""
        positions = self._own_positions.get(slot.group)
        return slot if positions is None else Slot(slot.group, positions[slot.position])

    def slot_name(self, slot: Slot) -> str:
        return super().slot_name(self._own(slot))

    def stepped(self, slot: Slot) -> Tensor:
        return super().stepped(self._own(slot))

    def step_instead(self, slot: Slot, tensor: Tensor) -> None:
        super().step_instead(self._own(slot), tensor)

    def _move_state(self) -> None:
        """Key the state of replaced tensors by the new tensors.

        All state of replaced tensors is removed before any is stored, because two tensors may have
        swapped slots.
        """
        state, keys = self.optimizer.state, chain.from_iterable(self._state_keys)
        # A new group has no keys yet, so the lists may differ in length.
        pairs = zip(keys, all_params(self.param_groups), strict=False)
        replaced = [(new, state.pop(key)) for key, new in pairs if key is not new and key in state]
        state.update(replaced)
        self._state_keys = [list(group["params"]) for group in self.param_groups]

    def _param(self, slot: Slot) -> Tensor:
        """Return the tensor at a slot, after moving the state of replaced tensors."""
        param, own = self.stepped(slot), self._own(slot)
        keys = self._state_keys
        if len(keys) <= own.group or keys[own.group][own.position] is not param:
            self._move_state()
        return param

    def forget_groups(self, count: int) -> None:
        super().forget_groups(count)
        del self._state_keys[count:]

    def check_settings(self, group: dict[str, Any]) -> None:
        check_schedule(group)

    def backend_and_reason(self, group: int, place: Place, device: torch.device) -> tuple[str, str]:
        return self.label, "given by the caller; gets FP32 gradients"

    def state_of(self, slot: Slot) -> SlotState:
        return SlotState(self, slot, self.slot_name(slot))

    def live_state(self, slot: Slot) -> State:
        """Return the tensors of the optimizer's state, and its numbers as tensors. Empty before the
        first step.

        An item of a list has a key such as ``key[0]``.
        """
        return dict(_flat(self.optimizer.state.get(self._param(slot), {})))

    def check_fitted(self, slot: Slot, state: State) -> None:
        live = self.live_state(slot)
        if state and live:
            check_state(self.slot_name(slot), live, state)
        # Before the first step there is no state to compare with, so accept any shape and dtype.
        elif STEP in state:
            check_step(self.slot_name(slot), state[STEP])

    def check_values(self, slot: Slot, key: str, values: Tensor) -> None:
        if key == STEP:
            check_step(self.slot_name(slot), values)

    def load_state(self, slot: Slot, state: State) -> None:
        if not state:
            self.reset_state(slot)
            return
        param, group = self._param(slot), self.param_groups[slot.group]
        live = self.optimizer.state.get(param, {})
        leaves = dict(_leaves(live))
        step_on_device = bool(group.get("fused") or group.get("capturable"))
        loaded: dict[str, Any] = {}
        for key, value in state.items():
            present = leaves.get(key, _present_form(key, value))
            is_on_host = key == STEP and not step_on_device
            loaded[key] = _in_form_of(present, value, None if is_on_host else param.device)
        self.optimizer.state[param] = {**live, **_nested(loaded)}

    def reset_state(self, slot: Slot) -> None:
        self.optimizer.state.pop(self._param(slot), None)

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        """Check that the optimizer's state can be saved. The optimizer allocates state at its first
        step.

        Raises:
            TypeError: the optimizer keeps data that no state dict can store. The message names the
                data.
        """
        # Move first, because torch's state_dict() has only state of the tensors in the param
        # groups.
        self._move_state()
        kept: list[Any] = [*self.optimizer.state_dict().keys() - {"state", "param_groups"}]
        kept += [key for key in self.optimizer.state if not isinstance(key, Tensor)]
        if slots and kept:
            raise TypeError(
                f"optimizer={self.label} keeps {sorted(map(str, kept))} outside the state of its "
                "parameters, which cannot be saved; train without saving, or choose another "
                "optimizer"
            )
        for slot in slots:
            for key, value in self.optimizer.state.get(self._param(slot), {}).items():
                if (other := _other_than_tensors(value)) is not None:
                    raise TypeError(
                        f"optimizer={self.label} keeps a {type(other).__name__} under {key!r} in "
                        f"the state of {self.slot_name(slot)}, but only tensors, numbers and lists "
                        "of tensors and numbers can be saved; train without saving, or choose "
                        "another optimizer"
                    )

    @in_own_modes
    def step_slots(self, updates: SlotUpdates) -> None:
        self._move_state()
        for _, param in iter_slots(self.param_groups):
            param.grad = None
        updates = SlotUpdates.of(updates)
        mains = [self.stepped(update.slot) for update in updates]
        if not updates.is_staged:
            continue_from(mains, updates.outputs)
        for update, main in zip(updates, mains, strict=True):
            # verdict_device() returns None, so a step always has multipliers as numbers.
            assert not isinstance(update.multiplier, DeviceMultiplier)
            wide = torch.promote_types(main.dtype, torch.float32)
            main.grad = update.grad.to(wide, copy=True).mul_(update.multiplier).to(main.dtype)
        self.step_mark.touch()
        self.step_mark.open_state()
        self.optimizer.step()
        for update, main in zip(updates, mains, strict=True):
            main.grad = None
            if update.output is not None:
                update.output.copy_(main)


_ITEM = re.compile(r"(?P<list>.+)\[(?P<index>\d+)\]")


def _other_than_tensors(value: Any) -> Any:
    """Return a value, or an item in nested lists, that is neither a tensor nor a number; None if
    there is none."""
    if isinstance(value, list | tuple):
        others = (_other_than_tensors(item) for item in value)
        return next((other for other in others if other is not None), None)
    return None if value is None or isinstance(value, Tensor | int | float) else value


def _leaves(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys with tensors, numbers, empty lists, and items of lists."""
    for key, value in state.items():
        if isinstance(value, list | tuple) and value:
            yield from _leaves({f"{key}[{index}]": item for index, item in enumerate(value)})
        elif isinstance(value, Tensor | int | float | list):
            yield key, value


def _flat(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the items of :func:`_leaves` as tensors. An empty list becomes a uint8 tensor, shape
    (0,)."""
    for key, value in _leaves(state):
        if isinstance(value, Tensor):
            yield key, value
        elif isinstance(value, list):
            yield key, torch.empty(0, dtype=torch.uint8, device="cpu")
        else:
            yield key, torch.tensor(value, dtype=torch.float64, device="cpu")


def _present_form(key: str, saved: Any) -> Any:
    """Return the value that an optimizer without state would keep for a saved tensor: the inverse
    of :func:`_flat`.

    torch's ``step`` stays a tensor: float64 if torch's default dtype is float64, else float32.
    """
    is_torchs = key == "step" and torch.get_default_dtype() == torch.float64
    if not isinstance(saved, Tensor) or is_torchs:
        return saved
    if saved.dtype == torch.uint8 and saved.shape == (0,):
        return []
    if saved.dtype == torch.float64 and saved.dim() == 0:
        return int(saved) if saved == saved.round() else float(saved)
    return saved


def _in_form_of(live: Any, saved: Any, device: torch.device | None) -> Any:
    """Return a copy of a saved value in the type of the optimizer's value: a number, an empty list
    or a tensor.

    Args:
        live: the optimizer's value.
        saved: the saved value.
        device: device of the copy; None for the saved tensor's device.
    """
    if isinstance(live, list):
        return []
    tensor = as_tensor(saved).detach()
    is_moved = isinstance(saved, Tensor) and device is not None
    copy = tensor.to(device if is_moved else tensor.device, copy=True)
    return copy if isinstance(live, Tensor) else type(live)(copy.item())


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return state with lists built from items with keys such as ``key[0]``."""
    nested: dict[str, Any] = {}
    lists: dict[str, dict[int, Any]] = {}
    for key, value in leaves.items():
        if item := _ITEM.fullmatch(key):
            lists.setdefault(item["list"], {})[int(item["index"])] = value
        else:
            nested[key] = value
    if lists:
        in_order = {key: sorted(items.items()) for key, items in lists.items()}
        nested |= _nested({key: [item for _, item in items] for key, items in in_order.items()})
    return nested


def executor_of(optimizer: torch.optim.Optimizer) -> Executor:
    """Return the executor of an optimizer. For an optimizer of another package, create a
    :class:`ForeignExecutor`."""
    if isinstance(optimizer, SlotOptimizer):
        executor: Executor = optimizer.executor
        return executor
    return ForeignExecutor(optimizer)
