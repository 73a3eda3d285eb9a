"""Steps host slots bucket by bucket: gradients come down, the rule runs, parameters go up.

While one bucket is computed, the gradients of the next are on their way down and the parameters of
the one before on their way up. Gradients and parameters travel in the dtype they have.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from mp_optim.placement.host_bytes import (
    DiskBytes,
    HostBytes,
    HostSlot,
    OffloadMode,
    plan_staging,
)
from mp_optim.placement.speculation import SpeculationSettings
from mp_optim.placement.staging import StagedTensors, Staging
from mp_optim.placement.state_file import StateFile
from mp_optim.placement.timeline import WAIT_COPIES, StepTimeline
from mp_optim.process.transfer import Transfer
from mp_optim.slots import Slot, SlotUpdate, SlotUpdates, UpdateSelection
from mp_optim.slots.host_part import (
    GradientSource,
    HostPart,
    Place,
    TransferBytes,
)
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.update import choose_backend


@dataclass(frozen=True)
class HostStepSettings:
    """How the host's slots are stepped.

    Attributes:
        transfer: how tensors travel.
        timeline: where the time goes is noted.
        set_up: called once in the thread that works during backward.
        bucket_bytes: staging bytes per bucket; one parameter larger than that is a bucket by
            itself.
        window_bytes: of state that is on the device at a time, of streamed slots.
        pipelined: overlap copies in both directions with the arithmetic.
        pin_staging, pin_mains: page-lock staging memory; the back buffer of main params, and
            streamed state.
        speculation: when it pauses.
        state_file: where main params and state are kept, if not in memory.
    """

    transfer: Transfer
    timeline: StepTimeline
    set_up: Callable[[], None]
    bucket_bytes: int
    window_bytes: int
    pipelined: bool
    pin_staging: bool
    pin_mains: bool
    speculation: SpeculationSettings
    state_file: StateFile | None = None

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={self.bucket_bytes}: must be at least 1")


class HostOwner(Protocol):
    """What a stepper asks of the optimizer that it steps a part of."""

    def bind_tensors(self) -> None:
        """Make the host's optimizer have the tensors and settings of now."""

    def check_groups(self) -> None:
        """Raise ValueError, naming group and setting, if a hyperparameter cannot be."""

    def stop_watching(self) -> None:
        """Another layer reports gradients from now on."""

    def on_host(self, update: SlotUpdate) -> SlotUpdate | None:
        """An update in terms of the host's optimizer; None if the slot is not stepped there."""


@dataclass
class BucketStep:
    """One bucket's part of a step.

    Attributes:
        updates: gradients and outputs where they are on the device.
        staged: the same on the host.
        is_here: the gradients have been downloaded.
        was_written: they were, but may have been written to since.
        here: indices of single ones that are in place.
    """

    bucket: int
    label: str
    staging: Staging
    updates: SlotUpdates
    tensors: StagedTensors
    is_here: bool = False
    was_written: bool = False
    here: frozenset[int] = frozenset()
    ticket: Any = None

    def __post_init__(self) -> None:
        self.staged = self.tensors.put_into(self.updates)

    def start(self, after: Any) -> None:
        """Start the download of the gradients, which are complete at a mark of the transfer."""
        if self.is_here:
            return
        grads, staged = self.updates.grads, self.staged.grads
        if self.here:
            missing = [index for index in range(len(grads)) if index not in self.here]
            grads = [grads[index] for index in missing]
            staged = [staged[index] for index in missing]
        self.ticket = self.staging.download(grads, staged, after)

    def upload(self) -> None:
        """Start the upload of the parameters."""
        self.staging.upload(self.updates.outputs, self.staged.outputs)


class _NoSource:
    """Of an optimizer that nothing wraps: there is no loss scale, and settings are its own."""

    def push_hyperparams(self) -> None: ...

    def predicted_multiplier(self) -> float:
        return 1.0

    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        return choose_backend("auto", grads[0].device)[0].sum_of_squares(grads)


def nothing_beside(done: float) -> None:
    """For :attr:`HostStepper.beside`."""


