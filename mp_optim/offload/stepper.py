"""Steps of the host part: slots whose main params or state are in host memory or in a file.

A step combines four modules: the storage of state (:mod:`~mp_optim.offload.state_storage`), windows
of state (:mod:`~mp_optim.offload.streaming`), the schedule of backward
(:mod:`~mp_optim.offload.backward_scheduler`) and buckets of gradients
(:mod:`~mp_optim.offload.buckets`). Without windows, the host steps whole buckets of state in place.
:class:`~mp_optim.offload.host_part.HostPart` cuts the slots into buckets and windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

from torch import Tensor

from mp_optim.core import Slot, SlotUpdates, StepPlan, UpdateSelection
from mp_optim.core.executor import Executor, Place
from mp_optim.host.transfer import Transfer
from mp_optim.offload.backward_grads import GradSource
from mp_optim.offload.backward_scheduler import BackwardScheduler, Phase
from mp_optim.offload.buckets import BucketStep, HostSlot
from mp_optim.offload.host_part import HostPart, MemoryUse
from mp_optim.offload.settings import HostStepSettings, OffloadedStep
from mp_optim.offload.speculation import BackLaunch
from mp_optim.offload.timeline import WAIT_DISK, TransferBytes


class Stepper:
    """Steps the host part by an :class:`OffloadedStep`, some slots already during backward.

    The result of a step does not depend on jobs during backward. The step repeats jobs that were
    not begun, or were begun from other values.

    Args:
        how: place and mode of the steps.
        executor: keeps the state of the slots.
        slots: slots in the order in which their gradients are expected.
        bind_tensors: updates the executor's tensors to the present tensors.
        settings: memory and copies of the steps.
        source: the optimizer that takes the step, until a wrapper replaces it.

    Attributes:
        host_part: the slots, their buckets and windows.
        schedule: the jobs of backward.
        transfer_bytes: bytes that the last step copied.
    """

    def __init__(
        self,
        how: OffloadedStep,
        executor: Executor,
        slots: Sequence[HostSlot],
        bind_tensors: Callable[[], object],
        settings: HostStepSettings,
        source: GradSource,
    ) -> None:
        self._executor, self.timeline = executor, settings.timeline
        self.host_part = HostPart(how, executor, bind_tensors, settings)
        self.schedule = BackwardScheduler(self.host_part, bind_tensors, source)
        self.transfer_bytes = TransferBytes()
        self._memory = MemoryUse(self.host_part)
        self.cut_buckets(slots)

    @property
    def transfer(self) -> Transfer:
        """The interface that copies tensors between host and device."""
        return self.host_part.settings.transfer

    # -- which slot goes which way, in which buckets ----------------------------------------------

    def cut_buckets(self, slots: Sequence[HostSlot]) -> None:
        """Cut buckets for other slots. Results of backward are discarded."""
        self.schedule.discard()
        self.host_part.use_slots(slots)
        self._cut_anew()

    def use_transfer(self, transfer: Transfer, bucket_bytes: int | None = None) -> None:
        """Use another transfer or bucket size from now on. No copy may be in progress.

        Args:
            transfer: the new interface for copies.
            bucket_bytes: largest staging bytes of a bucket; None keeps the present size.
        """
        self.schedule.discard()
        before = self.host_part.settings
        if bucket_bytes is None:
            bucket_bytes = before.bucket_bytes
        settings = replace(before, transfer=transfer, bucket_bytes=bucket_bytes)
        self.host_part.use_settings(settings)
        self._cut_anew()

    def _cut_anew(self) -> None:
        """Drop plans, jobs and memory of the former buckets."""
        self._executor.step_mark.invalidate_plans()
        self.schedule.use_buckets()

    def release_gradients(self) -> None:
        """Release gradients of offloaded slots during backward from now on.

        Raises:
            ValueError: a streamed parameter does not fit into a window with its gradient.
        """
        self.host_part.releases = True
        if self.host_part.how.place == "streamed":
            self.schedule.discard()
            self.host_part.cut_buckets()
            self._cut_anew()

    # -- in step ----------------------------------------------------------------------------------

    def step_slots(self, updates: SlotUpdates, device: Executor) -> None:
        """Step the offloaded slots, and the device's slots meanwhile. Uploads are ordered before
        later operations on the device.

        Args:
            updates: updates with gradients and outputs on the device.
            device: executor of the slots that are not offloaded.

        Raises:
            WorkerError: a job of the worker failed; nothing was stepped.
        """
        # No wrapper has measured the gradients, so the jobs of backward are not collected yet.
        if self.schedule.phase is not Phase.COLLECTED:
            self.schedule.collect()
        pipeline = self.host_part.pipeline
        if pipeline is not None:
            self.host_part.allocate()
        self.transfer_bytes = TransferBytes()
        offloaded, of_device = self._parts(updates)

        def step_device() -> None:
            if of_device:
                device.step_slots(of_device)

        self._step(offloaded, step_device)
        if pipeline is not None:
            self.transfer_bytes.add(*astuple(pipeline.moved))
            pipeline.moved = TransferBytes()
        self.timeline.end_step()
        if self.schedule.runs_in_backward:
            if self.host_part.speculation is not None:
                self.schedule.check_prediction(offloaded)
            self.schedule.end_iteration()

    def _parts(self, updates: SlotUpdates) -> tuple[SlotUpdates, SlotUpdates]:
        """Return the updates of offloaded slots, and the updates of slots that stay on the
        device."""
        key, make = self._executor.step_mark.plan_key, partial(_by_place, updates.slots)
        away, here = updates.slots.part("places", (key,), partial(make, self.host_part.place_of))
        return away.take(updates), here.take(updates)

    def _step(self, updates: SlotUpdates, step_device: Callable[[], None]) -> None:
        """Step the offloaded slots, and the device's slots after the first copies are queued.

        Back buffers that backward began to fill are completed and published. The other slots are
        stepped by bucket or by window.
        """
        part, transfer = self.host_part, self.transfer
        if part.pipeline is not None:
            on_host = self._gradients_on_host(updates)
            if on_host:
                columns = zip(updates.slots, updates.grads, strict=True)
                grads = [on_host.get(slot, grad) for slot, grad in columns]
                updates = replace(updates, grads=grads)
            part.pipeline.steps(updates, on_host, step_device)
            return
        if part.buckets is None:
            step_device()
            if updates:
                with self.timeline.stage("host_step", part.label(updates.slots)):
                    self._executor.step_slots(updates)
            return
        steps = part.buckets.steps(updates, self.transfer_bytes)
        self.schedule.judge(steps)
        # Mark the gradients as complete now, so that no download waits for the device's step.
        mark = transfer.mark()
        back_launches = self._fill_back_buffers(steps, mark) if self.schedule.speculates else {}

        def begin() -> None:
            step_device()
            for step in steps:
                if part.speculation is not None:
                    part.speculation.publish(step, back_launches.get(step.bucket, ()))

        self._by_bucket([step for step in steps if not back_launches.get(step.bucket)], mark, begin)
        if steps:
            # NOTE: the device waits for the uploads, the host does not. The wait cannot be later,
            # because the device's next operations read the parameters.
            transfer.join()

    def _gradients_on_host(self, updates: SlotUpdates) -> Mapping[Slot, Tensor]:
        """Return the gradients that windows read from host memory, by slot."""
        buckets = self.host_part.buckets
        if buckets is None:
            return {}
        routes = [
            (self.schedule.buckets[bucket], selection.take(updates))
            for bucket, _, selection in buckets.routes(updates.slots)
        ]
        down = self.schedule.gradients_on_host(routes)
        self.transfer_bytes.add(sum(grad.nbytes for grad in down.values()))
        return down

    def _by_bucket(self, steps: Sequence[BucketStep], mark: Any, begin: Callable[[], None]) -> None:
        """Step bucket by bucket in staging memory, with gradients that are complete at ``mark``."""
        depth = 1
        if self.host_part.settings.pipelined:
            depth = len(steps) if self.schedule.runs_in_backward else 2
        for step in steps[:depth]:
            step.start(mark)
        begin()
        for done, step in enumerate(steps):
            following = done + depth - 1
            if done and following < len(steps):
                steps[following].start(mark)
            step.wait(self.timeline)
            try:
                with self.timeline.stage("host_step", step.label):
                    self._executor.step_slots(step.staged)
            except Exception as error:
                if not self.schedule.runs_in_backward:
                    raise
                self.schedule.discard()
                raise RuntimeError(
                    f"{step.label}: the step on the host failed: {error!r}. {done} of "
                    f"{len(steps)} buckets were stepped before; load the last checkpoint"
                ) from error
            with self.timeline.stage("publish", step.label):
                step.upload()

    def _fill_back_buffers(
        self, steps: Sequence[BucketStep], mark: Any
    ) -> dict[int, Sequence[BackLaunch]]:
        """Step every bucket into its back buffer, unless backward did so. Return launches by
        bucket, none for a bucket that has to be stepped in place."""
        ahead = self.host_part.speculation
        assert ahead is not None
        planned = ahead.planned(steps)
        hits = self.schedule.hits(steps, planned)
        try:
            return ahead.fill(steps, planned, hits, mark)
        except Exception:
            self.schedule.discard()
            raise

    # -- what it says of itself -------------------------------------------------------------------

    def notes(self) -> tuple[str, ...]:
        """Return notes for ``describe()`` about how the slots are stepped."""
        file = self.host_part.settings.state_file
        of_file = () if file is None else file.notes()
        notes = (*self.host_part.notes(), *of_file, *self.transfer.notes())
        return tuple(dict.fromkeys(notes))

    def metrics(self) -> dict[str, float]:
        """Return host memory, milliseconds of the last step's stages, and counts of speculation."""
        found = self.timeline.metrics() | self._memory.metrics()
        if self.schedule.runs_in_backward:
            found |= self.schedule.counts
        if self.host_part.settings.state_file is not None:
            found["bytes_read"] = self.transfer_bytes.read
            found["bytes_written"] = self.transfer_bytes.written
            found["disk_wait_ms"] = self.timeline.milliseconds(WAIT_DISK)
        return found


def _by_place(
    slots: StepPlan, place_of: Callable[[Slot], Place]
) -> tuple[UpdateSelection, UpdateSelection]:
    """Return the offloaded members of a step, and the members that stay on the device."""
    indices: tuple[list[int], list[int]] = [], []
    for index, slot in enumerate(slots):
        indices[place_of(slot) == "device"].append(index)
    away, here = (UpdateSelection(part, slots) for part in indices)
    return away, here
