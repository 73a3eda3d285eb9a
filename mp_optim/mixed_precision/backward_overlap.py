"""What the precision wrappers let the layer below begin during backward: it is told of gradients as
they get ready."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.core import Slot, SlotUpdates, are_plain, current_grad, local_tensor, param_at
from mp_optim.core.executor import Executor
from mp_optim.core.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.core.param_attributes import has_main_grad
from mp_optim.host.torch_types import is_dtensor
from mp_optim.host.transfer import fetch
from mp_optim.kernels.kernel_args import fp32
from mp_optim.kernels.sums import index_on
from mp_optim.mixed_precision.grad_norm import measure
from mp_optim.mixed_precision.slot_table import GRADIENT_DTYPES, SlotTable
from mp_optim.offload.grad_hooks import Claim, GradHooks
from mp_optim.offload.hybrid_executor import stepper_of
from mp_optim.offload.stepper import Stepper
from mp_optim.offload.worker import WorkerError


def _can_be_released(param: Tensor, grad: Tensor) -> bool:
    """Whether a gradient is nothing but the values of ``grad`` that this rank steps with."""
    if is_dtensor(param) and is_dtensor(grad):
        if grad.placements != param.placements:
            return False  # still to be redistributed
    elif is_dtensor(param) or is_dtensor(grad):
        return False
    is_read = grad.dtype in GRADIENT_DTYPES and not grad.is_meta
    return param.grad is grad and is_read and not grad.requires_grad


class BackwardOverlap:
    """The wrapper's gradients, for what may be begun on them during backward: a
    :class:`~mp_optim.offload.grad_hooks.GradientSource`, with hooks on the model's parameters.

    What was begun is only used where it is what the step would do, so nothing here can change a
    result.

    Args:
        wrapper: whose gradients. executor: steps for it. stepper: steps the host part, and may
            begin some of that during backward.

    Attributes:
        released: gradients that left their parameters' ``grad``, by index in the table.
    """

    def __init__(
        self,
        wrapper: SlotKeyedOptimizer,
        executor: Executor,
        stepper: Stepper,
        table: SlotTable,
        config: OptimizerConfig,
    ) -> None:
        self._wrapper: SlotKeyedOptimizer = weakref.proxy(wrapper)  # which owns this object
        self._executor = executor
        self._table, self.stepper = table, stepper
        self.fused_backend = config.fused_backend
        self._is_offloaded: list[bool] = []
        self._index: dict[int, int] = {}  # of each parameter, by id
        self._hooks = GradHooks(self._on_grad)
        self._inverse_scale: Callable[[], Tensor] | None = None
        # No longer those of the executor's own parameters. Weak, because this object keeps the
        # stepper.
        stepper.schedule.gradients = weakref.proxy(self)
        self.released: dict[int, Tensor] = {}
        if config.release_gradients:
            self._release()

    def _release(self) -> None:
        """Release gradients from now on.

        Raises:
            ValueError: something gathers gradients in ``main_grad``.
        """
        for slot, param in zip(self._table.slots, self._table.params, strict=True):
            if has_main_grad(param):
                raise ValueError(
                    f"release_gradients=True: the parameter at {slot} has a main_grad, which "
                    "belongs to what made it (Megatron's DistributedDataParallel) and cannot be "
                    "let go; set it to False"
                )
        self.stepper.release_gradients()

    def follow(self, params: Sequence[Tensor]) -> None:
        """Have hooks on what is in the param groups now."""
        if len(self._is_offloaded) != len(params):
            place_of = self._executor.place
            self._is_offloaded = [place_of(slot) != "device" for slot in self._wrapper.slots()]
        self._index = {id(param): index for index, param in enumerate(params)}
        self._hooks.follow(params, self._is_offloaded)

    def stop(self) -> None:
        """Have no hooks."""
        self._hooks.follow([], [])

    def _on_grad(self, index: int) -> None:
        """Tell the stepper that a slot's gradient is what will be stepped, if there is one."""
        table = self._table
        slot, param = table.slots[index], table.params[index]
        grad, wrapper = current_grad(param), self._wrapper
        if (
            grad is None
            or wrapper.has_edited_lists()
            or param_at(wrapper.param_groups, slot) is not param
            or not table.bound[index]
            or not table.seen.has_shape(index, param)
        ):
            return  # what cannot be stepped is named in the step
        if grad.layout == torch.strided:
            claim = None
            if self.stepper.host_part.releases and _can_be_released(param, grad):
                claim = Claim(param, grad, index, self.released)
            report = self.stepper.schedule.on_grad_ready
            report(slot, local_tensor(grad), claim, are_plain([grad]))

    def share_settings(self) -> None:
        """See :class:`~mp_optim.offload.grad_hooks.GradientSource`."""
        self._wrapper.share_settings()

    def updates(self, grads: Mapping[Slot, Tensor], multiplier: float) -> SlotUpdates:
        """See :class:`~mp_optim.offload.grad_hooks.GradientSource`."""
        return self._table.updates(grads, multiplier)

    def ready(self, params: Sequence[Tensor] | None) -> None:
        """These parameters' gradients, or all, are what will be stepped."""
        now = self._table.params
        chosen = now if params is None else params
        known = [(self._index.get(id(param), -1), param) for param in chosen]
        for index, param in sorted(known, key=operator.itemgetter(0)):
            if index >= 0 and now[index] is param and self._is_offloaded[index]:
                self._on_grad(index)

    def collect(self) -> None:
        """Wait for what was begun during backward. Raises what went wrong there, before anything
        was stepped. Costs nothing if it was done since the last gradient."""
        self.stepper.schedule.collect()

    def forget_released(self) -> None:
        """Released gradients are of no use any more."""
        self.released.clear()
        self.stepper.schedule.forget_released()

    def skip(self) -> None:
        """The verdict is to change nothing."""
        self.stepper.schedule.skip()

    def measure(self, grads: Sequence[Tensor], device: torch.device) -> Tensor:
        """As :func:`~mp_optim.mixed_precision.grad_norm.measure`; of gradients on the host that
        backward
        measured, what it found.

        Gradients on an accelerator are measured there: faster, and with the bits of that device's
        backend.
        """
        arrivals = self.stepper.schedule.arrivals
        arrivals.forget_comparisons()
        known = [arrivals.sum_of_squares(grad) if grad.is_cpu else None for grad in grads]
        found = {index: value for index, value in enumerate(known) if value is not None}
        values = torch.tensor([*found.values()], dtype=torch.float64, device="cpu")
        if len(found) == len(grads):
            return values.to(device)
        sums = torch.zeros(len(grads), dtype=torch.float64, device=device)
        if found:
            sums[index_on(device, tuple(found))] = values.to(device)
        # One launch reads memory of one place: released gradients apart from the others, which lie
        # on the device where the tests simulate one.
        released = {id(grad) for grad in self.released.values()}
        unknown = [index for index in range(len(grads)) if index not in found]
        for are_released in (True, False):
            some = [i for i in unknown if (id(grads[i]) in released) is are_released]
            if some:
                left = [grads[index] for index in some]
                sums[index_on(device, tuple(some))] = measure(left, self.fused_backend, device)
        return sums

    # -- the multiplier that nothing would change -------------------------------------------------

    def remember_scale(self) -> None:
        """The loss scale may have changed: start to bring it to the host, for the prediction in the
        next backward."""
        scaler = self._wrapper.grad_scaler
        if scaler is None or scaler.scale.device.type == "cpu":
            return
        self._inverse_scale = fetch(self.stepper.transfer, scaler.inv_scale)

    def predicted_multiplier(self) -> float:
        """See :class:`~mp_optim.offload.grad_hooks.GradientSource`."""
        scaler = self._wrapper.grad_scaler
        if scaler is None:
            return 1.0
        inverse = scaler.inv_scale if self._inverse_scale is None else self._inverse_scale()
        return fp32(float(inverse))


