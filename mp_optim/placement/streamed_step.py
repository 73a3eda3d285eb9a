"""Steps slots on the device whose main params and state are kept in host memory: the place
``streamed``.

Gradients and the model's parameters stay on the device. Main params and state come up window by
window, are stepped by the device's backend and go down again; between steps nothing of them is on
the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial

from mp_optim.config.rules import RULES
from mp_optim.placement.host_bytes import BucketPlan, HostBytes, HostSlot
from mp_optim.placement.host_step import HostStepper
from mp_optim.placement.timeline import WAIT_COPIES
from mp_optim.placement.window_ring import WindowRing
from mp_optim.placement.windows import (
    SMALLEST_WINDOW,
    Tensors,
    Window,
    cut_windows,
    forms_bytes,
    launches_of,
    ring_sizes,
)
from mp_optim.process.host_memory import aligned_bytes
from mp_optim.slots import Slot, SlotUpdates
from mp_optim.slots.host_part import Place, TransferBytes
from mp_optim.slots.state_keys import AVERAGE, REMAINDER
from mp_optim.update.kernel_args import MAIN
from mp_optim.update.launches import PlannedLaunch
from mp_optim.update.rule import RuleOptimizer


def check_can_stream(rule: RuleOptimizer, most: int, place: str = "streamed") -> None:
    """Raise unless a rule can step its slots in windows of at most ``most`` bytes.

    Raises:
        ValueError: naming the rule, or the parameter and its bytes.
    """
    if most < SMALLEST_WINDOW:
        raise ValueError(
            f"stream_window_bytes={most}: must be at least {SMALLEST_WINDOW}"
        )
    name = rule.rule
    reads = RULES[name].reads if name in RULES else "matrices"
    if reads == "matrices":
        raise ValueError(
            f"offload_place={place!r}: {name} cannot be stepped in windows (adam, lamb, sgd, lion "
            "and adafactor can); use 'host'"
        )
    for slot in rule.slots() if reads == "sums" else ():
        size = forms_bytes(rule.forms(slot).values())
        if size > most:
            raise ValueError(
                f"stream_window_bytes={most}: {name} needs whole parameters, and "
                f"{rule.slot_name(slot)} takes {size} bytes; set stream_window_bytes to at least "
                "that, or offload_place='host'"
            )


def state_bytes(rule: RuleOptimizer, slots: Iterable[Slot]) -> HostBytes:
    """Host memory of the state of some slots, each kind of it in one piece."""
    sizes: Counter[str] = Counter()
    for slot in slots:
        for key, (shape, dtype) in rule.forms(slot).items():
            sizes[key] += aligned_bytes(shape.numel(), dtype)
    others = (MAIN, REMAINDER, AVERAGE)
    return HostBytes(
        (),
        moments=tuple(size for key, size in sizes.items() if key not in others),
        remainders=tuple(sizes[key] for key in (REMAINDER,) if key in sizes),
        averages=tuple(sizes[key] for key in (AVERAGE,) if key in sizes),
    )


class StreamedStepper(HostStepper):
    """Streams the slots of an optimizer through a ring of windows, in ``step()``."""

    @property
    def _rule(self) -> RuleOptimizer:
        assert isinstance(self._host, RuleOptimizer)
        return self._host

    def place_of(self, slot: Slot) -> Place:
        return "streamed"

    @property
    def _may_cut(self) -> bool:
        return RULES[self._rule.rule].reads == "elements"

    def _cut(self, slots: Sequence[HostSlot]) -> None:
        check_can_stream(self._rule, self.settings.window_bytes)
        self._slots = {slot.slot: slot for slot in slots}
        self._plan = BucketPlan((), {})
        pin = self.settings.pin_mains
        self._rule.allocate_by(partial(self.transfer.empty_host, pin=pin))
        self._sizes: list[int] = []
        self._is_allocated = False

    # -- memory -----------------------------------------------------------------------------------

    def _ring_sizes(self) -> list[int]:
        if not self._sizes:
            self._sizes = self._ring_sizes_for(self._slots)
        return self._sizes

    def _ring_sizes_for(self, slots: Iterable[Slot]) -> list[int]:
        forms = map(self._rule.forms, slots)
        sizes = [forms_bytes(of_slot.values()) for of_slot in forms]
        whole = 0 if self._may_cut else max(sizes, default=0)
        return ring_sizes(sum(sizes), whole, self.settings.window_bytes)

    @property
    def device_bytes(self) -> int:
        return sum(self._ring_sizes())

    def device_bytes_for(self, slots: Iterable[Slot]) -> int:
        """Device memory that is held within ``step()`` if these slots are streamed."""
        return sum(self._ring_sizes_for(slots))

    def host_bytes(self) -> HostBytes:
        return state_bytes(self._rule, self._slots)

    # -- in step ----------------------------------------------------------------------------------

    def step_buckets(
        self,
        updates: SlotUpdates,
        grad_norm: float | None,
        step_device: Callable[[], None],
    ) -> None:
        self.timeline.begin_step()
        for _ in self.windows_of_step(updates, grad_norm, step_device):
            pass
        self.timeline.end_step()

    def windows_of_step(
        self,
        updates: SlotUpdates,
        grad_norm: float | None,
        step_device: Callable[[], None],
    ) -> Generator[float, None, None]:
        """Step, window by window, at the caller's pace; all is stepped at the end.

        Yields:
            Which share of the windows is queued on the device; first 0.0, as soon as the first is
            on its way and the device's own slots are queued.
        """
        self.transfer_bytes = TransferBytes()
        if not self._is_allocated:
            self._rule.allocate_state(list(self._slots))  # side by side
            self._is_allocated = True
        launches = self._rule.plan(updates, grad_norm)
        windows = cut_windows(launches, self._ring_sizes()[0], self._may_cut)
        if not windows:
            step_device()
            return
        ring = WindowRing(self.transfer, self._ring_sizes(), updates.grads[0])
        try:
            first = ring.upload(windows[0])
            step_device()
            yield 0.0
            self._host.step_mark.touch()
            yield from self._stream(ring, launches, windows, first)
        finally:
            # NOTE: the ring's memory and the host's are read and written by copies until here.
            with self.timeline.stage(WAIT_COPIES):
                ring.wait()
        for launch in launches:
            launch.copy_back()
            self._rule.count(launch)
        self.transfer_bytes = TransferBytes(ring.down, ring.up)

    def _stream(
        self,
        ring: WindowRing,
        launches: Sequence[PlannedLaunch],
        windows: Sequence[Window],
        lying: Sequence[Tensors],
    ) -> Iterator[float]:
        """Step all windows; the first is on its way up."""
        for number, window in enumerate(windows):
            ring.arrive()
            coming: Sequence[Tensors] = ()
            if number + 1 < len(windows):
                coming = ring.upload(windows[number + 1])
            with self.timeline.stage("stream_step", self._label_of(launches, window)):
                for launch in launches_of(launches, window, lying):
                    self._rule.carry_out(launch)
            ring.download(number, window, lying)
            lying = coming
            yield (number + 1) / len(windows)

    def _label_of(self, launches: Sequence[PlannedLaunch], window: Window) -> str:
        slots = [launches[p.launch].updates.slots[p.index] for p in window]
        return self._label(slots)

    # -- what it says of itself -------------------------------------------------------------------

    def notes(self) -> tuple[str, ...]:
        sizes = self._ring_sizes()
        said = (
            f"streamed: {len(self._slots)} parameters are stepped on the device from host memory, "
            f"in windows of {sizes[0]:,} bytes, {len(sizes)} at a time in step()"
        )
        return (said, *self.transfer.notes()) if self._slots else self.transfer.notes()
