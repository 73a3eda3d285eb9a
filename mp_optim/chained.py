"""ChainedOptimizer: the dense and the expert part of a MoE as one optimizer.

The parts share one gradient norm, one verdict and one loss scale, so a step either happens for all
parameters or for none, and no part can drift to a scale of its own.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.precision import MegatronOptimizer, Verdict
from mp_optim.precision.description import Description
from mp_optim.precision.measure import Measurement
from mp_optim.slot_optimizer import SlotOptimizer
from mp_optim.slots import Slot, SlotStateView, SlotUpdate, local_tensor

__all__ = ["ChainedOptimizer"]


class ChainedOptimizer(MegatronOptimizer):
    """Several :class:`MegatronOptimizer` that step together.

    ``param_groups`` are the parts' own dicts, one after the other: a change here is a change there.

    Args:
        chained_optimizers: at least one, all built with equal configs. The first one's loss scaler
            becomes the scaler of all.

    Raises:
        ValueError: no parts, or parts whose configs differ.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        if not chained_optimizers:
            raise ValueError("chained_optimizers is empty; pass at least one optimizer")
        self._parts = list(chained_optimizers)
        self.config = self._parts[0].config
        if any(part.config != self.config for part in self._parts):
            raise ValueError("the chained optimizers' configs differ; build all parts with one OptimizerConfig")
        self.grad_scaler = self._parts[0].grad_scaler
        for part in self._parts:
            part.grad_scaler = self.grad_scaler
        self._verdict = Verdict()
        self._state_view = SlotStateView(lambda: self.param_groups, self.slot_state, self.load_slot_state)
        groups = [group for part in self._parts for group in part.param_groups]
        torch.optim.Optimizer.__init__(self, [{"params": [torch.zeros(0)]}], dict(self._parts[0].defaults))
        self.param_groups[:] = groups

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        return self._parts

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """The inner optimizer, if there is only one part.

        Raises:
            AttributeError: with several parts; use ``chained_optimizers``.
        """
        if len(self._parts) == 1:
            return self._parts[0].optimizer
        raise AttributeError("a chain of several optimizers has no single inner one; use .chained_optimizers")

    def _part(self, slot: Slot) -> tuple[MegatronOptimizer, Slot]:
        index = slot.group
        for part in self._parts:
            if index < len(part.param_groups):
                return part, Slot(index, slot.position)
            index -= len(part.param_groups)
        raise IndexError(f"{slot} is not in the chain")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the last part of its kind (``is_expert_parallel`` or not)."""
        if not self.param_groups:  # torch's constructor
            SlotOptimizer.add_param_group(self, param_group)
            return
        expert = param_group.get("is_expert_parallel", False)
        kinds = [any(g.get("is_expert_parallel", False) for g in part.param_groups) for part in self._parts]
        part = self._parts[len(kinds) - 1 - kinds[::-1].index(expert) if expert in kinds else -1]
        part.add_param_group(param_group)
        self.param_groups[:] = [group for part in self._parts for group in part.param_groups]

    # -- the step: the parts' measurements are one measurement, the verdict is for all ------------

    def measure(self) -> Measurement:
        return functools.reduce(operator.add, (part.measure() for part in self._parts))

    def apply(self, verdict: Verdict) -> None:
        self._verdict = verdict
        for part in self._parts:
            part.apply(verdict)

    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        raise NotImplementedError("a chain is stepped by step(); step the parts' inner optimizers by slot")

    def check_param(self, slot: Slot, param: Tensor) -> None:
        part, theirs = self._part(slot)
        part.check_param(theirs, param)

    # -- everything else is asked of the part that has the slot -----------------------------------

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        for part in self._parts:
            part.allocate_state([theirs for owner, theirs in map(self._part, slots) if owner is part])

    def slot_state(self, slot: Slot) -> dict[str, Any]:
        part, theirs = self._part(slot)
        return part.slot_state(theirs)

    def check_slot_state(self, slot: Slot, state: dict[str, Any]) -> None:
        part, theirs = self._part(slot)
        part.check_slot_state(theirs, state)

    def load_slot_state(self, slot: Slot, state: dict[str, Any]) -> None:
        part, theirs = self._part(slot)
        part.load_slot_state(theirs, state)

    def full_slot_state(self, slot: Slot) -> dict[str, Any]:
        part, theirs = self._part(slot)
        return part.full_slot_state(theirs)

    def fit_slot_state(self, slot: Slot, state: dict[str, Any], convert: bool) -> dict[str, Any]:
        part, theirs = self._part(slot)
        return part.fit_slot_state(theirs, state, convert)

    def has_separate_main(self, slot: Slot) -> bool:
        part, theirs = self._part(slot)
        return part.has_separate_main(theirs)

    def has_state(self, slot: Slot) -> bool:
        part, theirs = self._part(slot)
        return part.has_state(theirs)

    def _sync(self) -> None:
        for part in self._parts:
            part._sync()

    def named_main_params(self) -> Any:
        for part in self._parts:
            yield from part.named_main_params()

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        for part in self._parts:
            part.reload_model_params(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """The parts' ``no_sync``, where they have one (see :class:`~mp_optim.DistributedOptimizer`)."""
        stack = contextlib.ExitStack()
        for part in self._parts:
            if hasattr(part, "no_sync"):
                stack.enter_context(part.no_sync())
        return stack

    def finish_grad_sync(self) -> None:
        """The parts' ``finish_grad_sync``, where they have one."""
        for part in self._parts:
            getattr(part, "finish_grad_sync", lambda: None)()

    def finish_param_sync(self) -> None:
        """The parts' ``finish_param_sync``, where they have one."""
        for part in self._parts:
            getattr(part, "finish_param_sync", lambda: None)()

    def offload_to_cpu(self) -> None:
        for part in self._parts:
            part.offload_to_cpu()

    def restore_from_cpu(self) -> None:
        for part in self._parts:
            part.restore_from_cpu()

    @property
    def device(self) -> torch.device:
        return next((local_tensor(p).device for p in self.get_parameters()), torch.device("cpu"))

    def describe(self) -> Description:
        first = 0
        rows = []
        for part in self._parts:
            rows += [row.shifted(first) for row in part.describe().rows]
            first += len(part.param_groups)
        return Description(tuple(rows))

    def metrics(self) -> dict[str, float]:
        parts = [part.metrics() for part in self._parts]
        summed = {key: sum(part[key] for part in parts) for key in parts[0]
                  if key.startswith("bytes_") or key == "reloaded_params"}
        return {**parts[0], **summed}
