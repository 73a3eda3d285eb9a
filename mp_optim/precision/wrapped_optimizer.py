"""WrappedOptimizer: one inner optimizer with main params, and its part of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.precision.agreed_sums import AgreedSums
from mp_optim.precision.averaged_weights import WeightSwap
from mp_optim.precision.backward_overlap import BackwardOverlap
from mp_optim.precision.description import Description, describe
from mp_optim.precision.grad_scaler import MegatronGradScaler
from mp_optim.precision.graph_step import (
    check_capturable,
    graph_metrics,
    graph_notes,
)
from mp_optim.precision.host_swap import HostSwap
from mp_optim.precision.main_params import MainParams
from mp_optim.precision.measure import (
    EXCLUDED,
    MAIN,
    NormKey,
)
from mp_optim.precision.megatron_optimizer import MegatronOptimizer
from mp_optim.precision.settings_agreement import SettingsAlike
from mp_optim.precision.step_grads import StepGrads
from mp_optim.precision.wrapped_grads import WrappedGrads
from mp_optim.ranks.process_groups import ProcessGroups
from mp_optim.slots import (
    Slot,
    SlotUpdate,
    current_grad,
    iter_slots,
    local_tensor,
    with_names,
)
from mp_optim.slots.group_lists import added_whole
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.keyed_optimizer import Mode
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.slots.slot_state import SlotState
from mp_optim.update import as_slot_optimizer, choose_backend


class WrappedOptimizer(MegatronOptimizer):
    """Common part of the precision wrappers.

    Args:
        optimizer: any torch optimizer over the model's parameters. This package's own step in one
            pass from the gradients as they are; a foreign one gets FP32 ``.grad``.
        config: see :class:`mp_optim.OptimizerConfig`.
        grad_scaler: loss scale, or None for 1.
        init_state_fn: accepted for drop-in use; state is allocated by :meth:`init_state`.
        process_groups: the ranks to agree with on the gradient norm.

    Raises:
        TypeError, ValueError: a parameter's dtype does not fit, naming it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None = None,
        init_state_fn: Any = None,
        *,
        process_groups: ProcessGroups | None = None,
    ) -> None:
        self._given = optimizer
        self.inner = as_slot_optimizer(optimizer)
        self.process_groups = process_groups or ProcessGroups()
        self._host_swap = HostSwap()
        groups = [with_names(group) for group in self.inner.param_groups]
        super().__init__(groups, dict(optimizer.defaults), config, grad_scaler)
        self._mains = MainParams(
            self.param_groups, self.inner, self.process_groups, self.check_param
        )
        self._table = self._mains.table
        self.averages.swaps.append(WeightSwap(self._mains))
        self.use_mark(self.step_mark)
        self.share_settings()
        self.backward_link = BackwardOverlap(
            self,
            self._table,
            partial(_sum_of_squares, config.fused_backend),
            self.share_settings,
            config.release_gradients,
        )
        self.agreed_sums = AgreedSums(
            self._mains,
            config,
            self.param_groups,
            self.process_groups.grad_stats,
            self.backward_link,
        )
        self.early_work.links.append(self.backward_link)
        self.backward_link.follow(self.get_parameters())
        if config.optimizer_cuda_graph:
            check_capturable(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._given

    @abstractmethod
    def check_param(self, slot: Slot, param: Tensor) -> None:
        """Raise if a trainable parameter's dtype does not fit this wrapper."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group here and in the wrapped optimizer, with main params where they are needed.

        Names of parameters that are given without are looked up in the model the optimizer was
        built for.

        Raises:
            ValueError: some parameter is not there, and the other groups have names.
        """
        if self._is_wrapped():
            with added_whole(self):
                self._add(param_group)
        else:  # torch's constructor is adding the first groups
            super().add_param_group(param_group)

    def _is_wrapped(self) -> bool:
        """Whether the first groups are there."""
        return len(self.param_groups) >= len(self.inner.param_groups)

    def _add(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(_with_model_names(self, param_group))
        added = self.param_groups[-1]
        self.inner.add_param_group(with_names(added))
        self.inner.check_settings(self.inner.param_groups[-1])  # torch's do not
        for key, value in self.inner.param_groups[-1].items():
            added.setdefault(key, value)
        self.share_settings()
        # backward may come before a step
        self.backward_link.follow(self.get_parameters())
        self.agreed_sums.group_added()
        self._mains.bind_group(len(self.param_groups) - 1)

    def forget_groups(self, count: int) -> None:
        super().forget_groups(count)
        self.inner.forget_groups(count)
        self.backward_link.follow(self.get_parameters())

    # -- the step ---------------------------------------------------------------------------------

    def collect_grads(self) -> StepGrads:
        if self._host_swap.occupied:
            raise RuntimeError(
                "the optimizer is offloaded: call restore_from_cpu() before step()"
            )
        self.backward_link.finish()
        self.share_settings()
        self.inner.check_groups()
        self.make_current()
        self.backward_link.follow(self._table.params)
        released = self.backward_link.released
        indices, grads = self._table.grads(self.slot_name, released)
        if not all(self._table.bound):
            self._mains.bind_trained(indices)
        return WrappedGrads(self, self._table, indices, grads)

    def step_slots(
        self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None
    ) -> None:
        """Step given slots of the wrapped optimizer: what :meth:`step` does after its verdict."""
        self.share_settings()
        self.inner.step_slots(updates, grad_norm=grad_norm)
        self.share_settings()

    def verdict_device(self) -> torch.device | None:
        return self.inner.verdict_device()

    def settings_alike(self) -> list[SettingsAlike]:
        return [self._table.settings]

    def norm_ranks(self) -> list[ProcessGroup]:
        ranks = self.process_groups.grad_stats
        return [] if ranks is None else [ranks]

    def reduces(self) -> bool:
        """Whether a step takes part in reductions with other ranks."""
        return bool(self.norm_ranks()) or any(
            key.shard_groups for key in self._table.keys
        )

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        released = self.backward_link.released
        if released:
            self.backward_link.finish()
        for index, (slot, param) in enumerate(iter_slots(self.param_groups)):
            grad = current_grad(param)
            grad = released.get(index) if grad is None else grad
            if grad is not None:
                yield self.slot_name(slot), local_tensor(grad)

    # -- the optimizer below ----------------------------------------------------------------------

    def optimizers_below(self) -> Sequence[SlotOptimizer]:
        return [self.inner]

    def switch_mode(self, mode: Mode) -> None:
        with self.step_mark.step(self):
            self.make_current()
            self.share_settings()
            self.step_mark.touch()
            self.inner.switch_mode(mode)
            for slot in self._mains.trained_slots():
                self._mains.write_model(slot)
            self._mains.take_as_seen()
            self.share_settings()

    # -- main params and state --------------------------------------------------------------------

    def follow_model(self, slot: Slot | None = None) -> None:
        self._mains.follow(slot)

    def make_current(self, slot: Slot | None = None) -> None:
        self._mains.follow(slot)
        self._mains.bind_trainable(slot)
        self._mains.check_remainders(slot)

    def state_of(self, slot: Slot) -> SlotState:
        return self._mains.state_of(slot)

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        self.inner.allocate_state([slot for slot in slots if self.has_state(slot)])

    def param_checksums(self) -> list[int | None]:
        return self._mains.checksums()

    def check_settings(self, group: dict[str, Any]) -> None:
        self.inner.check_settings(group)

    def main_param(self, slot: Slot) -> Tensor:
        self.step_mark.check("main_param")
        self.make_current(slot)
        return self._mains.main_param(slot)

    def has_separate_main(self, slot: Slot) -> bool:
        return self._mains.is_separate(slot)

    def has_state(self, slot: Slot) -> bool:
        return self._mains.is_bound(slot)

    def norm_key(self, slot: Slot) -> NormKey:
        return self._table.keys[self._table.index(slot)]

    @property
    def has_quantized_params(self) -> bool:
        return any(self._table.quantized)

    def sharers(self) -> Iterator[tuple[str, tuple[ProcessGroup, ...]]]:
        for slot in self._mains.trained_slots():
            yield self.slot_name(slot), self._mains.sharers(slot)

    def take_model_params(self, values: Mapping[str, Any]) -> None:
        self._mains.reload(values)

    def use_mark(self, mark: StepMark) -> None:
        super().use_mark(mark)
        self.inner.use_mark(mark)

    def recover(self) -> None:
        self.inner.recover()

    def offload_to_cpu(self) -> None:
        self.discard_early_work()  # it holds gradients
        self._host_swap.park(self._mains.accelerator_tensors())
        self.inner.memory_moved()

    def restore_from_cpu(self) -> None:
        self._host_swap.restore()
        self.inner.memory_moved()

    # -- what is going on -------------------------------------------------------------------------

    def describe(self) -> Description:
        rows = describe(self.param_groups, self.inner, self._table)
        return Description(rows.rows, (*rows.notes, *graph_notes(self.graphed)))

    def metrics(self) -> dict[str, float]:
        host, verdict = self.inner.host, self.counts.settle()
        norms = {
            f"grad_norm/{name}": norm
            for name, norm in verdict.norms.items()
            if name != EXCLUDED
        }
        scaler = self.grad_scaler
        return {
            "grad_norm": float("nan")
            if verdict.grad_norm is None
            else verdict.grad_norm,
            "loss_scale": 1.0 if scaler is None else float(scaler.present_scale),
            "multiplier": verdict.multipliers.get(MAIN, 0.0),
            "bytes_down": 0 if host is None else host.transfer_bytes.down,
            "bytes_up": 0 if host is None else host.transfer_bytes.up,
            **({} if host is None else host.metrics()),
            **self.inner.metrics(),
            **norms,
            **self.counts.metrics(),
            **self.health.metrics(),
            **graph_metrics(self.graphed),
            "reloaded_params": self._mains.reloaded,
        }


def _with_model_names(
    wrapper: WrappedOptimizer, group: dict[str, Any]
) -> dict[str, Any]:
    """The group, with names for its parameters where the other groups have names."""
    if wrapper.model_params is None or "params" not in group:
        return group
    params = (
        [group["params"]]
        if isinstance(group["params"], Tensor)
        else list(group["params"])
    )
    is_stub = not any(live["params"] for live in wrapper.param_groups)
    named = "param_names" in group or any(isinstance(param, tuple) for param in params)
    names = [] if named else wrapper.model_params.names_of(params)
    if is_stub and None not in names:
        for groups in (wrapper.param_groups, wrapper.inner.param_groups):
            groups[0].setdefault(
                "param_names", []
            )  # torch wants them in all groups or none
    if named or not any("param_names" in live for live in wrapper.param_groups):
        return {**group, "params": params}
    if None in names:
        lost = params[names.index(None)]
        raise ValueError(
            f"add_param_group: a parameter of shape {tuple(lost.shape)} is not in the model that "
            "the optimizer was built for, so it has no name here; give (name, parameter) pairs, "
            "such as list(module.named_parameters())"
        )
    return {**group, "params": list(zip(names, params, strict=True))}


def _sum_of_squares(fused_backend: str, grads: Sequence[Tensor]) -> Tensor:
    backend, _ = choose_backend(fused_backend, grads[0].device)
    return backend.sum_of_squares(grads)
