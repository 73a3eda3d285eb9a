"""Steps of offloaded slots, whose main params or state are in host memory or in a file.

Without windows, ``step()`` steps buckets in place on the host. For each bucket, gradients are
copied to staging memory, the host steps main params and state, and parameters are copied back. With
streamed state, or state in a file, :class:`~mp_optim.offload.streaming.WindowPipeline` steps the
slots window by window.

With ``offload_mode="overlap"`` or ``"speculative"``, backward has copied gradients before
``step()`` begins. :mod:`~mp_optim.offload.backward_scheduler` decides which copies are used. The
bits of a step do not depend on backward: the step itself makes each copy or update that backward
did not make, or made from other values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from mp_optim.core import Slot, SlotUpdates, StepPlan, UpdateSelection
from mp_optim.core.executor import Executor
from mp_optim.core.slot_state import STEP
from mp_optim.host.calls import warn
from mp_optim.host.host_memory import allocate_contiguous
from mp_optim.host.transfer import Transfer
from mp_optim.offload.backward_grads import GradSource
from mp_optim.offload.backward_scheduler import BackwardScheduler, Phase
from mp_optim.offload.buckets import (
    WAIT_DISK,
    Buckets,
    BucketStep,
    DiskBytes,
    HostBytes,
    HostSlot,
    Staging,
    TransferBytes,
)
from mp_optim.offload.settings import HostStepSettings
from mp_optim.offload.speculation import BackLaunch, SpeculativeStepper
from mp_optim.offload.state_storage import IN_FLIGHT
from mp_optim.offload.streaming import WindowPipeline, disk_bytes, held_forms, state_bytes
from mp_optim.rules.rule_executor import RuleExecutor


class Stepper:
    """The offloaded slots of an optimizer, cut into buckets or windows, and their steps.

    Args:
        executor: the executor that keeps the state of the slots and steps them.
        slots: slots in the order in which their gradients are expected.
        bind_tensors: function that gives the present tensors to the executor.
        settings: memory and copies of the steps.
        source: the optimizer that takes the step, until a wrapper replaces this optimizer.

    Attributes:
        label: function that returns a label for some slots, for errors and the timeline.
        speculation: stepper into back buffers; None without speculation.
        schedule: the jobs of backward.
        releases: True if gradients leave the device during backward.
        pipeline: the pipeline that steps windows; None if the host steps whole buckets.
        buckets: buckets of gradients that are copied to staging memory; None if gradients are read
            in place.
        transfer_bytes: bytes that the last step copied.
    """

    pipeline: WindowPipeline | None
    buckets: Buckets | None

    def __init__(
        self,
        executor: Executor,
        slots: Sequence[HostSlot],
        bind_tensors: Callable[[], object],
        settings: HostStepSettings,
        source: GradSource,
    ) -> None:
        self.settings, self._executor = settings, executor
        self.timeline = settings.timeline
        self.label = partial(_label_of, executor)
        self._bind_tensors = bind_tensors
        self._has_windows = settings.place == "streamed" or settings.state_file is not None
        self.speculation: SpeculativeStepper | None = None
        if settings.mode == "speculative" and not self._has_windows:
            self.speculation = SpeculativeStepper(self._rule_executor, settings.timeline)
        self.schedule = BackwardScheduler(
            executor, bind_tensors, settings, source, self.speculation, self.label
        )
        self.releases = False
        self.transfer_bytes = TransferBytes()
        # Purposes of host memory of which metrics() has warned; it warns of each only once.
        self._reported: set[str] = set()
        self.cut_buckets(slots)

    @property
    def _rule_executor(self) -> RuleExecutor:
        # ``HostStepSettings.check`` refuses windows and back buffers for any other executor.
        assert isinstance(self._executor, RuleExecutor)
        return self._executor

    # -- cutting ----------------------------------------------------------------------------------

    def cut_buckets(self, slots: Sequence[HostSlot]) -> None:
        """Cut slots into buckets or windows, with new memory. Results of backward are discarded.

        Raises:
            ValueError: a slot that cannot be cut is larger than a window.
        """
        self.schedule.discard()
        self.slots, settings = list(slots), self.settings
        self._offloaded = frozenset(slot.slot for slot in slots)
        self._is_allocated, self._state_bytes = False, (-1, 0)
        self.pipeline, file = None, settings.state_file
        if self._has_windows:
            # Allocate state in memory that copies can read.
            empty = settings.transfer.empty_host
            allocate = partial(
                allocate_contiguous, allocate=lambda size: empty(size, settings.pin_mains).zero_()
            )
            make = allocate if file is None else file.zeros
            self._rule_executor.rows.allocators = dict.fromkeys(self._offloaded, make)
            self.pipeline = WindowPipeline(
                self._rule_executor, settings, self.label, self.slots, self.releases
            )
        self.buckets = self._new_buckets()
        if self.speculation is not None:
            # Speculation copies gradients to the host, so it always has buckets.
            assert self.buckets is not None
            members = self.buckets.members
            self.speculation.use_buckets(members, settings.transfer, settings.pin_mains)
        # The slots of a bucket share a launch, and so do all slots in windows.
        together: Sequence[Sequence[Slot]] = [[slot.slot for slot in self.slots]]
        if self.pipeline is None and self.buckets is not None:
            together = self.buckets.members
        sets: dict[int, list[list[int]]] = {}
        for each in together:
            for group, run in groupby(sorted(each), key=attrgetter("group")):
                sets.setdefault(group, []).append([slot.position for slot in run])
        for group, of_group in sets.items():
            self._executor.step_together(group, of_group)
        if file is not None:
            file.reserve(sum(self.disk_bytes()))
        self._executor.step_mark.invalidate_plans()
        self.schedule.use_buckets(settings, self.buckets, self._offloaded, self.releases)

    def _new_buckets(self) -> Buckets | None:
        """Return new buckets; None if no gradient is copied to staging memory."""
        settings = self.settings
        # If the model is in host memory, a step reads gradients in place and needs no staging
        # memory.
        is_copied = settings.place == "host" and not settings.transfer.is_same_place
        if self.pipeline is None:
            is_needed = settings.runs_in_backward or is_copied
        else:
            is_needed = settings.runs_in_backward and (is_copied or self.releases)
        if not is_needed:
            return None
        return Buckets(
            settings.mode,
            self.slots,
            settings.bucket_bytes,
            settings.pipelined,
            lambda size: Staging(settings.transfer, size, settings.pin_staging),
            self.pipeline is None,
            self.label,
        )

    def use_transfer(self, transfer: Transfer, bucket_bytes: int | None = None) -> None:
        """Use another transfer or bucket size from now on. No copy may be in progress.

        Args:
            transfer: the new interface for copies.
            bucket_bytes: largest staging bytes of a bucket; None keeps the present size.
        """
        if bucket_bytes is None:
            bucket_bytes = self.settings.bucket_bytes
        self.settings = replace(self.settings, transfer=transfer, bucket_bytes=bucket_bytes)
        self.cut_buckets(self.slots)

    def release_gradients(self) -> None:
        """Release gradients of offloaded slots during backward from now on.

        Raises:
            ValueError: a streamed parameter does not fit into a window with its gradient.
        """
        self.releases = True
        self.cut_buckets(self.slots)

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
        # Without a wrapper, no other code has collected the jobs of backward in this step.
        if self.schedule.phase is not Phase.COLLECTED:
            self.schedule.collect()
        self.transfer_bytes = TransferBytes()
        key, make = self._executor.step_mark.plan_key, partial(_by_place, updates.slots)
        away, here = updates.slots.part("by place", (key,), partial(make, self._offloaded))
        offloaded, of_device = away.take(updates), here.take(updates)

        def step_device() -> None:
            if of_device:
                device.step_slots(of_device)

        if self.pipeline is not None:
            self._step_windows(self.pipeline, offloaded, step_device)
        elif self.buckets is not None:
            self._step_buckets(self.buckets, offloaded, step_device)
        else:
            step_device()
            if offloaded:
                with self.timeline.stage("host_step", self.label(offloaded.slots)):
                    self._executor.step_slots(offloaded)
        self.schedule.end_step(offloaded)

    def _step_windows(
        self, pipeline: WindowPipeline, updates: SlotUpdates, step_device: Callable[[], None]
    ) -> None:
        """Step the offloaded slots by window. Gradients that backward copied to the host are read
        there."""
        if not self._is_allocated:
            self._executor.allocate_state([slot.slot for slot in self.slots])
            self._is_allocated = True
        on_host = self.schedule.gradients_on_host(updates)
        self.transfer_bytes.add(sum(grad.nbytes for grad in on_host.values()))
        if on_host:
            columns = zip(updates.slots, updates.grads, strict=True)
            grads = [on_host.get(slot, grad) for slot, grad in columns]
            updates = replace(updates, grads=grads)
        pipeline.steps(updates, on_host, step_device)
        self.transfer_bytes.add(*astuple(pipeline.moved))
        pipeline.moved = TransferBytes()

    def _step_buckets(
        self, buckets: Buckets, updates: SlotUpdates, step_device: Callable[[], None]
    ) -> None:
        """Step the offloaded slots by bucket, and the device's slots after the first copies are
        queued. Back buffers that backward began to fill are completed and published."""
        steps = buckets.steps(updates, self.transfer_bytes)
        self.schedule.find_copied(steps)
        # Take the mark before the device's step is queued. Otherwise downloads of gradients would
        # start only after that step.
        mark = self.settings.transfer.mark()
        ahead = self.speculation
        in_back: dict[int, Sequence[BackLaunch]] = {}
        if ahead is not None and self.schedule.speculates:
            planned = {step.bucket: self._rule_executor.plan(step.staged) for step in steps}
            hits = self.schedule.hits(steps, planned)
            try:
                in_back = ahead.fill(steps, planned, hits, mark)
            except Exception:
                self.schedule.discard()
                raise

        def begin() -> None:
            step_device()
            for step in steps:
                if ahead is not None and in_back.get(step.bucket):
                    ahead.publish(step, in_back[step.bucket])

        self._step_in_place([step for step in steps if not in_back.get(step.bucket)], mark, begin)
        if steps:
            # NOTE: the device waits for the uploads, the host does not. The wait cannot be later,
            # because the device's next operations read the parameters.
            self.settings.transfer.join()

    def _step_in_place(
        self, steps: Sequence[BucketStep], mark: Any, begin: Callable[[], None]
    ) -> None:
        """Step main params and state of each bucket on the host, and upload the parameters.

        Args:
            steps: the buckets that are stepped in place.
            mark: see :meth:`BucketStep.start`.
            begin: function to call after the first copies of gradients have started.
        """
        depth = 1
        if self.settings.pipelined:
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

    # -- memory -----------------------------------------------------------------------------------
    #
    # A plan counts main params, state, and gradients in the model's dtypes. It leaves out memory
    # that a background save or the system's huge pages add.

    def host_bytes(self) -> HostBytes:
        """Return the sizes of the host memory that this stepper holds once every slot has been
        stepped. Assumes gradients in the model's dtypes; with wider gradients staging grows."""
        held = HostBytes(())
        if self.pipeline is not None and self.settings.state_file is None:
            held = state_bytes(self._rule_executor, self.slots)
        if self.speculation is not None:
            self._bind_tensors()
            reserved = [buffer.reserve() for buffer in self.speculation.back_buffers]
            if reserved:
                mains, state = zip(*reserved, strict=True)
                held = held._replace(back_mains=mains, back_state=state)
        pieces = () if self.buckets is None else self.buckets.staging
        windows = () if self.pipeline is None else self.pipeline.host_bytes()
        return held._replace(
            staging=tuple(piece.memory.capacity for piece in pieces), windows=windows
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory held in ``step()``, in addition to gradients and parameters."""
        if self.settings.place != "streamed" or self.pipeline is None or not self.slots:
            return 0
        return sum(self.pipeline.sizes[:IN_FLIGHT])

    def disk_bytes(self) -> DiskBytes:
        """Return the bytes of the state file."""
        if self.settings.state_file is None:
            return DiskBytes()
        return disk_bytes(self._rule_executor, self.slots)

    @property
    def released_bytes(self) -> int:
        """Bytes on the device that ``release_gradients`` saves, for gradients in the model's
        dtypes. The two largest buckets are not counted, because gradients of two buckets are on
        the device at a time."""
        elements = {slot.slot: slot for slot in self.slots}
        if self.buckets is None or not self.settings.runs_in_backward:
            return 0
        sizes = []
        for bucket in self.buckets.members:
            slots = map(elements.__getitem__, bucket)
            # The gradient of a float8 parameter has 16 bits, more than the parameter.
            sizes.append(sum(slot.numel * max(2, slot.dtype.itemsize) for slot in slots))
        return sum(sorted(sizes)[:-2])

    def _bytes_of_state(self) -> tuple[int, int]:
        """Return the planned and the allocated bytes of main params and state in host memory."""
        executor, planned, allocated = self._executor, 0, 0
        if self.settings.state_file is not None:
            return 0, 0
        for slot in self.slots:
            if isinstance(executor, RuleExecutor):
                forms = held_forms(executor, slot).values()
                planned += sum(size.numel() * dtype.itemsize for size, dtype in forms)
                # Read the executor's rows, because state_of() would allocate state.
                state = executor.rows.groups[slot.slot.group].slots[slot.slot.position]
                tensors = [value for key, value in state.items() if key != STEP]
            else:
                tensors = [*executor.state_of(slot.slot).live().values()]
            if not slot.is_stepped_in_place:
                tensors.append(executor.stepped(slot.slot))
            allocated += sum(each.nbytes for each in tensors if each.is_cpu)
        return planned if isinstance(executor, RuleExecutor) else allocated, allocated

    # -- descriptions -----------------------------------------------------------------------------

    def notes(self) -> tuple[str, ...]:
        """Return notes for ``describe()`` about how the slots are stepped."""
        settings = self.settings
        notes: list[str] = []
        if self.pipeline is not None and self.slots:
            notes.append(self.pipeline.note())
        if settings.place == "host" and self.schedule.runs_in_backward:
            notes.append(
                f"host: offload_mode {settings.mode}, {len(self.schedule.buckets)} "
                f"buckets of at most {settings.bucket_bytes:,} bytes, "
                f"{self.host_bytes().back:,} bytes double buffer"
                + (", gradients released" if self.releases else "")
            )
        if settings.state_file is not None:
            notes += settings.state_file.notes()
        return tuple(dict.fromkeys((*notes, *settings.transfer.notes())))

    def metrics(self) -> dict[str, float]:
        """Return milliseconds of the last step's stages, host memory, and counts of buckets.

        ``planned_host_bytes`` and ``resident_host_bytes`` are sums over all purposes. Warn once of
        each purpose that takes more memory than its plan.
        """
        held, ahead, pipeline = self.host_bytes(), self.speculation, self.pipeline
        # State tensors never change their size, so complete state is not added up again.
        if self._state_bytes[0] != self._state_bytes[1]:
            self._state_bytes = self._bytes_of_state()
        staged = 0 if self.buckets is None else self.buckets.planned
        pieces = [] if self.buckets is None else self.buckets.staging
        memory = {  # The planned and the allocated bytes of each purpose.
            "staging": (staged, sum(piece.memory.allocated for piece in pieces)),
            "back buffers": (held.back, 0 if ahead is None else ahead.allocated_bytes),
            "windows": (sum(held.windows), 0 if pipeline is None else pipeline.storage.allocated),
            "main params and state": self._state_bytes,
        }
        for purpose, (planned, allocated) in memory.items():
            # Alignment of tensors and blocks may add 2 % and 1 MiB to a plan. So warn only of more.
            if allocated - planned > planned / 50 + (1 << 20) and purpose not in self._reported:
                self._reported.add(purpose)
                cause = " (gradients are wider than the model's dtype, or some stay after their "
                cause += "release)"
                warn(
                    f"host memory of {purpose}: {allocated:,} bytes are allocated, but only "
                    f"{planned:,} were planned{cause if purpose == 'staging' else ''}; free other "
                    "host memory, or lower offload_bucket_bytes or the offload fraction"
                )
        planned, allocated = map(sum, zip(*memory.values(), strict=True))
        found = self.timeline.metrics()
        found |= {"planned_host_bytes": planned, "resident_host_bytes": allocated}
        if self.settings.runs_in_backward:
            found |= self.schedule.counts
        if self.settings.state_file is not None:
            found["bytes_read"] = self.transfer_bytes.read
            found["bytes_written"] = self.transfer_bytes.written
            found["disk_wait_ms"] = self.timeline.milliseconds(WAIT_DISK)
        return found


def _label_of(executor: Executor, slots: Sequence[Slot]) -> str:
    first = executor.slot_name(slots[0])
    if len(slots) == 1:
        return first
    return f"{first} .. {executor.slot_name(slots[-1])} ({len(slots)} parameters)"


def _by_place(
    slots: StepPlan, offloaded: frozenset[Slot]
) -> tuple[UpdateSelection, UpdateSelection]:
    """Return the offloaded members of a step, and the members that stay on the device."""
    away = [index for index, slot in enumerate(slots) if slot in offloaded]
    here = [index for index, slot in enumerate(slots) if slot not in offloaded]
    return UpdateSelection(away, slots), UpdateSelection(here, slots)
