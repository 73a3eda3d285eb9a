"""Steps one share of the offloaded slots on the host and streams the rest, at the same time:
``offload_place="auto"``.

One optimizer holds all of them, in memory that both read. So a slot can be stepped by the host in
one step and streamed in the next: nothing moves, and the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

from torch import Tensor

from mp_optim.placement.host_bytes import HostBytes, HostSlot
from mp_optim.placement.host_step import (
    HostOwner,
    HostStepper,
    HostStepSettings,
    Stepper,
    nothing_beside,
)
from mp_optim.placement.measured_split import FixedSplit, MeasuredSplit, StepTime
from mp_optim.placement.plan import plan_offload
from mp_optim.placement.streamed_step import StreamedStepper, state_bytes
from mp_optim.placement.windows import IN_FLIGHT
from mp_optim.process.transfer import Transfer
from mp_optim.slots import Slot, SlotUpdate, SlotUpdates, UpdateSelection
from mp_optim.slots.host_part import Claim, GradientSource, Place, TransferBytes
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.update.rule import RuleOptimizer


class _HostShare:
    """What owns the host's share: the optimizer around both, which knows the slots of both."""

    def __init__(self, owner: HostOwner) -> None:
        self._owner = owner
        self.slots: frozenset[Slot] = frozenset()

    def bind_tensors(self) -> None:
        self._owner.bind_tensors()

    def check_groups(self) -> None:
        self._owner.check_groups()

    def stop_watching(self) -> None:
        self._owner.stop_watching()

    def on_host(self, update: SlotUpdate) -> SlotUpdate | None:
        on_host = self._owner.on_host(update)
        return on_host if on_host is not None and on_host.slot in self.slots else None


class _Beside:
    """Windows that are queued while the host steps its buckets."""

    def __init__(self, windows: Iterator[float]) -> None:
        self._windows = windows
        self._queued = self._lead = 0.0

    def start(self) -> None:
        """Queue the device's own slots, and as many windows as may be in flight."""
        for _ in range(1 + IN_FLIGHT):
            self._queued = self._lead = next(self._windows, 1.0)

    def keep_up(self, done: float) -> None:
        """Stay ahead of the host, of whose buckets this share is done."""
        while self._queued < min(done + self._lead, 1.0):
            self._queued = next(self._windows, 1.0)
        if done == 1.0:
            for _ in self._windows:
                pass


