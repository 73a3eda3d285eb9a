"""The gradients of a wrapper's parameters, from their measurement to the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.precision.agreed_sums import AgreedSums
from mp_optim.precision.backward_overlap import BackwardOverlap
from mp_optim.precision.device_verdict import DeviceVerdict
from mp_optim.precision.grad_scaler import MegatronGradScaler
from mp_optim.precision.measure import MAIN, Measurement
from mp_optim.precision.param_sums import UpdateWatch
from mp_optim.precision.slot_table import SlotTable
from mp_optim.precision.step_grads import StepGrads
from mp_optim.precision.verdict import Verdict
from mp_optim.quantized import quantize_
from mp_optim.slots import CachedTensorList, Multiplier, SlotUpdate, local_tensor
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.optimizer import SlotOptimizer


class Wrapper(Protocol):
    """What is asked of the precision wrapper."""

    config: OptimizerConfig
    grad_scaler: MegatronGradScaler | None
    step_mark: StepMark
    inner: SlotOptimizer
    backward_link: BackwardOverlap
    agreed_sums: AgreedSums

    def step_slots(
        self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None
    ) -> None:
        """Step given slots of the wrapped optimizer."""


class WrappedGrads(StepGrads):
    """Gradients of a wrapper's parameters.

    Args:
        table: the wrapper's slots. indices: there, of the slots that have a gradient. grads: these,
            local.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        table: SlotTable,
        indices: list[int],
        grads: CachedTensorList,
    ) -> None:
        self._wrapper, self._table = wrapper, table
        self._indices, self._grads = indices, grads

    def has_any(self) -> bool:
        return bool(self._indices)

    def sums(self) -> Measurement:
        keys = self._table.keys_of(self._indices)
        sums = self._wrapper.agreed_sums
        places = sums.places(self._indices)
        return sums.measure(self._grads, keys, self._table.distinct_keys, places)

    def watch_updates(self) -> list[UpdateWatch]:
        inner, slots = self._wrapper.inner, self._table.slots

        def mains() -> list[Tensor]:
            return [local_tensor(inner.main_param(slot)) for slot in slots]

        return [self._wrapper.agreed_sums.watch_updates(mains)]

    def apply(self, verdict: Verdict | DeviceVerdict) -> None:
        if verdict.skip:
            self._wrapper.backward_link.skip()
        else:
            self.step(verdict.multipliers, self._clipped_norm(verdict))

    def _clipped_norm(self, verdict: Verdict | DeviceVerdict) -> float | None:
        norm, limit = verdict.norms.get(MAIN), self._wrapper.config.clip_grad
        return min(norm, limit) if norm is not None and limit > 0 else norm

    def step(
        self, multipliers: Mapping[str, Multiplier], grad_norm: float | None = None
    ) -> None:
        wrapper, table = self._wrapper, self._table
        updates = table.updates(self._indices, self._grads, multipliers)
        wrapper.step_slots(updates, grad_norm=grad_norm)
        if any(table.quantized):
            wrapper.step_mark.touch()
            for index in self._indices:
                if table.quantized[index]:
                    main = wrapper.inner.main_param(table.slots[index])
                    quantize_(table.params[index], main)
        table.seen.written()

    def graph_key(self) -> Any:
        config, scaler = self._wrapper.config, self._wrapper.grad_scaler
        limits = (
            config.clip_grad,
            config.grad_norm_skip_threshold,
            config.skip_step_sigma_factor,
            config.log_param_grad_norms > 0,
        )
        scale = None if scaler is None else scaler.present_scale.data_ptr()
        keys, grads = self._table.keys_of(self._indices), self._grads
        dtypes = [grad.dtype for grad in grads]
        strides = [] if grads.contiguous else [grad.stride() for grad in grads]
        memory = grads.addresses, grads.sizes, dtypes, strides
        zeros = config.log_num_zeros_in_grad
        return limits, zeros, scale, self._indices, keys, memory

    def obstacle(self) -> str:
        params = map(local_tensor, self._table.params)
        if self._grads.contiguous and all(map(Tensor.is_contiguous, params)):
            return ""
        return "a parameter or gradient is not contiguous, and is copied in each step"