def overlap_of(
    wrapper: SlotKeyedOptimizer, executor: Executor, table: SlotTable, config: OptimizerConfig
) -> BackwardOverlap | None:
    """For what may be begun during backward; None if nothing may.

    Raises:
        ValueError: gradients are to be released then.
    """
    stepper = stepper_of(executor)
    if stepper is not None and stepper.schedule.is_early:
        return BackwardOverlap(wrapper, executor, stepper, table, config)
    if config.release_gradients:
        raise ValueError(
            "release_gradients=True: the optimizer that steps does not work during backward; give "
            "HybridDeviceOptimizer offload_mode='overlap' or 'speculative', or set it to False"
        )
    return None


class EarlyWork:
    """What the parts of a stack may begin during backward. Without ``offload_mode``, or with
    ``sync``, it does nothing.

    Attributes:
        overlaps: of the wrappers.
    """

    def __init__(self) -> None:
        self.overlaps: list[BackwardOverlap] = []

    @property
    def steppers(self) -> list[Stepper]:
        """What works during backward."""
        return [overlap.stepper for overlap in self.overlaps]

    def collect(self) -> None:
        """Wait for what was begun, of all of them before any is stepped.

        Raises:
            WorkerError: it failed, in any part. All of it is dropped; nothing was stepped.
        """
        try:
            for overlap in self.overlaps:
                overlap.collect()
        except WorkerError:
            self.discard()
            raise

    def forget_comparisons(self) -> None:
        """The caller had control since gradients were measured, and may have written to them."""
        for stepper in self.steppers:
            stepper.schedule.arrivals.forget_comparisons()

    def forget_released(self) -> None:
        """Forget gradients that were released."""
        for overlap in self.overlaps:
            overlap.forget_released()

    def discard(self) -> None:
        """Forget what was done."""
        for stepper in self.steppers:
            stepper.schedule.discard()

    def stop(self) -> None:
        """Forget what was done, and begin nothing more: the stack is let go."""
        self.discard()
        for overlap in self.overlaps:
            overlap.stop()

    def remember_scale(self) -> None:
        """The loss scale may have changed."""
        for overlap in self.overlaps:
            overlap.remember_scale()
