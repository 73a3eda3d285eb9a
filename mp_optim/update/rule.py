"""RuleOptimizer: slots, state and batching for the rules this package steps itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.slot_optimizer import Closure, SlotOptimizer
from mp_optim.slots import Slot, SlotUpdate, current_grad, iter_slots, local_tensor
from mp_optim.update.backends import Backend, choose_backend
from mp_optim.update.lists import TensorLists

__all__ = ["RuleOptimizer", "check_adam_settings", "check_range", "global_grad_norm"]


class _Launch(NamedTuple):
    """Updates with equal keys go into one backend call."""

    group: int
    device: torch.device
    step: int
    multiplier: float


class RuleOptimizer(SlotOptimizer):
    """A rule over FP32 tensors. State per slot: ``step`` (0-d FP32 on the CPU) and the rule's moments.

    Args:
        backend: ``fused_backend`` of the config.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], backend: str = "auto") -> None:
        choose_backend(backend, torch.device("cpu"))
        self._backend = backend
        self._states: list[list[dict[str, Tensor]]] = []
        super().__init__(params, defaults)

    # -- what a rule provides -------------------------------------------------------------------

    @abstractmethod
    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the FP32 state tensors the rule keeps under a group's settings."""

    @abstractmethod
    def check_settings(self, group: dict[str, Any]) -> None:
        """Raise ValueError naming the setting and its value if it is out of range."""

    @abstractmethod
    def apply(self, backend: Backend, lists: TensorLists, group: dict[str, Any], step: int, multiplier: float,
              updates: Sequence[SlotUpdate]) -> None:
        """Carry out the rule for tensors that share device, group, step and multiplier."""

    # -- state ----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ValueError: a setting is out of range, naming it.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check_settings(group)
        except ValueError:
            self.param_groups.pop()
            raise
        self._states.append([{} for _ in group["params"]])

    def slot_state(self, slot: Slot) -> dict[str, Any]:
        state = self._states[slot.group][slot.position]
        group = self.param_groups[slot.group]
        main = local_tensor(group["params"][slot.position])
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name in self.moments(group):
            if name not in state:
                state[name] = torch.zeros(main.shape, dtype=torch.float32, device=main.device)
            elif state[name].shape != main.shape:
                raise ValueError(f"{self.slot_name(slot)}: the parameter's shape is now {tuple(main.shape)}, its "
                                 f"{name} has {tuple(state[name].shape)}; a replacement must keep the shape")
            elif state[name].device != main.device:
                state[name] = state[name].to(main.device)
        return state

    def load_slot_state(self, slot: Slot, state: dict[str, Any]) -> None:
        self.check_slot_state(slot, state)
        for key, own in self.slot_state(slot).items():
            own.copy_(torch.as_tensor(state[key]))

    # -- stepping -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Step every parameter that has a gradient; returns the closure's loss if one is given.

        Raises:
            TypeError: a parameter is not FP32, or a gradient is sparse or complex, naming it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = []
        for slot, param in iter_slots(self.param_groups):
            if (grad := current_grad(param)) is None:
                continue
            if grad.layout != torch.strided or not grad.is_floating_point():
                raise TypeError(f"{self.slot_name(slot)}: gradient is {grad.dtype}, layout {grad.layout}; dense "
                                "floating-point gradients are supported")
            updates.append(SlotUpdate(slot, local_tensor(grad)))
        clips = any(group.get("max_grad_norm", 0.0) for group in self.param_groups)
        self.step_slots(updates, grad_norm=global_grad_norm([u.grad for u in updates]) if clips else None)
        return loss

    @torch.no_grad()
    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        launches: dict[_Launch, list[SlotUpdate]] = defaultdict(list)
        for update in updates:
            main = self._main(update.slot)
            step = int(self.slot_state(update.slot)["step"]) + 1
            group = self.param_groups[update.slot.group]
            multiplier = self.effective_multiplier(group, update.multiplier, grad_norm)
            launches[_Launch(update.slot.group, main.device, step, multiplier)].append(update)
        for launch, together in launches.items():
            self._launch(launch, together)
        for update in updates:
            self._states[update.slot.group][update.slot.position]["step"] += 1

    def backend_for(self, device: torch.device) -> tuple[Backend, str]:
        """What carries the rule out on a device, and why."""
        return choose_backend(self._backend, device)

    def effective_multiplier(self, group: dict[str, Any], multiplier: float, grad_norm: float | None) -> float:
        """The multiplier after the rule's own clipping, if it has one."""
        return multiplier

    def _main(self, slot: Slot) -> Tensor:
        main = local_tensor(self.param_groups[slot.group]["params"][slot.position])
        if main.dtype != torch.float32:
            raise TypeError(f"{self.slot_name(slot)} is {main.dtype}: {type(self).__name__} steps float32; wrap it in "
                            "Float16OptimizerWithFloat16Params, or use get_megatron_optimizer")
        return main

    def _launch(self, launch: _Launch, updates: list[SlotUpdate]) -> None:
        mains = [self._main(update.slot) for update in updates]
        group = self.param_groups[launch.group]
        states = [self._states[update.slot.group][update.slot.position] for update in updates]
        outputs = [update.output for update in updates]
        lists = TensorLists(
            main=[main.contiguous() for main in mains], grad=[update.grad.contiguous() for update in updates],
            state={name: [state[name] for state in states] for name in self.moments(group)},
            output=[None if out is None else out if out.is_contiguous() else torch.empty_like(
                out, memory_format=torch.contiguous_format) for out in outputs])
        backend, _ = self.backend_for(launch.device)
        self.apply(backend, lists, group, launch.step, launch.multiplier, updates)
        for main, stepped in zip(mains, lists.main, strict=True):
            if stepped is not main and stepped.data_ptr() != main.data_ptr():
                main.copy_(stepped)
        for out, written in zip(outputs, lists.output, strict=True):
            if out is not None and written is not None and written is not out:
                out.copy_(written)


def global_grad_norm(grads: Sequence[Tensor]) -> float:
    """L2 norm over gradients that may lie on several devices, in FP64."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_device[grad.device].append(grad)
    sums = [choose_backend("auto", device)[0].sum_of_squares(found) for device, found in by_device.items()]
    return math.sqrt(sum(float(part.sum()) for part in sums))


def check_range(group: dict[str, Any], name: str, good: bool, rule: str) -> None:
    """Raise ValueError naming the setting unless ``good``."""
    if not good:
        raise ValueError(f"{name}={group[name]!r}: must be {rule}")


def check_adam_settings(group: dict[str, Any]) -> None:
    """The settings Adam and LAMB share."""
    check_range(group, "lr", float(group["lr"]) >= 0.0, ">= 0")
    check_range(group, "betas", len(group["betas"]) == 2 and all(0.0 <= float(b) < 1.0 for b in group["betas"]),
                "two numbers in [0, 1)")
    check_range(group, "eps", group["eps"] >= 0.0, ">= 0")
    check_range(group, "weight_decay", group["weight_decay"] >= 0.0, ">= 0")
