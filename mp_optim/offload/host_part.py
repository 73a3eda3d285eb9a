"""The host part: the offloaded slots of an optimizer. Where each is stepped, the buckets and
windows in which that is done, and the memory that they take.

What backward begins, and what a step does, is not here:
:mod:`~mp_optim.offload.backward_scheduler`,
:mod:`~mp_optim.offload.stepper`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import attrgetter

from mp_optim.core import Slot
from mp_optim.core.executor import Executor, Place
from mp_optim.host.host_memory import zeros_beside
from mp_optim.offload.bucket_buffers import Buckets, Staging
from mp_optim.offload.buckets import DiskBytes, HostBytes, HostSlot, Split, by_place
from mp_optim.offload.settings import HostStepSettings, OffloadedStep
from mp_optim.offload.speculation import Ahead
from mp_optim.offload.streaming import WindowLane, disk_bytes, state_bytes
from mp_optim.offload.window_plan import IN_FLIGHT
from mp_optim.rules.rule_executor import RuleExecutor


def label_of(executor: Executor, slots: Sequence[Slot]) -> str:
    """Name some slots of an executor, for errors and the timeline."""
    first = executor.slot_name(slots[0])
    if len(slots) == 1:
        return first
    return f"{first} .. {executor.slot_name(slots[-1])} ({len(slots)} parameters)"


class HostPart:
    """Offloaded slots, by place.

    Args:
        bind_tensors: makes the executor have the tensors of now.

    Attributes:
        how: where and when they are stepped. settings: in what memory, by which copies.
        executor: of the slots.
        label: names some slots, for errors and the timeline.
        slots: in the order in which their gradients are expected.
        by_place: the same, of each place.
        split: which of them are streamed, if some are and others are not.
        window_lanes: by place, of the slots that are stepped in windows.
        buckets: by place, of gradients that come down to it, but for those that come with windows.
        early_places: places whose buckets' gradients backward may bring down, and whether they come
            down though they stay on the device, too.
        ahead: steps into a spare, if that is speculated on.
        releases: gradients leave the device during backward.
    """

    def __init__(
        self,
        how: OffloadedStep,
        executor: Executor,
        bind_tensors: Callable[[], object],
        settings: HostStepSettings,
    ) -> None:
        self.how, self.settings, self.executor = how, settings, executor
        self.label = partial(label_of, executor)
        self._bind_tensors = bind_tensors
        self.slots: list[HostSlot] = []
        self.by_place: dict[Place, list[HostSlot]] = {}
        self.buckets: dict[Place, Buckets] = {}
        self.early_places: dict[Place, bool] = {}
        self.releases = False
        self.split = Split(how.streamed_fraction) if how.place == "auto" else None
        self.window_lanes = dict(self._new_lanes())
        self.ahead = self._new_ahead()
        self._place_of: dict[Slot, Place] = {}
        self._is_allocated = False

    def _new_lanes(self) -> Iterator[tuple[Place, WindowLane]]:
        """A lane of windows for each place that has some."""
        place, on_disk = self.how.place, self.settings.state_file is not None
        if on_disk and place != "streamed":
            yield "host", WindowLane(self._rule_executor, "host", self.settings, self.label)
        if place != "host":
            yield "streamed", WindowLane(self._rule_executor, "streamed", self.settings, self.label)

    def _new_ahead(self) -> Ahead | None:
        if self.how.mode != "speculative" or self.how.place == "streamed":
            return None
        how, run = self.settings, None
        if how.state_file is not None:
            run = self.window_lanes["host"].step_ahead
        return Ahead(self._rule_executor, how.timeline, how.state_file, run)

    @property
    def _rule_executor(self) -> RuleExecutor:
        """The executor, where windows or a spare are asked for: of no other are they granted."""
        assert isinstance(self.executor, RuleExecutor)
        return self.executor

    def place_of(self, slot: Slot) -> Place:
        """Where a slot is stepped."""
        return self._place_of.get(slot, "device")

    # -- cutting: nothing may be begun ------------------------------------------------------------

    def use_slots(self, slots: Sequence[HostSlot]) -> None:
        """Have these slots from now on."""
        self.slots = list(slots)
        self._use_allocators()
        self.place_slots()
        if (file := self.settings.state_file) is not None:
            file.reserve(sum(self.disk_bytes()))

    def use_settings(self, settings: HostStepSettings) -> None:
        """Be stepped by other settings, in other memory."""
        self.settings = settings
        self._use_allocators()
        self._take_other_memory()

    def lost_memory(self) -> None:
        """The worker may write for ever to memory that it was given: have other."""
        if self.ahead is not None:
            self.ahead.lost_memory()
        self._take_other_memory()

    def _use_allocators(self) -> None:
        """Have state of what is stepped in windows be allocated in memory that copies read."""
        self._is_allocated = False
        if not self.window_lanes:
            return
        settings = self.settings
        empty_host = partial(settings.transfer.empty_host, pin=settings.pin_mains)
        file, allocate = settings.state_file, partial(zeros_beside, allocate=empty_host)
        slots = [slot.slot for slot in self.slots]
        self._rule_executor.rows.allocators = dict.fromkeys(slots, file.zeros if file else allocate)

    def _take_other_memory(self) -> None:
        for lane in self.window_lanes.values():
            lane.use(self.settings)
        self.cut()

    def place_slots(self) -> None:
        """Give each slot its place anew, by the split of now."""
        self.by_place = by_place(self.slots, self.how.offloaded_place, self.split)
        self._place_of = {
            slot.slot: place for place, part in self.by_place.items() for slot in part
        }
        self.cut()

    def follow(self, order: Sequence[Slot]) -> None:
        """Have buckets and windows in this order."""
        rank = {slot: index for index, slot in enumerate(order)}
        for part in self.by_place.values():
            part.sort(key=lambda slot: rank[slot.slot])
        self.cut()

    def cut(self) -> None:
        """Cut the slots of each place into buckets or windows, with other memory."""
        self.buckets, self.early_places = {}, {}
        for place, slots in self.by_place.items():
            if place in self.window_lanes:
                self.window_lanes[place].source.drop_early()
                may_come = slots if self.split is None else self.slots
                self.window_lanes[place].cut(slots, may_come, self.releases)
            if (buckets := self._new_buckets(place, slots)) is None:
                continue
            self.buckets[place] = buckets
            # In windows of memory that the host reads, gradients are read where they are.
            in_place = place in self.window_lanes and self.settings.transfer.is_same_place
            if self.how.is_early:
                self.early_places[place] = place == "host" and (buckets.has_outputs or not in_place)
        if self.ahead is not None:
            members, how = self.buckets["host"].members, self.settings
            self.ahead.cut(members, how.transfer, how.pin_mains)
        self._step_together()

    def _new_buckets(self, place: Place, slots: Sequence[HostSlot]) -> Buckets | None:
        """Buckets of a place, if gradients come down to it but with windows."""
        how, is_in_windows = self.settings, place in self.window_lanes
        is_needed = self.how.is_early and (place == "host" or self.releases)
        if is_in_windows and not is_needed:
            return None
        has_outputs = not is_in_windows or (place == "host" and self.ahead is not None)
        return Buckets(
            self.how.mode,
            slots,
            how.bucket_bytes,
            how.pipelined,
            lambda size: Staging(how.transfer, size, how.pin_staging),
            has_outputs,
            self.label,
        )

    def _step_together(self) -> None:
        """Say which slots are stepped at a time: those of a bucket, or all that are in windows."""
        sets: dict[int, list[list[int]]] = {}
        for place, slots in self.by_place.items():
            together: Sequence[Sequence[Slot]] = [[slot.slot for slot in slots]]
            if place not in self.window_lanes:
                together = self.buckets[place].members
            for each in together:
                for group, members in groupby(sorted(each), key=attrgetter("group")):
                    positions = [slot.position for slot in members]
                    sets.setdefault(group, []).append(positions)
        for group, of_group in sets.items():
            self.executor.step_together(group, of_group)

    def allocate(self) -> None:
        """Allocate the state of what is stepped in windows, contiguously."""
        if not self._is_allocated:
            self.executor.allocate_state([slot.slot for slot in self.slots])
            self._is_allocated = True

    def begin_early(self, speculates: bool) -> None:
        """With the first gradient of a backward: read the windows that the step will begin with,
        but where the worker reads them to step them ahead."""
        if self.settings.state_file is None:
            return
        self.settings.state_file.settle()
        for place, lane in self.window_lanes.items():
            if place == "streamed" or not speculates:
                lane.source.begin_early()
            else:
                lane.resize()

    def drop_early(self) -> None:
        """Windows that were read during backward are of no use any more."""
        for lane in self.window_lanes.values():
            lane.source.drop_early()

    # -- what it takes ----------------------------------------------------------------------------

    def _may_have(self, place: Place) -> Sequence[HostSlot]:
        """The slots of a place; while the split is measured, all may be there."""
        is_measuring = self.split is not None and self.split.is_measuring
        return self.slots if is_measuring else self.by_place[place]

    def host_bytes(self) -> HostBytes:
        """What is held as soon as all slots were stepped once, with gradients of their dtypes; what
        is held from then on."""
        held = HostBytes(())
        if self.window_lanes and self.settings.state_file is None:
            held = state_bytes(self._rule_executor, self.slots)
        if self.ahead is not None:
            self._bind_tensors()
            if reserved := self.ahead.reserved():
                mains, state = zip(*reserved, strict=True)
                held = held._replace(back_mains=mains, back_state=state)
        pieces = [piece for buckets in self.buckets.values() for piece in buckets.staging]
        windows = [
            lane.host_bytes(self._may_have(place)) for place, lane in self.window_lanes.items()
        ]
        return held._replace(
            staging=tuple(piece.capacity for piece in pieces), windows=tuple(chain(*windows))
        )

    @property
    def device_bytes(self) -> int:
        """Device memory that is held within ``step()``, beside gradients and parameters."""
        if "streamed" not in self.window_lanes or not (slots := self._may_have("streamed")):
            return 0
        return sum(self.window_lanes["streamed"].sizes_for(slots)[:IN_FLIGHT])

    def disk_bytes(self) -> DiskBytes:
        """What is kept in a file rather than in memory."""
        if self.settings.state_file is None:
            return DiskBytes()
        times = 1 if self.ahead is None else 2
        return disk_bytes(self._rule_executor, self.slots, times)

    @property
    def released_bytes(self) -> int:
        """Bytes of gradients in the model's dtype that the device does without where they are
        released."""
        elements = {slot.slot: slot for slot in self.slots}
        sizes = []
        for place in self.early_places:
            for bucket in self.buckets[place].members:
                slots = map(elements.__getitem__, bucket)
                # the gradient of a float8 parameter has 16 bits
                sizes.append(sum(slot.numel * max(2, slot.dtype.itemsize) for slot in slots))
        return sum(sorted(sizes)[:-2])

    @property
    def streamed_share(self) -> float:
        """Which share of the elements is streamed."""
        streamed = sum(slot.share for slot in self.by_place["streamed"])
        return streamed / max(sum(slot.share for slot in self.slots), 1)

    def notes(self) -> Iterator[str]:
        """How the slots are stepped, in words."""
        if self.split is not None and self.slots:
            yield f"auto: {self.streamed_share:.0%} is streamed ({self.split})"
        for place, lane in self.window_lanes.items():
            if self.by_place[place]:
                yield lane.note()
        if "host" in self.by_place and self.how.is_early:
            yield (
                f"host: offload_mode {self.how.mode}, {len(self.buckets['host'].members)} "
                f"buckets of at most {self.settings.bucket_bytes:,} bytes, "
                f"{self.host_bytes().back:,} bytes double buffer"
                + (", gradients released" if self.releases else "")
            )
