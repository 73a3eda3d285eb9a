"""Steps the host part: slots of an optimizer whose main params and state are not on the device.

Four things are composed, and none knows of the others: where state rests
(:mod:`~mp_optim.offload.state_storage`), who steps it (:mod:`~mp_optim.offload.streaming`; where
state
rests in host memory, the host steps whole buckets where they are), when
(:mod:`~mp_optim.offload.backward_scheduler`), and which slot goes which way
(:mod:`~mp_optim.offload.buckets`). :class:`~mp_optim.offload.host_part.HostPart` cuts the slots
into buckets and windows accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import chain
from typing import Any

from mp_optim.core import Slot, SlotUpdates, UpdateSelection
from mp_optim.core.executor import Executor, Place
from mp_optim.host.transfer import Transfer, fetch
from mp_optim.offload.backward_scheduler import Schedule
from mp_optim.offload.bucket_buffers import BucketStep
from mp_optim.offload.buckets import HostSlot, Split, StepTime
from mp_optim.offload.double_buffer import BackLaunch
from mp_optim.offload.host_part import HostPart
from mp_optim.offload.settings import HostStepSettings, OffloadedStep
from mp_optim.offload.timeline import WAIT_DISK, TransferBytes
from mp_optim.offload.window_plan import IN_FLIGHT


class Stepper:
    """What steps the host part, as :class:`OffloadedStep` says, some of it during backward.

    Nothing depends on work being begun early: what was not begun, or from other values, is done in
    the step.

    Args:
        executor: of the slots.
        slots: in the order in which their gradients are expected.
        bind_tensors: makes the executor have the tensors of now.

    Attributes:
        host_part: the slots, their buckets and windows.
        schedule: what is begun during backward.
        transfer_bytes: of the last step.
    """

    def __init__(
        self,
        how: OffloadedStep,
        executor: Executor,
        slots: Sequence[HostSlot],
        bind_tensors: Callable[[], object],
        settings: HostStepSettings,
    ) -> None:
        self._executor, self.timeline = executor, settings.timeline
        self.host_part = HostPart(how, executor, bind_tensors, settings)
        self.schedule = Schedule(self.host_part, bind_tensors)
        self.transfer_bytes = TransferBytes()
        self.cut_buckets(slots)

    @property
    def transfer(self) -> Transfer:
        """How tensors travel."""
        return self.host_part.settings.transfer

    # -- which slot goes which way, in which buckets ----------------------------------------------

    def cut_buckets(self, slots: Sequence[HostSlot]) -> None:
        """Cut buckets anew, for other slots. What was begun early is dropped."""
        self.schedule.discard()
        self.schedule.arrivals.forget_order()
        self.host_part.use_slots(slots)
        self._cut_anew()

    def use_transfer(self, transfer: Transfer, bucket_bytes: int | None = None) -> None:
        """Have tensors travel another way from now on, or in other buckets; nothing may be on its
        way."""
        self.schedule.discard()
        before = self.host_part.settings
        if bucket_bytes is None:
            bucket_bytes = before.bucket_bytes
        settings = replace(before, transfer=transfer, bucket_bytes=bucket_bytes)
        self.host_part.use_settings(settings)
        self._cut_anew()

    def _cut_anew(self) -> None:
        """There are other buckets now."""
        self._selections: tuple[Sequence[Slot], dict[Place, UpdateSelection]] | None = None
        self.schedule.cut()

    def stream(self, share: float) -> None:
        """From the next step on, stream this share of the elements."""
        self.host_part.split = Split(share)
        self._split_anew()

    def _split_anew(self) -> None:
        self.schedule.discard()
        if self.host_part.ahead is not None:  # what is streamed from now on has no back buffer
            self.host_part.ahead.restore()
        self.schedule.arrivals.forget_order()
        self.host_part.place_slots()
        self._cut_anew()

    def release_gradients(self) -> None:
        """From now on gradients come with a claim, and are begun only if they can be released.

        Raises:
            ValueError: a streamed parameter does not fit into a window with its gradient.
        """
        self.host_part.releases = True
        if "streamed" in self.host_part.window_lanes:
            self.schedule.discard()
            self.host_part.cut()
            self._cut_anew()

    # -- in step ----------------------------------------------------------------------------------

    def step_slots(self, updates: SlotUpdates, device: Executor) -> None:
        """Step slots, those that are not offloaded in between; on return uploads are ordered before
        later work on the device.

        Args:
            updates: with gradients and outputs on the device.
            device: steps what is not offloaded.

        Raises:
            WorkerError: the worker failed; nothing was stepped.
        """
        self.schedule.collect()  # nobody above has, if no wrapper is there
        if self.host_part.window_lanes:
            self.host_part.allocate()
        self.transfer_bytes = TransferBytes()
        parts = self._parts(updates)
        of_device = parts.pop("device")

        def step_device() -> None:
            if of_device:
                device.step_slots(of_device)

        self._step(parts, step_device)
        for lane in self.host_part.window_lanes.values():
            self.transfer_bytes.add(*astuple(lane.moved))
            lane.moved = TransferBytes()
        self.timeline.end_step()
        if self.schedule.is_early:
            if self.host_part.ahead is not None:
                self.schedule.check_prediction(parts["host"])
            if not self.schedule.arrivals.is_order_known:
                self._learn_order(parts.values())
            self.schedule.end_iteration()
        if (split := self.host_part.split) is not None and split.is_measuring:
            self._measure(split, [part for part in parts.values() if part])

    def _parts(self, updates: SlotUpdates) -> dict[Place, SlotUpdates]:
        """The updates of each place."""
        slots = updates.slots
        if self._selections is None or self._selections[0] is not slots:
            indices: dict[Place, list[int]] = {place: [] for place in self.host_part.by_place}
            indices["device"] = []
            for index, slot in enumerate(slots):
                indices[self.host_part.place_of(slot)].append(index)
            chosen = {
                place: UpdateSelection(part, [slots[i] for i in part], len(slots))
                for place, part in indices.items()
            }
            self._selections = slots, chosen
        return {place: part.take(updates) for place, part in self._selections[1].items()}

    def _step(self, parts: Mapping[Place, SlotUpdates], step_device: Callable[[], None]) -> None:
        """Step the host part, and what is streamed so that it stays ahead of that.

        Spares that backward began to fill are made to hold this step. Then the device gets its own
        slots, and as many windows as may be in flight, to work on beside the host, and the spares
        are published. The host steps what is left, by bucket or window; further windows are queued
        as it goes.
        """
        speculates = self.schedule.speculates
        steps: list[BucketStep] = []
        if "host" in parts and ("host" not in self.host_part.window_lanes or speculates):
            steps = self.host_part.buckets["host"].steps(parts["host"], self.transfer_bytes)
            self.schedule.judge(steps)
        lanes, ahead = self.host_part.window_lanes, self.host_part.ahead
        windows = {place: self._in_windows(place, parts[place], steps) for place in lanes}
        transfer = self.host_part.settings.transfer
        mark = transfer.mark()  # no download waits for the device's step
        spares = self._fill_spares(steps, mark) if speculates else {}
        streamed = self._streamed(windows.get("streamed"), step_device)
        lead = _Lead(streamed)

        def begin() -> None:
            lead.start()
            for step in steps:
                if ahead is not None:
                    ahead.publish(step, spares.get(step.bucket, ()))

        left = [step for step in steps if not spares.get(step.bucket)]
        if "host" in windows:
            updates, on_host = windows["host"]
            published = [step.updates.slots for step in steps if spares.get(step.bucket)]
            updates = _without(updates, set(chain(*published)))
            host = lanes["host"].steps(updates, on_host, begin)
        else:
            host = self._in_place(left, mark, begin)
        try:
            for done in host:
                lead.keep_up(done)
            lead.keep_up(1.0)
        finally:
            host.close()
            streamed.close()
        if steps:
            # NOTE: the device waits for the uploads, the host for nothing. It cannot be later: what
            # the device is given next reads the parameters.
            transfer.join()

    def _in_windows(
        self, place: Place, updates: SlotUpdates, counted: Sequence[BucketStep]
    ) -> tuple[SlotUpdates, Collection[Slot]]:
        """The updates of a lane of windows, and which slots have their gradients in host memory.

        Args:
            counted: steps of the host's buckets, whose bytes are counted.
        """
        if (buckets := self.host_part.buckets.get(place)) is None:
            return updates, ()
        early = self.schedule.early[place]
        routes = [
            (early[bucket], selection.take(updates))
            for bucket, _, selection in buckets.routes(updates.slots)
        ]
        down = self.schedule.gradients_on_host(routes)
        if down:
            columns = zip(updates.slots, updates.grads, strict=True)
            grads = [down.get(slot, grad) for slot, grad in columns]
            updates = replace(updates, grads=grads)
        if not counted or place != "host":
            self.transfer_bytes.add(sum(grad.nbytes for grad in down.values()))
        return updates, down

    def _streamed(
        self, windows: tuple[SlotUpdates, Collection[Slot]] | None, step_device: Callable[[], None]
    ) -> Generator[float, None, None]:
        if windows is None:
            step_device()
        else:
            yield from self.host_part.window_lanes["streamed"].steps(*windows, step_device)

    def _in_place(
        self, steps: Sequence[BucketStep], mark: Any, begin: Callable[[], None]
    ) -> Generator[float, None, None]:
        """Step bucket by bucket where state rests, with gradients that are complete at a mark.
        Yields which share of the buckets is stepped."""
        depth = 1
        if self.host_part.settings.pipelined:
            depth = len(steps) if self.schedule.is_early else 2
        for step in steps[:depth]:  # before begin(): the host must not wait for windows first
            step.start(mark)
        begin()
        for done, step in enumerate(steps):
            following = done + depth - 1
            if done and following < len(steps):
                steps[following].start(mark)
            step.wait(self.timeline)
            yield done / len(steps)
            try:
                with self.timeline.stage("host_step", step.label):
                    self._executor.step_slots(step.staged)
            except Exception as error:
                if not self.schedule.is_early:
                    raise
                self.schedule.discard()
                raise RuntimeError(
                    f"{step.label}: the step on the host failed: {error!r}. {done} of "
                    f"{len(steps)} buckets before it were already stepped: load the last checkpoint"
                ) from error
            with self.timeline.stage("publish", step.label):
                step.upload()

    def _fill_spares(
        self, steps: Sequence[BucketStep], mark: Any
    ) -> dict[int, Sequence[BackLaunch]]:
        """Make the spare of every bucket hold this step, mostly by finding that it does. Launches
        by bucket; none for one that has to be stepped where it is."""
        ahead, buckets = self.host_part.ahead, self.schedule.early["host"]
        assert ahead is not None
        planned = ahead.planned(steps)
        hits = self.schedule.hits(steps, buckets, planned, mark)
        try:
            return ahead.fill(steps, buckets, planned, hits, mark)
        except Exception:
            self.schedule.discard()
            raise

    # -- what follows from a step -----------------------------------------------------------------

    def _learn_order(self, parts: Iterable[SlotUpdates]) -> None:
        """After the first backward: cut buckets in the order in which gradients got ready."""
        before = [slot.slot for part in self.host_part.by_place.values() for slot in part]
        order = self.schedule.arrivals.learn_order(before, parts)
        if order is not None:
            self.schedule.end_iteration()
            self.host_part.follow(order)
            self._cut_anew()

    def _measure(self, split: Split, parts: Sequence[SlotUpdates]) -> None:
        """Take note of how long a step of something took, the device's part included."""
        if not parts:
            return
        output = parts[0].outputs[0]
        on_device = parts[0].grads[0] if output is None else output
        fetch(self.transfer, on_device.new_zeros(1))()  # after all that is queued
        if split.record(StepTime(*self.timeline.last_step())):
            self._split_anew()

    # -- what it says of itself -------------------------------------------------------------------

    def notes(self) -> tuple[str, ...]:
        """How the slots are stepped, in words."""
        file = self.host_part.settings.state_file
        of_slots = (*self.host_part.notes(), *self.schedule.notes_on_dtensors())
        of_file = () if file is None else tuple(file.notes())
        return tuple(dict.fromkeys((*of_slots, *of_file, *self.transfer.notes())))

    def metrics(self) -> dict[str, float]:
        """Milliseconds of the last step's stages, and how speculation did so far."""
        found = self.timeline.metrics()
        if self.schedule.is_early:
            found |= self.schedule.counts
        if self.host_part.split is not None:
            found["streamed_fraction"] = self.host_part.streamed_share
        if self.host_part.settings.state_file is not None:
            found["bytes_read"] = self.transfer_bytes.read
            found["bytes_written"] = self.transfer_bytes.written
            found["disk_wait_ms"] = self.timeline.milliseconds(WAIT_DISK)
        return found


class _Lead:
    """Windows that are queued on the device while the host steps.

    Args:
        windows: yields which share of them is queued.
    """

    def __init__(self, windows: Iterator[float]) -> None:
        self._windows = windows
        self._queued = self._lead = 0.0

    def start(self) -> None:
        """Queue the device's own slots, and windows, until all that may be in flight come up: the
        next one would wait for the first to be down."""
        for _ in range(IN_FLIGHT):
            self._queued = self._lead = next(self._windows, 1.0)

    def keep_up(self, done: float) -> None:
        """Stay ahead of the host, which is done with this share of its part."""
        while self._queued < min(done + self._lead, 1.0):
            self._queued = next(self._windows, 1.0)
        if done == 1.0:
            for _ in self._windows:
                pass


def _without(updates: SlotUpdates, slots: Collection[Slot]) -> SlotUpdates:
    """The updates but those of some slots."""
    if not slots:
        return updates
    return updates.take([i for i, slot in enumerate(updates.slots) if slot not in slots])
