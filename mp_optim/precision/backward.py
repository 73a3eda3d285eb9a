"""What the precision wrappers let the layer below begin during backward: it is told of gradients as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mp_optim.placement.arrivals import Arrivals, final_in_backward
from mp_optim.slots import current_grad, local_tensor
from mp_optim.update.lists import fp32

if TYPE_CHECKING:
    from mp_optim.placement.schedule import HostSchedule
    from mp_optim.precision.columns import SlotColumns
    from mp_optim.precision.megatron_optimizer import MegatronOptimizer

__all__ = ["BackwardLink"]


class BackwardLink:
    """Hooks on the model's parameters that are stepped on the host, if ``offload_mode`` is not ``sync``.

    What was begun is only used where it is what the step would do, so nothing here can change a result.
    """

    def __init__(self, optimizer: MegatronOptimizer, seen: SlotColumns,
                 sum_of_squares: Callable[[Sequence[Tensor]], Tensor], push_settings: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._seen = seen
        self._arrivals = Arrivals(self._arrived)
        self._scale: tuple[Tensor, Any] | None = None
        self.schedule: HostSchedule | None = getattr(optimizer.inner, "schedule", None)
        if self.schedule is not None:
            self.schedule.predicted = self._predicted
            self.schedule.arithmetic.sum_of_squares = sum_of_squares
            self.schedule.settle_settings = push_settings

    def follow(self, params: Sequence[Tensor]) -> None:
        """Have hooks on what is in the param groups now."""
        if self.schedule is not None:
            place_of = self._optimizer.inner.place  # type: ignore[attr-defined]
            self._arrivals.follow(params, [place_of(slot) == "host" for slot in self._optimizer.slots()])

    def _arrived(self, index: int) -> None:
        if final_in_backward(self._seen.params[index]):
            self._hand_on(index)

    def _hand_on(self, index: int) -> None:
        seen = self._seen
        slot, param = seen.slots[index], seen.params[index]
        grad = current_grad(param)
        now = self._optimizer.param_groups[slot.group]["params"][slot.position]
        if now is param and grad is not None and grad.layout == torch.strided and seen.bound[index]:
            self._optimizer.inner.arrived(seen.update(index, local_tensor(grad)))  # type: ignore[attr-defined]

    def ready(self, params: Iterable[Tensor]) -> None:
        """These parameters' gradients are what will be stepped."""
        if self.schedule is None:
            return
        index_of = {id(param): index for index, param in enumerate(self._seen.params)}
        for param in params:
            if (index := index_of.get(id(param))) is not None:
                self._hand_on(index)

    def known_sums(self, grads: Sequence[Tensor]) -> list[float | None]:
        """Sums of squares taken during backward, of gradients that lie on the host."""
        schedule = self.schedule
        if schedule is None or grads[0].device.type != "cpu":
            return [None] * len(grads)
        return [schedule.sum_of_squares(grad) for grad in grads]

    # -- the multiplier that nothing would change ---------------------------------------------------

    def remember_scale(self) -> None:
        """The loss scale may have changed: start to bring it to the host, for the prediction in the next backward."""
        scaler = self._optimizer.grad_scaler
        if self.schedule is None or scaler is None or scaler.scale.device.type == "cpu":
            return
        inverse, transfer = scaler.inv_scale, self.schedule.transfer
        host = transfer.empty_host(inverse.nbytes, True).view(inverse.dtype)
        self._scale = host, transfer.download([(host, inverse)])

    def _predicted(self) -> float:
        scaler = self._optimizer.grad_scaler
        if scaler is None:
            return 1.0
        if self._scale is None or self.schedule is None:
            return fp32(float(scaler.inv_scale))
        host, ticket = self._scale
        self.schedule.transfer.wait(ticket)
        return fp32(float(host))
