"""The host part of an optimizer: its offloaded slots, and the buckets and windows in which they are
stepped. Also the slots' host memory: planned bytes, allocated bytes, and growth beyond a plan.

A plan counts the shapes and dtypes of main params and state, and gradients in the model's dtypes.
It leaves out memory that a background save or the system's huge pages add.

:mod:`~mp_optim.offload.backward_scheduler` begins jobs during backward, and
:mod:`~mp_optim.offload.stepper` takes the steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from torch import Tensor

from mp_optim.core import Slot
from mp_optim.core.executor import Executor, Place
from mp_optim.core.slot_state import STEP
from mp_optim.host.host_memory import allocate_contiguous, is_on_host
from mp_optim.offload.buckets import Buckets, DiskBytes, HostBytes, HostSlot, Staging
from mp_optim.offload.settings import HostStepSettings, OffloadedStep
from mp_optim.offload.speculation import SpeculativeStepper
from mp_optim.offload.streaming import WindowPipeline, disk_bytes, held_forms, state_bytes
from mp_optim.offload.window_plan import IN_FLIGHT
from mp_optim.rules.rule_executor import RuleExecutor

STAGING, BACK, WINDOWS, STATE = "staging", "back buffers", "windows", "main params and state"
GROWN_BY = 1 / 50
"""Share of its plan by which an allocation may exceed the plan before a warning."""
_SMALL = 1 << 20
"""Bytes by which any allocation may exceed its plan, for alignment of tensors and blocks."""
_CAUSES = {STAGING: "gradients are wider than the model's dtype, or some stay after their release"}


def label_of(executor: Executor, slots: Sequence[Slot]) -> str:
    """Return a label for some slots of an executor, for errors and the timeline."""
    first = executor.slot_name(slots[0])
    if len(slots) == 1:
        return first
    return f"{first} .. {executor.slot_name(slots[-1])} ({len(slots)} parameters)"


class HostPart:
    """The offloaded slots of an optimizer, all stepped in one place, kept for the optimizer's life.

    Args:
        how: the place and the mode of the steps.
        executor: keeps the state of the slots and steps them.
        bind_tensors: updates the executor's tensors to the present tensors.
        settings: memory and copies of the steps.

    Attributes:
        how: the place and the mode of the steps.
        settings: memory and copies of the steps.
        executor: keeps the state of the slots and steps them.
        label: returns a label for some slots, for errors and the timeline.
        slots: the slots, in the order in which their gradients are expected.
        pipeline: steps the slots in windows; None if the host steps whole buckets.
        buckets: buckets of gradients that are copied to staging memory; None if gradients are read
            in place.
        comes_down: True if backward also copies gradients to the host that stay on the device.
        speculation: steps into a back buffer; None without speculation.
        releases: True if gradients leave the device during backward.
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
        self.buckets: Buckets | None = None
        self.comes_down = False
        self.releases = False
        self.pipeline: WindowPipeline | None = None
        if how.place == "streamed" or settings.state_file is not None:
            self.pipeline = WindowPipeline(self._rule_executor, how.place, settings, self.label)
        self.speculation: SpeculativeStepper | None = None
        if how.mode == "speculative" and self.pipeline is None:
            self.speculation = SpeculativeStepper(self._rule_executor, settings.timeline)
        self._offloaded: frozenset[Slot] = frozenset()
        self._is_allocated = False

    @property
    def _rule_executor(self) -> RuleExecutor:
        """The executor, if it is a rule's. Windows and back buffers are refused with any other
        executor."""
        assert isinstance(self.executor, RuleExecutor)
        return self.executor

    def place_of(self, slot: Slot) -> Place:
        """Return the place where a slot is stepped."""
        return self.how.place if slot in self._offloaded else "device"

    def copied_slots(self) -> Sequence[Slot]:
        """Return the slots whose parameters are written by copies, not by a kernel of the step."""
        is_in_place = self.pipeline is None and self.buckets is None
        is_copied = self.how.place == "host" and not is_in_place
        return [each.slot for each in self.slots] if is_copied else ()

    # -- cutting: nothing may be begun ------------------------------------------------------------

    def use_slots(self, slots: Sequence[HostSlot]) -> None:
        """Replace the slots of the host part."""
        self.slots = list(slots)
        self._offloaded = frozenset(slot.slot for slot in slots)
        self._use_allocators()
        self.cut_buckets()
        if (file := self.settings.state_file) is not None:
            file.reserve(sum(self.disk_bytes()))

    def use_settings(self, settings: HostStepSettings) -> None:
        """Replace the settings, and allocate memory with the new settings."""
        self.settings = settings
        self._use_allocators()
        if self.pipeline is not None:
            self.pipeline.use(settings)
        self.cut_buckets()

    def _use_allocators(self) -> None:
        """Make the executor allocate state of windowed slots in memory that copies can read."""
        self._is_allocated = False
        if self.pipeline is None:
            return
        settings = self.settings

        def zeroed(num_bytes: int) -> Tensor:
            return settings.transfer.empty_host(num_bytes, settings.pin_mains).zero_()

        file, allocate = settings.state_file, partial(allocate_contiguous, allocate=zeroed)
        slots = [slot.slot for slot in self.slots]
        self._rule_executor.rows.allocators = dict.fromkeys(slots, file.zeros if file else allocate)

    def cut_buckets(self) -> None:
        """Cut the slots into buckets or windows, with new memory."""
        on_host, settings = self.how.place == "host", self.settings
        if self.pipeline is not None:
            self.pipeline.use_slots(self.slots, self.releases)
        self.buckets = self._new_buckets()
        # A step in windows of host memory reads gradients in place, so backward need not copy them.
        in_place = self.pipeline is not None and settings.transfer.is_same_place
        has_outputs = self.buckets is not None and self.buckets.has_outputs
        self.comes_down = on_host and (has_outputs or not in_place)
        if self.speculation is not None:
            # Speculation copies gradients to the host, so it always has buckets.
            assert self.buckets is not None
            self.speculation.use_buckets(
                self.buckets.members, settings.transfer, settings.pin_mains
            )
        self._step_together()

    def _new_buckets(self) -> Buckets | None:
        """Return new buckets; None if no gradient is copied to staging memory."""
        how, on_host = self.settings, self.how.place == "host"
        if self.pipeline is not None:
            is_needed = self.how.runs_in_backward and (on_host or self.releases)
        else:  # In mode sync, a step reads a model in host memory in place.
            is_needed = self.how.runs_in_backward or not how.transfer.is_same_place
        if not is_needed:
            return None
        has_outputs = self.pipeline is None
        return Buckets(
            self.how.mode,
            self.slots,
            how.bucket_bytes,
            how.pipelined,
            lambda size: Staging(how.transfer, size, how.pin_staging),
            has_outputs,
            self.label,
        )

    def _step_together(self) -> None:
        """Register with the executor the slots that share a launch: the slots of a bucket, or
        all slots in windows."""
        sets: dict[int, list[list[int]]] = {}
        together: Sequence[Sequence[Slot]] = [[slot.slot for slot in self.slots]]
        if self.pipeline is None and self.buckets is not None:
            together = self.buckets.members
        for each in together:
            for group, members in groupby(sorted(each), key=attrgetter("group")):
                positions = [slot.position for slot in members]
                sets.setdefault(group, []).append(positions)
        for group, of_group in sets.items():
            self.executor.step_together(group, of_group)

    def allocate(self) -> None:
        """Allocate the state of slots in windows contiguously, once."""
        if not self._is_allocated:
            self.executor.allocate_state([slot.slot for slot in self.slots])
            self._is_allocated = True

    # -- what it takes ----------------------------------------------------------------------------

    def host_bytes(self) -> HostBytes:
        """Return the bytes of host memory after all slots have been stepped, with gradients of
        the model's dtypes."""
        held = HostBytes(())
        if self.pipeline is not None and self.settings.state_file is None:
            held = state_bytes(self._rule_executor, self.slots)
        if self.speculation is not None:
            self._bind_tensors()
            if reserved := self.speculation.reserved():
                mains, state = zip(*reserved, strict=True)
                held = held._replace(back_mains=mains, back_state=state)
        pieces = () if self.buckets is None else self.buckets.staging
        windows = () if self.pipeline is None else self.pipeline.host_bytes()
        return held._replace(staging=tuple(piece.capacity for piece in pieces), windows=windows)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory held in ``step()``, in addition to gradients and parameters."""
        if self.how.place != "streamed" or self.pipeline is None or not self.slots:
            return 0
        return sum(self.pipeline.sizes[:IN_FLIGHT])

    def disk_bytes(self) -> DiskBytes:
        """Return the bytes of the state file."""
        if self.settings.state_file is None:
            return DiskBytes()
        return disk_bytes(self._rule_executor, self.slots)

    @property
    def released_bytes(self) -> int:
        """Bytes on the device that ``release_gradients`` saves, in the dtype of the model."""
        elements = {slot.slot: slot for slot in self.slots}
        if self.buckets is None or not self.how.runs_in_backward:
            return 0
        sizes = []
        for bucket in self.buckets.members:
            slots = map(elements.__getitem__, bucket)
            # The gradient of a float8 parameter has 16 bits, more than the parameter.
            sizes.append(sum(slot.numel * max(2, slot.dtype.itemsize) for slot in slots))
        return sum(sorted(sizes)[:-2])

    def notes(self) -> Iterator[str]:
        """Yield notes for ``describe()`` about how the slots are stepped."""
        if self.pipeline is not None and self.slots:
            yield self.pipeline.note()
        if self.how.place == "host" and self.how.runs_in_backward and self.buckets is not None:
            yield (
                f"host: offload_mode {self.how.mode}, {len(self.buckets.members)} "
                f"buckets of at most {self.settings.bucket_bytes:,} bytes, "
                f"{self.host_bytes().back:,} bytes double buffer"
                + (", gradients released" if self.releases else "")
            )


class MemoryUse:
    """Planned and allocated bytes of host memory, by purpose. Growth beyond the plan is reported
    once.

    Args:
        part: the offloaded slots.
    """

    def __init__(self, part: HostPart) -> None:
        self._part = part
        self._reported: set[str] = set()
        self._state: tuple[object, int] = (None, 0)
        self._is_complete = False

    def planned(self) -> dict[str, int]:
        """Return the planned bytes by purpose. State that is not allocated yet is included."""
        part = self._part
        held = part.host_bytes()
        staging = 0 if part.buckets is None else part.buckets.planned
        return {STAGING: staging, BACK: held.back, WINDOWS: sum(held.windows), STATE: self._forms()}

    def allocated(self) -> dict[str, int]:
        """Return the allocated bytes by purpose."""
        part = self._part
        pieces = () if part.buckets is None else part.buckets.staging
        windows = 0 if part.pipeline is None else part.pipeline.allocated_bytes
        return {
            STAGING: sum(piece.allocated for piece in pieces),
            BACK: 0 if part.speculation is None else part.speculation.allocated_bytes,
            WINDOWS: windows,
            STATE: self._state[1] if self._is_complete else self._tensors(),
        }

    def metrics(self) -> dict[str, float]:
        """Return ``planned_host_bytes`` and ``resident_host_bytes``. Warn once of each purpose
        that takes more memory than its plan."""
        planned, allocated = self.planned(), self.allocated()
        for purpose in planned.keys() - self._reported:
            more = allocated[purpose] - planned[purpose]
            if more > planned[purpose] * GROWN_BY + _SMALL:
                self._reported.add(purpose)
                warnings.warn(_growth(purpose, planned[purpose], allocated[purpose]), stacklevel=5)
        # State tensors never change their size, so complete state is not added up again.
        self._is_complete = planned[STATE] == allocated[STATE] == self._state[1]
        return {
            "planned_host_bytes": sum(planned.values()),
            "resident_host_bytes": sum(allocated.values()),
        }

    def _forms(self) -> int:
        """Return the planned bytes of main params and state in host memory, with state that is
        not allocated yet."""
        part = self._part
        if part.settings.state_file is not None:
            return 0
        if not isinstance(executor := part.executor, RuleExecutor):
            return self._tensors()
        # Another list means that the slots have changed since the last call.
        if self._state[0] is not part.slots:
            forms = (form for slot in part.slots for form in held_forms(executor, slot).values())
            self._state = part.slots, sum(size.numel() * dtype.itemsize for size, dtype in forms)
            self._is_complete = False
        return self._state[1]

    def _tensors(self) -> int:
        """Return the bytes of main params and state that are in host memory now."""
        part, size = self._part, 0
        if part.settings.state_file is not None:
            return 0
        for slot in part.slots:
            # Read the executor's rows, because state_of() would allocate state.
            if isinstance(executor := part.executor, RuleExecutor):
                state = executor.rows.groups[slot.slot.group].slots[slot.slot.position]
                tensors = [value for key, value in state.items() if key != STEP]
            else:
                tensors = [*executor.state_of(slot.slot).live().values()]
            if not slot.is_stepped_in_place:
                tensors.append(executor.stepped(slot.slot))
            size += sum(each.nbytes for each in tensors if is_on_host(each))
        return size


def _growth(purpose: str, planned: int, allocated: int) -> str:
    cause = f" ({_CAUSES[purpose]})" if purpose in _CAUSES else ""
    return (
        f"host memory of {purpose}: {allocated:,} bytes are allocated, {planned:,} were "
        f"planned{cause}; leave room for them, or lower offload_bucket_bytes or the offload "
        "fraction"
    )
