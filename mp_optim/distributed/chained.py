"""ChainedOptimizer: the dense and the expert part of a MoE as one optimizer.

The parts share one gradient norm, one verdict and one loss scale, so a step either happens for all
parameters or for none, and no part can drift to a scale of its own.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.distributed.grad_reducer import GradReducer
from mp_optim.distributed.optimizer import DistributedOptimizer
from mp_optim.distributed.reduction_order import reduce_in_one_order
from mp_optim.precision import MegatronOptimizer, Verdict
from mp_optim.precision.description import Description
from mp_optim.precision.device_verdict import DeviceVerdict
from mp_optim.precision.measure import Measurement, NormKey
from mp_optim.process.host_memory import empty_host_tensor
from mp_optim.slots import Multiplier, Slot, SlotStateView, SlotUpdate, local_tensor
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.slots.slot_state import SlotState

__all__ = ["ChainedOptimizer"]

_SUMMED = (
    "reloaded_params",
    "copy_wait_ms",
    "worker_wait_ms",
    "host_ms",
    "hidden_ms",
    "speculation_hits",
    "speculation_redone",
    "speculation_stale",
)


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
            raise ValueError(
                "the chained optimizers' configs differ; build all parts with one OptimizerConfig"
            )
        self.grad_scaler = self._parts[0].grad_scaler
        for part in self._parts:
            part.grad_scaler = self.grad_scaler
        self._last: Verdict | DeviceVerdict = Verdict()
        self._counts = {"steps": 0, "skipped_steps": 0}
        self._graphed = None
        self._state_view = SlotStateView(
            lambda: self.param_groups, self.slot_state, self.load_slot_state
        )
        groups = [group for part in self._parts for group in part.param_groups]
        torch.optim.Optimizer.__init__(
            self, [{"params": [empty_host_tensor()]}], dict(self._parts[0].defaults)
        )
        self.param_groups[:] = groups
        reducers = [
            reducer
            for part in self._parts
            if isinstance(part, DistributedOptimizer)
            and isinstance(reducer := part.grad_reducer, GradReducer)
        ]
        if len(reducers) > 1:
            reduce_in_one_order(
                reducers, again=self.config.data_parallel_sharding_strategy == "optim_grads"
            )
        self.use_mark(StepMark())

    def use_mark(self, mark: StepMark) -> None:
        self.step_mark = mark
        for part in self._parts:
            part.use_mark(mark)

    def recover(self) -> None:
        for part in self._parts:
            part.recover()

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
        raise AttributeError(
            "a chain of several optimizers has no single inner one; use .chained_optimizers"
        )

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
        kinds = [
            any(g.get("is_expert_parallel", False) for g in part.param_groups)
            for part in self._parts
        ]
        part = self._parts[len(kinds) - 1 - kinds[::-1].index(expert) if expert in kinds else -1]
        part.add_param_group(param_group)
        self.param_groups[:] = [group for part in self._parts for group in part.param_groups]

    # -- the step: the parts' measurements are one measurement, the verdict is for all ------------

    def gather(self) -> None:
        for part in self._parts:
            part.gather()

    def has_gradients(self) -> bool:
        return any(part.has_gradients() for part in self._parts)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for part in self._parts:
            yield from part.named_gradients()

    def sums(self) -> Measurement:
        return functools.reduce(operator.add, (part.sums() for part in self._parts))

    def verdict_device(self) -> torch.device | None:
        devices = {part.verdict_device() for part in self._parts if not part.is_stub_optimizer}
        return devices.pop() if len(devices) == 1 else None

    def apply(self, verdict: Verdict | DeviceVerdict) -> None:
        super().follow(verdict)
        for part in self._parts:
            part.apply(verdict)

    def follow(self, verdict: Verdict | DeviceVerdict) -> None:
        super().follow(verdict)
        for part in self._parts:
            part.follow(verdict)

    def forget_grads(self) -> None:
        for part in self._parts:
            part.forget_grads()

    def carry_out(
        self, multipliers: Mapping[str, Multiplier], grad_norm: float | None = None
    ) -> None:
        for part in self._parts:
            part.carry_out(multipliers, grad_norm)

    def graph_key(self) -> Any:
        return [part.graph_key() for part in self._parts]

    def obstacle(self) -> str:
        return next(filter(None, (part.obstacle() for part in self._parts)), "")

    def reduces(self) -> bool:
        return any(part.reduces() for part in self._parts)

    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        raise NotImplementedError(
            "a chain is stepped by step(); step the parts' inner optimizers by slot"
        )

    def check_param(self, slot: Slot, param: Tensor) -> None:
        part, theirs = self._part(slot)
        part.check_param(theirs, param)

    # -- everything else is asked of the part that has the slot -----------------------------------

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        for part in self._parts:
            part.allocate_state(
                [theirs for owner, theirs in map(self._part, slots) if owner is part]
            )

    def state_of(self, slot: Slot) -> SlotState:
        part, theirs = self._part(slot)
        return part.state_of(theirs)

    def follow_model(self, slot: Slot | None = None) -> None:
        if slot is None:
            for part in self._parts:
                part.follow_model()
        else:
            part, theirs = self._part(slot)
            part.follow_model(theirs)

    def check_remainders(self, slot: Slot | None = None) -> None:
        if slot is None:
            for part in self._parts:
                part.check_remainders()
        else:
            part, theirs = self._part(slot)
            part.check_remainders(theirs)

    def check_settings(self, group: dict[str, Any]) -> None:
        self._parts[0].check_settings(group)  # the same rule in all

    def param_checksums(self) -> list[int | None]:
        return [value for part in self._parts for value in part.param_checksums()]

    def has_separate_main(self, slot: Slot) -> bool:
        part, theirs = self._part(slot)
        return part.has_separate_main(theirs)

    def has_state(self, slot: Slot) -> bool:
        part, theirs = self._part(slot)
        return part.has_state(theirs)

    def main_param(self, slot: Slot) -> Tensor:
        part, theirs = self._part(slot)
        return part.main_param(theirs)

    def norm_key(self, slot: Slot) -> NormKey:
        part, theirs = self._part(slot)
        return part.norm_key(theirs)

    @property
    def has_quantized_params(self) -> bool:
        return any(part.has_quantized_params for part in self._parts)

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        for part in self._parts:
            part.reload_model_params(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The parts' ``no_sync``, where they have one (see
        :class:`~mp_optim.DistributedOptimizer`)."""
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                if hasattr(part, "no_sync"):
                    stack.enter_context(part.no_sync())
            yield

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
        rows: list[Any] = []
        notes: list[str] = []
        for part in self._parts:
            described = part.describe()
            rows += [row.shifted(first) for row in described.rows]
            notes += described.notes
            first += len(part.param_groups)
        graphed = () if self._graphed is None else (self._graphed.note,)
        return Description(tuple(rows), (*notes, *graphed))

    def metrics(self) -> dict[str, float]:
        parts = [part.metrics() for part in self._parts]
        names = dict.fromkeys(key for part in parts for key in part)
        summed = {
            key: sum(part.get(key, 0) for part in parts)
            for key in names
            if key.startswith("bytes_") or key in _SUMMED
        }
        graphs = (
            {}
            if self._graphed is None
            else {"graph_captures": self._graphed.captures, "graph_replays": self._graphed.replays}
        )
        return {**parts[0], **summed, **graphs}