class AutoStepper(Stepper):
    """Streams a share of the slots beside a stepper of the host, which may work during backward.

    Args:
        host: the kind of stepper of the host's share.
        sub: the optimizer of all slots, on the host and where they are streamed to.
        split: which share is streamed.
    """

    def __init__(
        self,
        host: type[HostStepper],
        sub: SlotOptimizer,
        slots: Sequence[HostSlot],
        owner: HostOwner,
        settings: HostStepSettings,
        split: FixedSplit | MeasuredSplit,
    ) -> None:
        super().__init__()
        self._rule, self._split = cast(RuleOptimizer, sub), split
        self._slots, self._is_allocated = list(slots), False
        self._share = _HostShare(owner)
        self.host = host(sub, (), self._share, settings)
        self.streamed = StreamedStepper(sub, (), self._share, settings)
        self.works_in_backward = self.host.works_in_backward
        self._selections: tuple[Sequence[Slot], list[UpdateSelection]] | None = None
        self._cut()

    @property
    def has_slots(self) -> bool:
        return bool(self._slots)

    def place_of(self, slot: Slot) -> Place:
        return "host" if slot in self._share.slots else "streamed"

    # -- which slot goes which way ----------------------------------------------------------------

    def cut_buckets(self, slots: Sequence[HostSlot]) -> None:
        self._slots, self._is_allocated = list(slots), False
        self._cut()

    def use_transfer(self, transfer: Transfer, bucket_bytes: int | None = None) -> None:
        self.host.use_transfer(transfer, bucket_bytes)
        self.streamed.use_transfer(transfer, bucket_bytes)

    def stream(self, share: float) -> None:
        """From the next step on, stream this share of the elements."""
        self._split = FixedSplit(share)
        self._recut()

    def _recut(self) -> None:
        self.host.discard()
        self.host.come_home()
        self._cut()

    def _cut(self) -> None:
        """The host takes what backward reaches first: it can begin earliest on that."""
        sizes = [slot.share for slot in reversed(self._slots)]
        chosen = plan_offload(sizes, 1.0 - self._split.share)
        last = len(self._slots) - 1
        here = [slot for i, slot in enumerate(self._slots) if last - i in chosen]
        self._share.slots = frozenset(slot.slot for slot in here)
        rest = [slot for slot in self._slots if slot.slot not in self._share.slots]
        self._selections = None
        self.host.cut_buckets(here)
        self.streamed.cut_buckets(rest)

    def host_bytes(self) -> HostBytes:
        state = state_bytes(self._rule, [slot.slot for slot in self._slots])
        host = self.host.host_bytes()
        return state._replace(
            staging=host.staging, back_mains=host.back_mains, back_state=host.back_state
        )

    @property
    def device_bytes(self) -> int:
        if not self._split.is_measuring:
            return self.streamed.device_bytes
        return self.streamed.device_bytes_for([slot.slot for slot in self._slots])

    # -- stepping ---------------------------------------------------------------------------------

    def step_buckets(
        self,
        updates: SlotUpdates,
        grad_norm: float | None,
        step_device: Callable[[], None],
    ) -> None:
        if not self._is_allocated:
            self._rule.allocate_state([slot.slot for slot in self._slots])
            self._is_allocated = True
        here, rest = (part.take(updates) for part in self._parts(updates.slots))
        windows = self.streamed.windows_of_step(rest, grad_norm, step_device)
        beside = _Beside(windows)
        self.host.beside = beside.keep_up
        try:
            self.host.step_buckets(here, grad_norm, beside.start)
        finally:
            windows.close()
            self.host.beside = nothing_beside
        moved = self.host.transfer_bytes, self.streamed.transfer_bytes
        self.transfer_bytes = TransferBytes(
            sum(each.down for each in moved), sum(each.up for each in moved)
        )
        if self._split.is_measuring and len(updates):
            self._measure(updates.grads[0])

    def _parts(self, slots: Sequence[Slot]) -> list[UpdateSelection]:
        if self._selections is None or self._selections[0] is not slots:
            indices: tuple[list[int], list[int]] = [], []
            for index, slot in enumerate(slots):
                indices[slot not in self._share.slots].append(index)
            parts = [
                UpdateSelection(part, [slots[i] for i in part], len(slots))
                for part in indices
            ]
            self._selections = slots, parts
        return self._selections[1]

    def _measure(self, on_device: Tensor) -> None:
        """Take note of how long the step took, the device's part included."""
        self.host.transfer.join()
        self.fetch(on_device.new_zeros(1))()  # after all that is queued
        if self._split.record(StepTime(*self.host.timeline.last_step())):
            self._recut()

    # -- what the host's share does in backward ---------------------------------------------------

    def connect(self, source: GradientSource) -> None:
        self.host.connect(source)

    def on_grad_ready(
        self,
        update: SlotUpdate,
        claim: Claim | None = None,
        writes_are_counted: bool = True,
    ) -> None:
        self.host.is_last_microbatch = self.is_last_microbatch
        self.host.releases = self.releases
        self.host.on_grad_ready(update, claim, writes_are_counted)

    def collect(self) -> None:
        self.host.collect()

    def known_sum_of_squares(self, grad: Tensor) -> float | None:
        return self.host.known_sum_of_squares(grad)

    def state_exposed(self, slot: Slot) -> None:
        if slot in self._share.slots:
            self.host.state_exposed(slot)

    def forget_released(self) -> None:
        self.host.forget_released()

    @property
    def released_bytes(self) -> int:
        return self.host.released_bytes

    def skip(self) -> None:
        self.host.skip()

    def discard(self) -> None:
        self.host.discard()

    # -- what it says of itself -------------------------------------------------------------------

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self.host.fetch(tensor)

    def notes(self) -> tuple[str, ...]:
        if not self._slots:
            return self.host.notes()
        said = f"auto: {self._streamed_share:.0%} is streamed ({self._split})"
        return tuple(dict.fromkeys((said, *self.streamed.notes(), *self.host.notes())))

    @property
    def _streamed_share(self) -> float:
        streamed = sum(
            slot.share for slot in self._slots if slot.slot not in self._share.slots
        )
        return streamed / max(sum(slot.share for slot in self._slots), 1)

    def metrics(self) -> dict[str, float]:
        return {**self.host.metrics(), "streamed_fraction": self._streamed_share}