class Stepper(HostPart):
    """What steps the slots of an optimizer whose state is in host memory."""

    @property
    @abstractmethod
    def has_slots(self) -> bool:
        """Whether anything is offloaded."""

    @abstractmethod
    def place_of(self, slot: Slot) -> Place:
        """Where one of these slots is stepped."""

    @abstractmethod
    def cut_buckets(self, slots: Sequence[HostSlot]) -> None:
        """Cut buckets anew, for other slots. What was begun early is dropped."""

    @abstractmethod
    def use_transfer(self, transfer: Transfer, bucket_bytes: int | None = None) -> None:
        """Have tensors travel another way from now on, or in other buckets; nothing may be on its
        way."""

    @abstractmethod
    def host_bytes(self) -> HostBytes:
        """What is held as soon as all slots were stepped once, with gradients of their dtypes; what
        is held from then on."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Device memory that is held within ``step()``, beside gradients and parameters."""

    def disk_bytes(self) -> DiskBytes:
        """What is kept in a file rather than in memory."""
        return DiskBytes()

    @abstractmethod
    def step_buckets(
        self,
        updates: SlotUpdates,
        grad_norm: float | None,
        step_device: Callable[[], None],
    ) -> None:
        """Step these slots, and the device's in between; on return uploads are ordered before later
        work there.

        Args:
            updates: with gradients and outputs on the device.
            step_device: steps what is not offloaded.
        """


