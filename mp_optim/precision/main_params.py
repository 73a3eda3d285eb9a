"""MainParams: every trainable parameter of the model beside the tensor that is stepped for it, kept
in agreement.

``param_groups`` are live and hold the model's own parameters, so torch schedulers, DCP, accelerate
and the HF Trainer find what they expect. The wrapped optimizer's hold main params. The two are
connected by position only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.checkpoint.blocks import is_cut
from mp_optim.config import OptimizerConfig
from mp_optim.precision.dtensor_state import as_sharded
from mp_optim.precision.grad_scaler import MegatronGradScaler
from mp_optim.precision.host_swap import HostSwap
from mp_optim.precision.measure import EXCLUDED, MAIN, NormKey
from mp_optim.precision.megatron_optimizer import MegatronOptimizer
from mp_optim.precision.param_state import BoundParam, ParamState, UntrainedState
from mp_optim.precision.remainders import Agreement
from mp_optim.precision.slot_table import SlotTable
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.quantized import (
    check_quantized,
    dequantized,
    forget_initial_values,
    holds,
    is_quantized,
)
from mp_optim.ranks.process_groups import ProcessGroups
from mp_optim.slots import (
    Slot,
    follow,
    iter_slots,
    local_tensor,
    same_memory,
    stream_of,
    with_names,
)
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.param_attributes import (
    grad_norm_group,
    is_shared,
    is_tensor_parallel,
    set_main_param,
    shard_info,
)
from mp_optim.slots.slot_state import SlotState
from mp_optim.slots.tensor_layout import Layout, layout_of, shard_groups_of
from mp_optim.update import as_slot_optimizer
from mp_optim.update.checksums import checksums_of

__all__ = ["MainParams"]


class MainParams(MegatronOptimizer):
    """The part of a precision wrapper that is there between steps: main params and state.

    Args:
        optimizer: any torch optimizer over the model's parameters.
        config: see :class:`mp_optim.OptimizerConfig`.
        grad_scaler: loss scale, or None for 1.
        process_groups: the ranks that share the model, by which duplicates are told.

    Attributes:
        inner: the optimizer in slot terms; its groups hold main params.

    Raises:
        TypeError, ValueError: a parameter's dtype does not fit, naming it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        process_groups: ProcessGroups | None,
    ) -> None:
        self._given = optimizer
        self.inner = as_slot_optimizer(optimizer)
        self.process_groups = process_groups or ProcessGroups()
        self._seen = SlotTable()
        self._norm_groups: list[str] | None = None
        self._reloaded = 0
        self._host_swap = HostSwap()
        self._agreement = Agreement()
        groups = [with_names(group) for group in self.inner.param_groups]
        super().__init__(groups, dict(optimizer.defaults), config, grad_scaler)
        for index in range(len(self.param_groups)):
            self._bind_group(index)
        self.use_mark(self.step_mark)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._given

    @abstractmethod
    def check_param(self, slot: Slot, param: Tensor) -> None:
        """Raise if a trainable parameter's dtype does not fit this wrapper."""

    # -- binding --------------------------------------------------------------------------------

    @in_own_modes
    def _bind_group(self, index: int) -> None:
        seen = self._seen
        seen.first.append(len(seen.slots))
        params = self.param_groups[index]["params"]
        self.inner.reserve_main_params(
            [
                (Slot(index, position), local_tensor(param))
                for position, param in enumerate(params)
                if param.requires_grad and not is_quantized(param)
            ]
        )
        for position, param in enumerate(params):
            slot = Slot(index, position)
            self._check_trainable(slot, param)
            seen.see(slot, param, self._norm_key(slot, param), self._layout(slot, param))
            seen.separate.append(param.requires_grad and self._bind(slot, param))
            seen.bound.append(param.requires_grad)
            seen.streams.append(stream_of(self.slot_name(slot), shard_info(param).first_element))
        self._norm_groups = None

    def _check_trainable(self, slot: Slot, param: Tensor) -> None:
        if param.is_inference():
            raise TypeError(
                f"{self.slot_name(slot)} was made inside torch.inference_mode(), so nothing can "
                "train it; "
                "build the model outside of it"
            )

    def _bind(self, slot: Slot, param: Tensor) -> bool:
        """Give a trainable parameter its main param; returns whether that is another tensor."""
        self.check_param(slot, param)
        check_quantized(self.slot_name(slot), param)
        local = dequantized(param) if is_quantized(param) else local_tensor(param)
        main = self.inner.new_main_param(slot, local)
        forget_initial_values(param)
        set_main_param(param, main)
        return is_quantized(param) or not same_memory(main, local)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group here and in the wrapped optimizer, with main params where they are needed.

        Names of parameters that are given without are looked up in the model the optimizer was
        built for.

        Raises:
            ValueError: some parameter is not there, and the other groups have names.
        """
        super().add_param_group(self._with_model_names(param_group))
        if len(self.param_groups) <= len(
            self.inner.param_groups
        ):  # torch's constructor is adding the first groups
            return
        added = self.param_groups[-1]
        self.inner.add_param_group(with_names(added))
        for key, value in self.inner.param_groups[-1].items():
            added.setdefault(key, value)
        self._bind_group(len(self.param_groups) - 1)

    def _with_model_names(self, group: dict[str, Any]) -> dict[str, Any]:
        if self.model_params is None or "params" not in group:
            return group
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        is_stub = not any(live["params"] for live in self.param_groups)
        named = "param_names" in group or any(isinstance(param, tuple) for param in params)
        names = [] if named else self.model_params.names_of(params)
        if is_stub and None not in names:
            for groups in (self.param_groups, self.inner.param_groups):
                groups[0].setdefault("param_names", [])  # torch wants them in all groups or none
        if named or not any("param_names" in live for live in self.param_groups):
            return {**group, "params": params}
        if None in names:
            lost = params[names.index(None)]
            raise ValueError(
                f"add_param_group: a parameter of shape {tuple(lost.shape)} is not in the model "
                "that the "
                "optimizer was built for, so it has no name here; give (name, parameter) pairs, "
                "such as "
                "list(module.named_parameters())"
            )
        return {**group, "params": list(zip(names, params, strict=True))}

    def _norm_key(self, slot: Slot, param: Tensor) -> NormKey:
        group = grad_norm_group(param) or MAIN
        if is_shared(param) or self._is_tensor_parallel_duplicate(slot, param):
            group = EXCLUDED
        return NormKey(group, shard_groups_of(self.slot_name(slot), param))

    def norm_key(self, slot: Slot) -> NormKey:
        return self._seen.keys[self._seen.index(slot)]

    def _is_tensor_parallel_duplicate(self, slot: Slot, param: Tensor) -> bool:
        tp = self._tensor_parallel(slot)
        return tp is not None and not is_tensor_parallel(param) and tp.rank() > 0

    def _tensor_parallel(self, slot: Slot) -> ProcessGroup | None:
        expert = self.param_groups[slot.group].get("is_expert_parallel", False)
        return self.process_groups.expert_tp if expert else self.process_groups.tp

    def _layout(self, slot: Slot, param: Tensor) -> Layout:
        return layout_of(param, self._tensor_parallel(slot))

    def _main(self, slot: Slot) -> Tensor:
        main: Tensor = self.inner.param_groups[slot.group]["params"][slot.position]
        return main

    def _local(self, slot: Slot) -> Tensor:
        """The model's parameter, or what this rank has of it."""
        return local_tensor(self.param(slot))

    def has_separate_main(self, slot: Slot) -> bool:
        return self._seen.separate[self._seen.index(slot)]

    def has_state(self, slot: Slot) -> bool:
        return self._seen.bound[self._seen.index(slot)]

    @in_own_modes
    def follow_model(self, slot: Slot | None = None) -> None:
        """Follow model tensors that were replaced or written from outside since they were last
        seen.

        Args:
            slot: one that has to be followed; by default all. Asking for one costs nothing if it
                has not changed.

        Raises:
            ValueError: a tensor's shape changed, naming the parameter.
        """
        if slot is not None and self._seen.is_same(slot, self.param(slot)):
            return
        seen, params = self._seen, self.get_parameters()
        changed = seen.changed(params)
        for index in changed:
            slot, param = seen.slots[index], params[index]
            if seen.bound[index]:
                self._rebind(index, slot, param)
            seen.keys[index], seen.layouts[index] = (
                self._norm_key(slot, param),
                self._layout(slot, param),
            )
        if changed:
            seen.look(params)

    def _rebind(self, index: int, slot: Slot, param: Tensor) -> None:
        main, local = self._main(slot), local_tensor(param)
        if is_quantized(param) != self._seen.quantized[index]:
            self._seen.trained(index, self._bind(slot, param))
        elif self._seen.separate[index]:
            set_main_param(param, main)
            self._reloaded += self._follow(slot, main, local, param)
            self.inner.written_outside(slot)
        elif param.dtype == main.dtype:
            self.inner.param_groups[slot.group]["params"][slot.position] = local
            set_main_param(param, local)
            self.inner.written_outside(slot)
        else:  # it was cast: now it needs a main param, or has no place here
            self._seen.trained(index, self._bind(slot, param))

    def _follow(self, slot: Slot, main: Tensor, local: Tensor, param: Tensor) -> bool:
        """Make a main param agree with the model's; returns whether it took other values."""
        if not is_quantized(param):
            return follow(main, local, self.slot_name(slot))
        check_quantized(self.slot_name(slot), param)
        if holds(param, self.inner.main_param(slot)):
            return False
        self.inner.set_main_param(slot, dequantized(param))
        return True

    @in_own_modes
    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        self.follow_model()
        seen = self._seen
        for index, (slot, param) in enumerate(iter_slots(self.param_groups)):
            if seen.separate[index] or (seen.bound[index] and param.dtype != torch.float32):
                source = (state_dict or {}).get(self.slot_name(slot), param)
                self.inner.set_main_param(
                    slot, dequantized(source) if is_quantized(source) else local_tensor(source)
                )
        self._agreement.expected.clear()
        seen.look(self.get_parameters())

    def main_param(self, slot: Slot) -> Tensor:
        self.step_mark.check("main_param")
        self._make_current(slot)
        param = self.param(slot)
        is_stepped_itself = param.dtype == torch.float32 and not self.has_separate_main(slot)
        if is_stepped_itself or not self.has_state(slot):
            return param
        return as_sharded(self.inner.main_param(slot), param)

    @property
    def has_quantized_params(self) -> bool:
        return any(self._seen.quantized)

    def use_mark(self, mark: StepMark) -> None:
        super().use_mark(mark)
        self.inner.use_mark(mark)

    def recover(self) -> None:
        self.inner.recover()

    # -- state ----------------------------------------------------------------------------------

    def state_of(self, slot: Slot) -> SlotState:
        if not self.has_state(slot):
            return UntrainedState(lambda: self.inner.state_of(slot))
        return self._trained_state(slot)

    def _trained_state(self, slot: Slot) -> ParamState:
        bound = BoundParam(
            slot,
            self.slot_name(slot),
            self.param(slot),
            self._main(slot),
            self.has_separate_main(slot),
            lambda: self.inner.main_param(slot),
        )
        return ParamState(self.inner.state_of(slot), bound, self._agreement)

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        self.inner.allocate_state([slot for slot in slots if self.has_state(slot)])

    def check_settings(self, group: dict[str, Any]) -> None:
        self.inner.check_settings(group)

    # -- remainders belong to the parameters they were saved with ---------------------------------

    def param_checksums(self) -> list[int | None]:
        slots = [
            slot
            for slot in filter(self.has_state, self.slots())
            if not is_cut(self.param(slot)) and self._trained_state(slot).has_remainder()
        ]
        known = dict(zip(slots, checksums_of([self._local(slot) for slot in slots]), strict=True))
        return [known.get(slot) for slot in self.slots()]

    def check_remainders(self, slot: Slot | None = None) -> None:
        if self._agreement.expected:
            self._agreement.check_expected(slot, self._local, self.slot_name)

    def _accelerator_tensors(self) -> Iterator[Tensor]:
        for slot in filter(self.has_state, self.slots()):
            tensors = list(self.inner.slot_state(slot).values())
            if self.has_separate_main(slot):
                tensors.append(self._main(slot))
            yield from (t for t in tensors if isinstance(t, Tensor) and t.device.type != "cpu")

    def offload_to_cpu(self) -> None:
        self.discard_early_work()  # it holds gradients
        self._host_swap.park(self._accelerator_tensors())
        self.inner.memory_moved()

    def restore_from_cpu(self) -> None:
        self._host_swap.restore()
        self.inner.memory_moved()
