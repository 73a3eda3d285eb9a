"""What the precision wrappers let the layer below begin during backward: it is told of gradients as
they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mp_optim.placement.grad_hooks import GradHooks, final_in_backward
from mp_optim.placement.worker import WorkerError
from mp_optim.slots import current_grad, local_tensor
from mp_optim.update.kernel_args import fp32

if TYPE_CHECKING:
    from mp_optim.placement.schedule import HostSchedule
    from mp_optim.precision.megatron_optimizer import MegatronOptimizer
    from mp_optim.precision.slot_table import SlotTable

__all__ = ["BackwardOverlap", "OverlapControls"]


class BackwardOverlap:
    """Hooks on the model's parameters that are stepped on the host, if ``offload_mode`` is not
    ``sync``.

    What was begun is only used where it is what the step would do, so nothing here can change a
    result.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        seen: SlotTable,
        sum_of_squares: Callable[[Sequence[Tensor]], Tensor],
        push_settings: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._seen = seen
        self._sum_of_squares = sum_of_squares
        self._on_host: list[bool] = []
        self._arrivals = GradHooks(self._arrived)
        self._scale: tuple[Tensor, Any] | None = None
        self.schedule: HostSchedule | None = getattr(optimizer.inner, "schedule", None)
        if self.schedule is not None:
            self.schedule.predicted = self._predicted
            self.schedule.arithmetic.sum_of_squares = sum_of_squares
            self.schedule.settle_settings = push_settings

    def follow(self, params: Sequence[Tensor]) -> None:
        """Have hooks on what is in the param groups now."""
        if self.schedule is None:
            return
        if len(self._on_host) != len(params):
            place_of = self._optimizer.inner.place  # type: ignore[attr-defined]
            self._on_host = [place_of(slot) == "host" for slot in self._optimizer.slots()]
        self._arrivals.follow(params, self._on_host)

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

    def ready(self, params: Sequence[Tensor] | None) -> None:
        """These parameters' gradients, or all, are what will be stepped."""
        if self.schedule is None:
            return
        chosen = None if params is None else {id(param) for param in params}
        for index, param in enumerate(self._seen.params):
            if self._on_host[index] and (chosen is None or id(param) in chosen):
                self._hand_on(index)

    def finish(self) -> None:
        """Wait for what was begun during backward. Raises what went wrong there, before anything
        was stepped."""
        if self.schedule is not None:
            self.schedule.finish()

    def skip(self) -> None:
        """The verdict is to change nothing."""
        if self.schedule is not None:
            self.schedule.skip()

    def sums_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        """FP64 sum of squares of each gradient of one device, shape (n,): taken now where backward
        did not bring it.

        Gradients on an accelerator are measured there: faster, and with the bits of that device's
          backend.
        """
        schedule = self.schedule
        if schedule is None or grads[0].device.type != "cpu":
            return self._sum_of_squares(grads)
        known = [schedule.sum_of_squares(grad) for grad in grads]
        unknown = [index for index, value in enumerate(known) if value is None]
        if len(unknown) == len(known):
            return self._sum_of_squares(grads)
        sums = torch.tensor(
            [0.0 if value is None else value for value in known], dtype=torch.float64, device="cpu"
        )
        if unknown:
            sums[torch.tensor(unknown, device="cpu")] = self._sum_of_squares(
                [grads[index] for index in unknown]
            )
        return sums

    # -- the multiplier that nothing would change -------------------------------------------------

    def remember_scale(self) -> None:
        """The loss scale may have changed: start to bring it to the host, for the prediction in the
        next backward."""
        scaler = self._optimizer.grad_scaler
        if self.schedule is None or scaler is None or scaler.present_scale.device.type == "cpu":
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


class OverlapControls:
    """What a precision wrapper offers to loops that accumulate or reduce gradients. Without
    ``offload_mode``, or with ``sync``, it does nothing."""

    backward_link: BackwardOverlap

    @property
    def chained_optimizers(self) -> Sequence[OverlapControls]:
        """The parts."""
        raise NotImplementedError

    def _links(self) -> list[BackwardOverlap]:
        return [part.backward_link for part in self.chained_optimizers]

    def _schedules(self) -> list[HostSchedule]:
        return [link.schedule for link in self._links() if link.schedule is not None]

    @property
    def is_last_microbatch(self) -> bool:
        """Whether gradients that arrive are complete, so that ``offload_mode`` may begin to work on
        them. Otherwise that work is done again after the micro-batches that follow: right, but not
        hidden."""
        return all(schedule.enabled for schedule in self._schedules())

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        for schedule in self._schedules():
            schedule.enabled = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all micro-batches but the last: nothing is begun during backward."""
        before, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    def gradients_ready(self, params: Iterable[Tensor] | None = None) -> None:
        """The gradients of these parameters (by default all) are what will be stepped:
        ``offload_mode`` may begin.

        To be called by whoever reduces gradients over ranks; in a job of one rank, and with FSDP2,
        backward itself says it.
        """
        mine = None if params is None else list(params)
        for link in self._links():
            link.ready(mine)

    def finish_early_work(self) -> None:
        """Wait for what was begun during backward.

        Raises:
            WorkerError: it failed, in any part. All of it is dropped; nothing was stepped.
        """
        try:
            for link in self._links():
                link.finish()
        except WorkerError:
            self.discard_early_work()
            raise

    def discard_early_work(self) -> None:
        """Forget what was done during backward; ``step()`` does it again.

        Needed only after gradients were written without a trace (``param.grad.data.mul_(...)``):
        other writes are noticed by themselves.
        """
        for schedule in self._schedules():
            schedule.discard()

    def remember_scale(self) -> None:
        """The loss scale may have changed."""
        for link in self._links():
            link.remember_scale()