class HostStepper(Stepper):
    """Steps the host's slots in ``step()``, and nothing before: ``offload_mode="sync"``.

    Args:
        host: the host's optimizer.
        slots: of it, in the order in which their gradients are expected.
        owner: the optimizer that it is a part of.

    Attributes:
        beside: called between buckets with the share of them that is stepped, and at the end with
            1.0, for what is done at the same time.
    """

    beside: Callable[[float], None]
    mode: OffloadMode = "sync"

    def __init__(
        self,
        host: SlotOptimizer,
        slots: Sequence[HostSlot],
        owner: HostOwner,
        settings: HostStepSettings,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.transfer, self.timeline = settings.transfer, settings.timeline
        self._host, self._owner = host, owner
        self._source: GradientSource = _NoSource()
        self.beside = nothing_beside
        self._staging: list[Staging] = []
        self._routes: (
            tuple[Sequence[Slot], list[tuple[int, str, UpdateSelection]]] | None
        ) = None
        self._cut(slots)

    @property
    def has_slots(self) -> bool:
        return bool(self._slots)

    def place_of(self, slot: Slot) -> Place:
        return "host"

    def connect(self, source: GradientSource) -> None:
        self._source = source
        self._owner.stop_watching()

    # -- buckets and their memory -----------------------------------------------------------------

    def cut_buckets(self, slots: Sequence[HostSlot]) -> None:
        self.discard()
        self._cut(slots)

    def come_home(self) -> None:
        """Have all slots be in the memory that they had before the first step; nothing may be
        begun."""

    def use_transfer(self, transfer: Transfer, bucket_bytes: int | None = None) -> None:
        self.discard()
        if bucket_bytes is None:
            bucket_bytes = self.settings.bucket_bytes
        self.settings = replace(
            self.settings, transfer=transfer, bucket_bytes=bucket_bytes
        )
        self.transfer = transfer
        self._cut(list(self._slots.values()))

    def _cut(self, slots: Sequence[HostSlot]) -> None:
        self._slots = {slot.slot: slot for slot in slots}
        how = self.settings
        self._plan, pieces = plan_staging(
            self.mode, slots, how.bucket_bytes, how.pipelined
        )
        self._staging = [
            Staging(self.transfer, size, how.pin_staging) for size in pieces
        ]
        self._routes = None

    def host_bytes(self) -> HostBytes:
        return HostBytes(tuple(staging.capacity for staging in self._staging))

    @property
    def device_bytes(self) -> int:
        return 0

    # -- in step ----------------------------------------------------------------------------------

    def step_buckets(
        self,
        updates: SlotUpdates,
        grad_norm: float | None,
        step_device: Callable[[], None],
    ) -> None:
        self.timeline.begin_step()
        self._step_both_places(self._bucket_steps(updates), grad_norm, step_device)
        self.transfer.join()
        self.timeline.end_step()

    def _step_both_places(
        self,
        steps: Sequence[BucketStep],
        grad_norm: float | None,
        step_device: Callable[[], None],
    ) -> None:
        gradients = self.transfer.mark()  # no download waits for the device's step
        step_device()
        self._step_in_place(steps, grad_norm, gradients)

    def _bucket_steps(self, updates: SlotUpdates) -> list[BucketStep]:
        """The updates by bucket, in the plan's order."""
        self.transfer_bytes = TransferBytes()
        has_own = len(self._staging) == len(self._plan.buckets)
        steps = []
        for position, route in enumerate(self._routes_of(updates.slots)):
            bucket, label, selection = route
            of_bucket = selection.take(updates)
            piece = bucket if has_own else position % len(self._staging)
            staging = self._staging[piece]
            tensors = staging.tensors_for(bucket, of_bucket)
            self.transfer_bytes.down += tensors.down
            self.transfer_bytes.up += tensors.up
            steps.append(BucketStep(bucket, label, staging, of_bucket, tensors))
        return steps

    def _routes_of(
        self, slots: Sequence[Slot]
    ) -> list[tuple[int, str, UpdateSelection]]:
        """Bucket, label and members of each bucket that has some; the last ones are kept."""
        if self._routes is not None and self._routes[0] is slots:
            return self._routes[1]
        members: dict[int, list[int]] = {}
        for index in sorted(range(len(slots)), key=slots.__getitem__):
            members.setdefault(self._plan.bucket_of[slots[index]], []).append(index)
        routes = []
        for bucket, indices in sorted(members.items()):
            chosen = [slots[index] for index in indices]
            selection = UpdateSelection(indices, chosen, len(slots))
            routes.append((bucket, self._label(chosen), selection))
        self._routes = slots, routes
        return routes

    def _label(self, slots: Sequence[Slot]) -> str:
        first = self._host.slot_name(slots[0])
        if len(slots) == 1:
            return first
        return f"{first} .. {self._host.slot_name(slots[-1])} ({len(slots)} parameters)"

    def _ahead(self) -> int:
        """Downloads that are started before the bucket at hand is stepped."""
        return 1 if self.settings.pipelined else 0

    def _step_in_place(
        self, steps: Sequence[BucketStep], grad_norm: float | None, gradients: Any
    ) -> None:
        """Step bucket by bucket; ``gradients`` is the mark at which they are complete."""
        started = 0
        for done, step in enumerate(steps):
            for coming in steps[started : done + 1 + self._ahead()]:
                coming.start(gradients)
                started += 1
            self._wait(step)
            self.beside(done / len(steps))
            self._run_rule(step, grad_norm, done, len(steps))
            with self.timeline.stage("publish", step.label):
                step.upload()
        self.beside(1.0)

    def _run_rule(
        self, step: BucketStep, grad_norm: float | None, done: int, count: int
    ) -> None:
        """Step the bucket, of ``count``, before which ``done`` were stepped."""
        with self.timeline.stage("host_step", step.label):
            self._host.step_slots(step.staged, grad_norm=grad_norm)

    def _wait(self, step: BucketStep) -> None:
        if not step.is_here:
            with self.timeline.stage(WAIT_COPIES):
                self.transfer.wait(step.ticket)

    # -- what it says of itself -------------------------------------------------------------------

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        transfer = self.transfer
        copy = transfer.empty_host(tensor.nbytes, True).view(tensor.dtype)
        ticket = transfer.download([copy], [tensor])

        def value() -> Tensor:
            transfer.wait(ticket)
            return copy

        return value

    def notes(self) -> tuple[str, ...]:
        return self.transfer.notes()

    def metrics(self) -> dict[str, float]:
        return self.timeline.metrics()
