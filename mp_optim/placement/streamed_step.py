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
from typing import NamedTuple

from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.placement.host_bytes import BucketPlan, HostBytes, HostSlot
from mp_optim.placement.host_step import HostStepper
from mp_optim.placement.timeline import WAIT_COPIES
from mp_optim.placement.window_ring import SteppingPlace, WindowRing
from mp_optim.placement.window_source import HeldWindows, WindowSource
from mp_optim.placement.windows import (
    SMALLEST_WINDOW,
    Window,
    WindowForm,
    cut_windows,
    launches_of,
    ring_sizes,
)
from mp_optim.process.host_memory import aligned_bytes, zeros_beside
from mp_optim.slots import Slot, SlotUpdates
from mp_optim.slots.host_part import Place, TransferBytes
from mp_optim.slots.state_keys import AVERAGE, REMAINDER
from mp_optim.update.kernel_args import MAIN
from mp_optim.update.launches import PlannedLaunch
from mp_optim.update.rule import RuleOptimizer

STREAMED = "offload_place='streamed'"


def check_can_stream(
    rule: RuleOptimizer, most: int, asked: str = STREAMED, way_out: str = "use 'host'"
) -> None:
    """Raise unless a rule can step its slots in windows of at most ``most`` bytes.

    Args:
        asked: the setting that asks for it. way_out: what to set instead.

    Raises:
        ValueError: naming the rule, or the parameter and its bytes.
    """
    if most < SMALLEST_WINDOW:
        raise ValueError(
            f"stream_window_bytes={most}: must be at least {SMALLEST_WINDOW}"
        )
    if rule.rule not in RULES:
        raise ValueError(
            f"{asked}: {type(rule).__name__} cannot be stepped in windows (this package's rules "
            f"can); {way_out}"
        )
    for slot in rule.slots():
        group = rule.param_groups[slot.group]
        size = WindowForm().forms_bytes(rule.forms(slot).values())
        if size > most and not rule.is_elementwise(group):
            name = group.get("optimizer", rule.rule)
            raise ValueError(
                f"stream_window_bytes={most}: {name} needs whole parameters, and "
                f"{rule.slot_name(slot)} takes {size} bytes; set stream_window_bytes to at least "
                f"that, or {way_out}"
            )


class _Flow(NamedTuple):
    """A step's windows, from where they are kept to where they are stepped and back."""

    launches: Sequence[PlannedLaunch]
    windows: Sequence[Window]
    source: WindowSource
    place: SteppingPlace


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

    stage = "stream_step"
    """What the arithmetic is called on the timeline."""

    @property
    def _rule(self) -> RuleOptimizer:
        assert isinstance(self._host, RuleOptimizer)
        return self._host

    def place_of(self, slot: Slot) -> Place:
        return "streamed"

    def _may_cut(self, slot: Slot) -> bool:
        return self._rule.is_elementwise(self._rule.param_groups[slot.group])

    def _cut(self, slots: Sequence[HostSlot]) -> None:
        check_can_stream(self._rule, self.settings.window_bytes)
        self._most = self.settings.window_bytes
        self._plan = BucketPlan((), {})
        self._slots = {slot.slot: slot for slot in slots}
        self._sizes: list[int] = []
        self._is_allocated = False
        pin = self.settings.pin_mains
        allocate = partial(self.transfer.empty_host, pin=pin)
        self._rule.allocate_by(partial(zeros_beside, allocate=allocate))

    # -- memory -----------------------------------------------------------------------------------

    def _form(self) -> WindowForm:
        """What a window is made of."""
        return WindowForm()

    def _slot_bytes(self, slot: Slot) -> int:
        """What a slot takes in a window."""
        return self._form().forms_bytes(self._rule.forms(slot).values())

    def _ring_sizes(self) -> list[int]:
        """Bytes of each window where it is stepped."""
        if not self._sizes:
            self._sizes = self._ring_sizes_for(self._slots)
        return self._sizes

    def _ring_sizes_for(self, slots: Iterable[Slot]) -> list[int]:
        sizes = {slot: self._slot_bytes(slot) for slot in slots}
        uncut = (size for slot, size in sizes.items() if not self._may_cut(slot))
        return ring_sizes(sum(sizes.values()), max(uncut, default=0), self._most)

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
        windows = self._cut_windows(launches)
        if not windows:
            step_device()
            return
        source = self._window_source(windows)
        place = self._stepping_place(windows, updates.grads[0])
        flow = _Flow(launches, windows, source, place)
        try:
            yield from self._stream(flow, step_device)
            for number in range(max(0, len(windows) - place.lag), len(windows)):
                source.store(number)
        finally:
            # NOTE: the host memory of the windows is read and written by the disk until here.
            source.finish()
        for launch in launches:
            launch.copy_back()
            self._rule.count(launch)
        moved = place.down, place.up, source.read, source.written
        self.transfer_bytes = TransferBytes(*moved)

    def _cut_windows(self, launches: Sequence[PlannedLaunch]) -> list[Window]:
        most = self._ring_sizes()[0]
        elementwise = [self._rule.is_elementwise(each.settings) for each in launches]
        return cut_windows(launches, self._form(), most, elementwise)

    def _window_source(self, windows: Sequence[Window]) -> WindowSource:
        """Where the windows of a step are kept."""
        return HeldWindows(windows)

    def _stepping_place(self, windows: Sequence[Window], like: Tensor) -> SteppingPlace:
        """Where they are stepped; ``like`` is a tensor on the device."""
        return WindowRing(self.transfer, self._ring_sizes(), like)

    def _stream(self, flow: _Flow, step_device: Callable[[], None]) -> Iterator[float]:
        """Step all windows, and what lies on the device while the first one comes."""
        place, source, count = flow.place, flow.source, len(flow.windows)
        try:
            coming = source.fetch(0)
            lying = place.bring(coming)
            step_device()
            yield 0.0
            self._host.step_mark.touch()
            for number in range(count):
                window, stepped = coming, lying
                self._take_back(flow, number - place.lag)
                place.arrive()
                if number + 1 < count:
                    coming = source.fetch(number + 1)
                    lying = place.bring(coming)
                with self.timeline.stage(self.stage, self._label_of(flow, window)):
                    for launch in launches_of(flow.launches, window, stepped):
                        self._rule.carry_out(launch)
                place.send_back(number, window, stepped)
                yield (number + 1) / count
        finally:
            # NOTE: the ring's memory and the host's are read and written by copies until here.
            with self.timeline.stage(WAIT_COPIES):
                place.wait()

    def _take_back(self, flow: _Flow, number: int) -> None:
        if number >= 0:
            with self.timeline.stage(WAIT_COPIES):
                flow.place.wait_for(number)
            flow.source.store(number)

    def _label_of(self, flow: _Flow, window: Window) -> str:
        slots = [flow.launches[p.launch].updates.slots[p.index] for p in window]
        return self._label(slots)

    # -- what it says of itself -------------------------------------------------------------------

    def notes(self) -> tuple[str, ...]:
        sizes = self._ring_sizes()
        said = (
            f"streamed: {len(self._slots)} parameters are stepped on the device from host memory, "
            f"in windows of {sizes[0]:,} bytes, {len(sizes)} at a time in step()"
        )
        return (said, *self.transfer.notes()) if self._slots else self.transfer.notes()
