"""Steps the slots of an optimizer whose main params and state are not on the device.

Four things are composed, and none knows of the others: where state rests
(:mod:`~mp_optim.placement.sources`), who steps it (:mod:`~mp_optim.placement.sites`; where state
rests in host memory, the host steps whole buckets where they are), when
(:mod:`~mp_optim.placement.schedule`), and which slot goes which way
(:mod:`~mp_optim.placement.split`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, cast

from torch import Tensor

from mp_optim.placement.backward_jobs import Bucket
from mp_optim.placement.double_buffer import (
    BackLaunch,
    DoubleBuffer,
    FileRoom,
    HostRoom,
    Key,
    MemoryMaker,
)
from mp_optim.placement.grad_hooks import Claim, GradientSource
from mp_optim.placement.lanes import WindowLane, disk_bytes, state_bytes
from mp_optim.placement.plan import DiskBytes, HostBytes, HostSlot
from mp_optim.placement.schedule import Schedule
from mp_optim.placement.settings import HostStepSettings, OffloadedStep
from mp_optim.placement.speculation import Ahead
from mp_optim.placement.split import Split, StepTime, by_place
from mp_optim.placement.staging import Buckets, BucketStep, Staging
from mp_optim.placement.timeline import WAIT_COPIES, WAIT_DISK, TransferBytes
from mp_optim.placement.windows import IN_FLIGHT
from mp_optim.process.calls import in_own_modes
from mp_optim.process.host_memory import zeros_beside
from mp_optim.process.transfer import Transfer
from mp_optim.slots import Slot, SlotUpdate, SlotUpdates, UpdateSelection, param_at
from mp_optim.slots.executor import Executor, Place
from mp_optim.update.executor import RuleExecutor
from mp_optim.update.kernel_args import MAIN


class Stepper:
    """What steps offloaded slots, as :class:`OffloadedStep` says, part of it during backward.

    Nothing depends on work being begun early: what was not begun, or from other values, is done in
    the step.

    Args:
        sub: the executor of the slots.
        slots: in the order in which their gradients are expected.
        bind_tensors: makes that have the tensors of now.

    Attributes:
        schedule: what is begun during backward.
        lanes: by place, of the slots that are stepped in windows.
        works_in_backward: whether :meth:`on_grad_ready` begins anything.
        transfer_bytes: of the last step.
    """

    def __init__(
        self,
        how: OffloadedStep,
        sub: Executor,
        slots: Sequence[HostSlot],
        bind_tensors: Callable[[], object],
        settings: HostStepSettings,
    ) -> None:
        self.how, self.settings = how, settings
        self.transfer, self.timeline = settings.transfer, settings.timeline
        self._sub, self._bind_tensors = sub, bind_tensors
        self.schedule = Schedule(
            how.mode,
            sub,
            bind_tensors,
            settings,
            self._label,
            self._new_iteration,
            self._lost_memory,
        )
        self.transfer_bytes = TransferBytes()
        self.works_in_backward = self.schedule.is_early
        self._split = Split(how.streamed_fraction) if how.place == "auto" else None
        self.lanes: dict[Place, WindowLane] = {}
        self._build_lanes()
        self._build_spare()
        self.cut_buckets(slots)

    def _build_lanes(self) -> None:
        """A lane of windows for each place that has some."""
        file, place = self.settings.state_file, self.how.place
        places: list[Place] = []
        if file is not None and place != "streamed":
            places.append("host")
        if place != "host":
            places.append("streamed")
        for each in places:
            self.lanes[each] = WindowLane(self._rule, each, self.settings, self._label)

    def _allocate_for_windows(self) -> None:
        """Have state of what is stepped in windows be allocated in memory that copies read."""
        if not self.lanes:
            return
        empty_host = partial(self.transfer.empty_host, pin=self.settings.pin_mains)
        file, allocate = self.settings.state_file, partial(zeros_beside, allocate=empty_host)
        slots = [slot.slot for slot in self._slots]
        self._rule.rows.allocators = dict.fromkeys(slots, file.zeros if file else allocate)

    def _build_spare(self) -> None:
        """Where a step ahead goes to."""
        file = self.settings.state_file
        self._file_spare = None if file is None else DoubleBuffer(FileRoom(file))
        if self.how.mode == "speculative" and self.how.place != "streamed":
            how = self.settings.speculation
            run = self._carry_out if file is None else self.lanes["host"].step_ahead
            self.schedule.ahead = Ahead(self._rule, how, self.timeline, run)
            if file is None:
                self.schedule.ahead.reserve = self._reserved

    @property
    def _rule(self) -> RuleExecutor:
        return cast(RuleExecutor, self._sub)

    @property
    def has_slots(self) -> bool:
        """Whether anything is offloaded."""
        return bool(self._slots)

    def place_of(self, slot: Slot) -> Place:
        """Where a slot is stepped."""
        return self._place_of.get(slot, "device")

    def _label(self, slots: Sequence[Slot]) -> str:
        first = self._sub.slot_name(slots[0])
        if len(slots) == 1:
            return first
        return f"{first} .. {self._sub.slot_name(slots[-1])} ({len(slots)} parameters)"

    # -- which slot goes which way, in which buckets ----------------------------------------------

    def cut_buckets(self, slots: Sequence[HostSlot]) -> None:
        """Cut buckets anew, for other slots. What was begun early is dropped."""
        self.discard()
        self._slots = list(slots)
        self._is_allocated = False
        self._allocate_for_windows()
        self._recut()
        if (file := self.settings.state_file) is not None:
            file.reserve(sum(self.disk_bytes()))

    def use_transfer(self, transfer: Transfer, bucket_bytes: int | None = None) -> None:
        """Have tensors travel another way from now on, or in other buckets; nothing may be on its
        way."""
        self.discard()
        if bucket_bytes is None:
            bucket_bytes = self.settings.bucket_bytes
        self.settings = replace(self.settings, transfer=transfer, bucket_bytes=bucket_bytes)
        self.transfer = transfer
        self._is_allocated = False
        self._allocate_for_windows()
        self._take_other_memory()

    def _lost_memory(self) -> None:
        """The worker may write for ever to the memory that it was given."""
        if self._file_spare is not None:
            self._file_spare.forget()
        self._take_other_memory()

    def _take_other_memory(self) -> None:
        for lane in self.lanes.values():
            lane.use(self.settings)
        self._cut_lanes()

    def stream(self, share: float) -> None:
        """From the next step on, stream this share of the elements."""
        self._split = Split(share)
        self._split_anew()

    def _split_anew(self) -> None:
        self.discard()
        # What is streamed from now on would keep a back buffer; a file keeps its spare.
        if self.schedule.ahead is not None and self._file_spare is None:
            self.schedule.ahead.restore()
        self._recut()

    def _recut(self) -> None:
        self.schedule.order.forget()
        self._parts_of_slots = by_place(self._slots, self.how.sub_place, self._split)
        self._place_of = {
            slot.slot: place for place, part in self._parts_of_slots.items() for slot in part
        }
        self._selections: tuple[Sequence[Slot], dict[Place, UpdateSelection]] | None = None
        self._cut_lanes()

    def _cut_lanes(self) -> None:
        """Cut the slots of each place into buckets or windows, with other memory."""
        self._buckets: dict[Place, Buckets] = {}
        early: list[tuple[Buckets, bool]] = []
        for place, slots in self._parts_of_slots.items():
            if place in self.lanes:
                self.lanes[place].source.drop_early()
                may_come = slots if self._split is None else self._slots
                self.lanes[place].cut(slots, may_come, self.schedule.releases)
            if (buckets := self._new_buckets(place, slots)) is None:
                continue
            self._buckets[place] = buckets
            # In windows of memory that the host reads, gradients are read where they are.
            in_place = place in self.lanes and self.transfer.is_same_place
            comes_down = place == "host" and (buckets.has_outputs or not in_place)
            early.append((buckets, comes_down))
        self.schedule.cut(early if self.schedule.is_early else [], self.settings)
        self._cut_spares()
        self._step_together()

    def _step_together(self) -> None:
        """Say which slots are stepped at a time: those of a bucket, or all that are in windows."""
        sets: dict[int, list[list[int]]] = {}
        for place, slots in self._parts_of_slots.items():
            together: Sequence[Sequence[Slot]] = [[slot.slot for slot in slots]]
            if place not in self.lanes:
                together = self._buckets[place].plan.buckets
            for each in together:
                for group, members in groupby(sorted(each), key=attrgetter("group")):
                    positions = [slot.position for slot in members]
                    sets.setdefault(group, []).append(positions)
        for group, of_group in sets.items():
            self._sub.step_together(group, of_group)

    def _new_buckets(self, place: Place, slots: Sequence[HostSlot]) -> Buckets | None:
        """Buckets of a place, if gradients come down to it but with windows."""
        how, is_in_windows = self.settings, place in self.lanes
        is_needed = self.schedule.is_early and (place == "host" or self.schedule.releases)
        if is_in_windows and not is_needed:
            return None
        has_outputs = not is_in_windows or (place == "host" and self.schedule.ahead is not None)
        transfer = self.transfer
        return Buckets(
            self.how.mode,
            slots,
            how.bucket_bytes,
            how.pipelined,
            lambda size: Staging(transfer, size, how.pin_staging),
            has_outputs,
            self._label,
        )

    def _cut_spares(self) -> None:
        self._rooms: list[HostRoom] = []
        if (ahead := self.schedule.ahead) is None:
            return
        count = len(self._buckets["host"].plan.buckets)
        if self._file_spare is not None:
            ahead.spares = [self._file_spare] * count
            return
        maker = MemoryMaker(self.transfer.empty_host)
        pin = self.settings.pin_mains
        self._rooms = [HostRoom(self.transfer, pin, maker) for _ in range(count)]
        ahead.spares = [DoubleBuffer(room) for room in self._rooms]

    def _reserved(self, index: int) -> tuple[int, int]:
        """Bytes of the back buffer of a bucket, with room for all of its slots."""
        live: dict[Key, Tensor] = {}
        for slot in self._buckets["host"].plan.buckets[index]:
            tensors = {**self._sub.state_of(slot).tensors()}
            tensors[MAIN] = param_at(self._sub.param_groups, slot)
            for key in tensors.keys() - {"step"}:
                live[slot.group, slot.position, key] = tensors[key]
        return self._rooms[index].reserve(live)

    def release_gradients(self) -> None:
        """From now on gradients come with a claim, and are begun only if they can be released.

        Raises:
            ValueError: a streamed parameter does not fit into a window with its gradient.
        """
        self.schedule.releases = True
        if "streamed" in self.lanes:
            self.discard()
            self._cut_lanes()

    # -- during backward --------------------------------------------------------------------------

    def connect(self, source: GradientSource) -> None:
        """Ask this source from now on; it reports gradients by :meth:`on_grad_ready`."""
        self.schedule.source = source

    @in_own_modes
    def on_grad_ready(
        self, update: SlotUpdate, claim: Claim | None = None, writes_are_counted: bool = True
    ) -> None:
        """A gradient is complete; the step will be given the same update but for the multiplier, or
        what the claim was released to. Never raises: what goes wrong is reported by
        :meth:`collect`.

        Args:
            writes_are_counted: torch counts every write to it, which it does not for the local
                tensor of a DTensor.
        """
        if self.schedule.is_early:
            self.schedule.report(update, claim, writes_are_counted)

    def _new_iteration(self, speculates: bool) -> None:
        """With the first gradient of a backward: read the windows that the step will begin with,
        but where the worker reads them."""
        if (file := self.settings.state_file) is not None:
            file.settle()
            for place, lane in self.lanes.items():
                if place == "streamed" or not speculates:
                    lane.source.begin_early()
                else:
                    lane.resize()

    def collect(self) -> None:
        """Wait for what was begun early.

        Raises:
            WorkerError: it failed. All of it is dropped; nothing was stepped.
        """
        if (file := self.settings.state_file) is not None:
            file.check_owner()
        self.schedule.collect()

    def known_sum_of_squares(self, grad: Tensor) -> float | None:
        """Of a gradient that was measured early and has not changed since; else None."""
        return self.schedule.arrivals.sum_of_squares(grad)

    def state_exposed(self, slot: Slot) -> None:
        """The caller gets live tensors of a slot, and may write to them without a trace."""
        if (file := self.settings.state_file) is not None:
            file.exposed()
            self._drop_early()
        self.schedule.distrust(slot)

    def _drop_early(self) -> None:
        for lane in self.lanes.values():
            lane.source.drop_early()

    def forget_released(self) -> None:
        """Released gradients are of no use any more."""
        self.schedule.forget_released()

    @property
    def released_bytes(self) -> int:
        """Bytes of gradients in the model's dtype that the device does without where they are
        released."""
        sizes = dict.fromkeys(map(id, self.schedule.buckets), 0)
        elements = {slot.slot: slot for slot in self._slots}
        for bucket in self.schedule.buckets:
            for slot in map(elements.__getitem__, bucket.slots):
                # the gradient of a float8 parameter has 16 bits
                sizes[id(bucket)] += slot.numel * max(2, slot.dtype.itemsize)
        return sum(sorted(sizes.values())[:-2])

    def skip(self) -> None:
        """This step changes nothing: drop what was begun early."""
        if (ahead := self.schedule.ahead) is not None:
            self.schedule.counts["speculation_paused"] += ahead.record(False)
        self._end_iteration()
        self.timeline.end_step()

    def discard(self) -> None:
        """Drop what was begun early; the step does it again."""
        self.schedule.discard()
        self._drop_early()

    def _end_iteration(self) -> None:
        self.schedule.end_iteration()
        self._drop_early()

    # -- in step ----------------------------------------------------------------------------------

    def step_slots(self, updates: SlotUpdates, grad_norm: float | None, device: Executor) -> None:
        """Step slots, those that are not offloaded in between; on return uploads are ordered before
        later work on the device.

        Args:
            updates: with gradients and outputs on the device.
            device: steps what is not offloaded.

        Raises:
            WorkerError: the worker failed; nothing was stepped.
        """
        self.collect()
        self.timeline.begin_step()
        if self.lanes and not self._is_allocated:
            self._rule.allocate_state([slot.slot for slot in self._slots])  # side by side
            self._is_allocated = True
        self.transfer_bytes = TransferBytes()
        parts = self._parts(updates)
        of_device = parts.pop("device")

        def step_device() -> None:
            if of_device:
                device.step_slots(of_device, grad_norm=grad_norm)

        self._step(parts, grad_norm, step_device)
        for lane in self.lanes.values():
            self.transfer_bytes.add(*astuple(lane.moved))
            lane.moved = TransferBytes()
        self.timeline.end_step()
        if self.schedule.is_early:
            self._check_prediction(parts.get("host"))
            self._learn_order(parts.values())
            self._end_iteration()
        if self._split is not None and self._split.is_measuring:
            self._measure([part for part in parts.values() if part])

    def _parts(self, updates: SlotUpdates) -> dict[Place, SlotUpdates]:
        """The updates of each place."""
        slots = updates.slots
        if self._selections is None or self._selections[0] is not slots:
            indices: dict[Place, list[int]] = {place: [] for place in self._parts_of_slots}
            indices["device"] = []
            for index, slot in enumerate(slots):
                indices[self.place_of(slot)].append(index)
            chosen = {
                place: UpdateSelection(part, [slots[i] for i in part], len(slots))
                for place, part in indices.items()
            }
            self._selections = slots, chosen
        return {place: part.take(updates) for place, part in self._selections[1].items()}

    def _step(
        self,
        parts: Mapping[Place, SlotUpdates],
        grad_norm: float | None,
        step_device: Callable[[], None],
    ) -> None:
        """Step the host's part, and what is streamed so that it stays ahead of that."""
        iteration = self.schedule.iteration
        speculates = iteration is not None and iteration.speculates
        steps: list[BucketStep] = []
        if "host" in parts and ("host" not in self.lanes or speculates):
            steps = self._bucket_steps(parts["host"])
        windows = {place: self._in_windows(place, parts[place], steps) for place in self.lanes}
        gradients = self.transfer.mark()  # no download waits for the device's step
        spares = self._fill_spares(steps, grad_norm, gradients) if speculates else {}
        streamed = self._streamed(windows.get("streamed"), grad_norm, step_device)
        lead = _Lead(streamed)

        def begin() -> None:
            lead.start()
            for step in steps:
                if self.schedule.ahead is not None:
                    self.schedule.ahead.publish(step, spares.get(step.bucket, ()))

        left = [step for step in steps if not spares.get(step.bucket)]
        if "host" in windows:
            updates, on_host = windows["host"]
            published = [step.updates.slots for step in steps if spares.get(step.bucket)]
            updates = _without(updates, set(chain(*published)))
            host = self.lanes["host"].steps(updates, on_host, grad_norm, begin)
        else:
            host = self._in_place(left, grad_norm, gradients, begin)
        try:
            for done in host:
                lead.keep_up(done)
            lead.keep_up(1.0)
        finally:
            host.close()
            streamed.close()
        if steps:
            self.transfer.join()

    def _bucket_steps(self, updates: SlotUpdates) -> list[BucketStep]:
        """The host's updates by bucket, and what of them came down during backward."""
        steps = self._buckets["host"].steps(updates)
        for step in steps:
            self.transfer_bytes.add(step.tensors.down, step.tensors.up)
        if self.schedule.is_early:
            self.schedule.judge(steps, self._early_buckets("host"))
        return steps

    def _early_buckets(self, place: Place) -> list[Bucket]:
        return [each for each in self.schedule.buckets if each.lane is self._buckets[place]]

    def _in_windows(
        self, place: Place, updates: SlotUpdates, counted: Sequence[BucketStep]
    ) -> tuple[SlotUpdates, Collection[Slot]]:
        """The updates of a lane of windows, and which slots have their gradients in host memory.

        Args:
            counted: steps of the host's buckets, whose bytes are counted.
        """
        if (buckets := self._buckets.get(place)) is None:
            return updates, ()
        early = self._early_buckets(place)
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
        self,
        windows: tuple[SlotUpdates, Collection[Slot]] | None,
        grad_norm: float | None,
        step_device: Callable[[], None],
    ) -> Generator[float, None, None]:
        if windows is None:
            step_device()
        else:
            yield from self.lanes["streamed"].steps(*windows, grad_norm, step_device)

    def _in_place(
        self,
        steps: Sequence[BucketStep],
        grad_norm: float | None,
        gradients: Any,
        begin: Callable[[], None],
    ) -> Generator[float, None, None]:
        """Step bucket by bucket where state rests; ``gradients`` is the mark at which they are
        complete. Yields which share of the buckets is stepped."""
        begin()
        ahead = 1 if self.settings.pipelined else 0
        if self.schedule.is_early:
            ahead *= len(steps)
        started = 0
        for done, step in enumerate(steps):
            for coming in steps[started : done + 1 + ahead]:
                coming.start(gradients)
                started += 1
            self._wait(step)
            yield done / len(steps)
            try:
                with self.timeline.stage("host_step", step.label):
                    self._sub.step_slots(step.staged, grad_norm=grad_norm)
            except Exception as error:
                if not self.schedule.is_early:
                    raise
                self.discard()
                raise RuntimeError(
                    f"{step.label}: the step on the host failed: {error!r}. {done} of "
                    f"{len(steps)} buckets before it were already stepped: load the last checkpoint"
                ) from error
            with self.timeline.stage("publish", step.label):
                step.upload()

    def _wait(self, step: BucketStep) -> None:
        if not step.is_downloaded:
            with self.timeline.stage(WAIT_COPIES):
                self.transfer.wait(step.ticket)

    # -- ahead of the verdict ---------------------------------------------------------------------

    def _fill_spares(
        self, steps: Sequence[BucketStep], grad_norm: float | None, gradients: Any
    ) -> dict[int, Sequence[BackLaunch]]:
        """Make the spare of every bucket hold this step, mostly by finding that it does. Launches
        by bucket; none for one that has to be stepped where it is."""
        ahead, buckets = self.schedule.ahead, self._early_buckets("host")
        assert ahead is not None
        planned = {step.bucket: self._rule.plan(step.staged, grad_norm) for step in steps}
        hits = self.schedule.hits(steps, buckets, planned, gradients)
        launches: dict[int, Sequence[BackLaunch]] = {}
        again = []
        for step in steps:
            bucket = buckets[step.bucket]
            if step.bucket in hits:
                assert bucket.job is not None
                launches[step.bucket] = bucket.job.back
                continue
            launches[step.bucket] = ahead.launches(step.bucket, planned[step.bucket])
            if launches[step.bucket]:
                bucket.distrust()  # what it holds is about to be written over
                again.append(step)
        for step in again:
            step.start(gradients)
        for step in again:
            self._step_again(ahead, step, launches[step.bucket])
        return launches

    def _step_again(self, ahead: Ahead, step: BucketStep, launches: Sequence[BackLaunch]) -> None:
        try:
            self._wait(step)
            ahead.run(launches, step.label)
        except Exception as error:
            self.discard()
            raise RuntimeError(
                f"{step.label}: the step on the host failed: {error!r}. The optimizer is as it was "
                "before this step"
            ) from error

    def _carry_out(self, launches: Sequence[BackLaunch], label: str) -> None:
        """Step into a back buffer. Nothing that is in use is written."""
        with self.timeline.stage("host_step", label):
            for launch in launches:
                self._rule.carry_out(launch.target)

    def _check_prediction(self, updates: SlotUpdates | None) -> None:
        """Take note of whether the step was the one that was predicted."""
        if (ahead := self.schedule.ahead) is None or not updates:
            return
        if (begun := self.schedule.iteration) is not None:
            predicted = begun.multiplier
        else:
            predicted = self.schedule.source.predicted_multiplier()
        was_right = set(updates.multipliers) == {predicted}
        self.schedule.counts["speculation_paused"] += ahead.record(was_right)

    # -- what follows from a step -----------------------------------------------------------------

    def _learn_order(self, parts: Iterable[SlotUpdates]) -> None:
        """After the first backward: cut buckets in the order in which gradients got ready."""
        before = [slot.slot for part in self._parts_of_slots.values() for slot in part]
        order = self.schedule.order.learn(before, parts)
        if order is None:
            return
        rank = {slot: index for index, slot in enumerate(order)}
        for part in self._parts_of_slots.values():
            part.sort(key=lambda slot: rank[slot.slot])
        self._end_iteration()
        self._cut_lanes()

    def _measure(self, parts: Sequence[SlotUpdates]) -> None:
        """Take note of how long a step of something took, the device's part included."""
        if self._split is None or not parts:
            return
        output = parts[0].outputs[0]
        on_device = parts[0].grads[0] if output is None else output
        self.fetch(on_device.new_zeros(1))()  # after all that is queued
        if self._split.record(StepTime(*self.timeline.last_step())):
            self._split_anew()

    # -- what it says of itself -------------------------------------------------------------------

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to copy a small tensor to the host; the result waits for the copy and returns
        it."""
        transfer = self.transfer
        copy = transfer.empty_host(tensor.nbytes, True).view(tensor.dtype)
        ticket = transfer.download([copy], [tensor])

        def value() -> Tensor:
            transfer.wait(ticket)
            return copy

        return value

    def _may_have(self, place: Place) -> Sequence[HostSlot]:
        """The slots of a place; while the split is measured, all may be there."""
        is_measuring = self._split is not None and self._split.is_measuring
        return self._slots if is_measuring else self._parts_of_slots[place]

    def host_bytes(self) -> HostBytes:
        """What is held as soon as all slots were stepped once, with gradients of their dtypes; what
        is held from then on."""
        held = HostBytes(())
        if self.lanes and self.settings.state_file is None:
            held = state_bytes(self._rule, [slot.slot for slot in self._slots])
        if self._rooms:
            self._bind_tensors()
            mains, state = zip(*map(self._reserved, range(len(self._rooms))), strict=True)
            held = held._replace(back_mains=mains, back_state=state)
        pieces = [piece for buckets in self._buckets.values() for piece in buckets.staging]
        windows = [lane.host_bytes(self._may_have(place)) for place, lane in self.lanes.items()]
        return held._replace(
            staging=tuple(piece.capacity for piece in pieces), windows=tuple(chain(*windows))
        )

    @property
    def device_bytes(self) -> int:
        """Device memory that is held within ``step()``, beside gradients and parameters."""
        of_lanes = (lane.device_bytes(self._may_have(place)) for place, lane in self.lanes.items())
        return sum(of_lanes)

    def disk_bytes(self) -> DiskBytes:
        """What is kept in a file rather than in memory."""
        if self.settings.state_file is None:
            return DiskBytes()
        times = 1 if self.schedule.ahead is None else 2
        return disk_bytes(self._rule, [slot.slot for slot in self._slots], times)

    def notes(self) -> tuple[str, ...]:
        """How the slots are stepped, in words."""
        return tuple(dict.fromkeys((*self._notes(), *self.transfer.notes())))

    def _notes(self) -> Iterator[str]:
        how, parts = self.how, self._parts_of_slots
        if self._split is not None and self._slots:
            yield f"auto: {self._streamed_share:.0%} is streamed ({self._split})"
        for place, lane in self.lanes.items():
            if parts[place]:
                yield lane.note()
        if "host" in parts and self.schedule.is_early:
            yield (
                f"host: offload_mode {how.mode}, {len(self._buckets['host'].plan.buckets)} buckets "
                f"of at most {self.settings.bucket_bytes:,} bytes, "
                f"{self.host_bytes().back:,} bytes double buffer"
                + (", gradients released" if self.schedule.releases else "")
            )
        yield from self.schedule.notes_on_dtensors()
        if (file := self.settings.state_file) is not None:
            yield from file.notes()

    @property
    def _streamed_share(self) -> float:
        streamed = sum(slot.share for slot in self._parts_of_slots["streamed"])
        return streamed / max(sum(slot.share for slot in self._slots), 1)

    def metrics(self) -> dict[str, float]:
        """Milliseconds of the last step's stages, and how speculation did so far."""
        found = self.timeline.metrics()
        if self.schedule.is_early:
            found |= self.schedule.counts
        if self._split is not None:
            found["streamed_fraction"] = self._streamed_share
        if self.settings.state_file is not None:
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
        """Queue the device's own slots, and as many windows as may be in flight."""
        for _ in range(1 + IN_FLIGHT):
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
