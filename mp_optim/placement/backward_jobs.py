"""One bucket's work during backward: gradients come down, are measured and, if that is speculated
on, stepped into the back buffer.

A result is used only where what it was made from is what the step would use: the same gradients,
settings, step numbers, main params and moments. So whatever happens between backward and
``step()``, the worst is work done twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.placement.double_buffer import BackLaunch
from mp_optim.placement.grad_hooks import GradVersion
from mp_optim.placement.staging import Staging
from mp_optim.placement.timeline import WAIT_COPIES, StepTimeline
from mp_optim.slots import Slot, SlotUpdate, SlotUpdates


class MemoryOwner(Enum):
    """Who may touch a bucket's staging memory and its back buffer.

    NOBODY: what is in them means nothing. Uploads of the last step may still read the staging.
    WORKER: a job was handed over, which fills both; the caller neither reads nor writes them,
        cancelled or not, before the worker is drained.
    CALLER: the worker is done; what it left is there until the step ends.
    """

    NOBODY = "nobody"
    WORKER = "worker"
    CALLER = "caller"


class JobResult(NamedTuple):
    """What a job leaves.

    Attributes:
        sums: sum of squares of each gradient, FP64.
        stepped: the back buffer holds the step.
    """

    sums: list[float]
    stepped: bool


@dataclass(eq=False)
class BackwardJob:
    """A job for the worker (see :class:`~mp_optim.placement.worker.Job`).

    NOTE: the caller's thread makes it and may cancel it; the worker's runs it, and writes
    :attr:`result` once, as its last deed. The caller reads that after the worker was drained.

    Attributes:
        owner: the memory that gradients come down into.
        updates: what it was given, until it is run.
        staged: the same on the host.
        versions: the gradients it was given, by slot.
        back: launches into the back buffer; empty if it only copies and measures.
        measures: whether the gradients are complete; else they are only copied.
        landing: where gradients come down that are added to those of earlier micro-batches, which
            ``staged`` has; None where they are the first.
        releases: ``staged`` is all that will be left of the gradients. Such a job is prepared by
            the caller, and copies and adds even if it is cancelled.
    """

    label: str
    owner: Staging
    updates: SlotUpdates | None
    staged: SlotUpdates
    versions: dict[Slot, GradVersion]
    back: Sequence[BackLaunch]
    sum_of_squares: Callable[[Sequence[Tensor]], Tensor]
    timeline: StepTimeline
    measures: bool = True
    landing: Sequence[Tensor] | None = None
    releases: bool = False
    result: JobResult | None = None

    def __post_init__(self) -> None:
        self._is_cancelled = self._is_prepared = self._gave_up = False
        self._after = self.owner.transfer.mark()
        self._ticket: Any = None

    def cancel(self) -> None:
        """The result is not wanted any more. From the caller's thread, at any time."""
        self._is_cancelled = True

    def prepare(self) -> None:
        if self.releases and self._is_prepared:
            return
        self._is_prepared = True
        if self.updates is not None and (self.releases or not self._is_cancelled):
            to = self.staged.grads if self.landing is None else self.landing
            self._ticket = self.owner.download(self.updates.grads, to, self._after)

    def let_go(self) -> None:
        """Wait until the gradients are down, and let go of them. From the caller's thread, of a job
        that releases them."""
        self.owner.transfer.wait(self._ticket)
        self.updates = None

    def gave_up_grads(self) -> None:
        """The worker was drained: from now on ``versions`` are of what is left of the gradients."""
        if self.releases and not self._gave_up:
            self._gave_up = True
            slots = zip(self.versions.items(), self.staged.grads, strict=True)
            self.versions = {
                slot: GradVersion.of(grad, version.count)
                for (slot, version), grad in slots
            }

    @torch.no_grad()
    def run(self) -> None:
        if self._is_cancelled and not self.releases:
            self.updates = self._after = None
            return
        with self.timeline.stage(WAIT_COPIES, self.label):
            self.owner.transfer.wait(self._ticket)
        if not self.releases:  # else the caller lets go, and knows when they are gone
            self.updates = self._after = None  # its gradients are the caller's again
        if self.landing is not None:
            with self.timeline.stage("host_add", self.label):
                torch._foreach_add_(list(self.staged.grads), list(self.landing))
        if self._is_cancelled or not self.measures:
            return
        with self.timeline.stage("host_measure", self.label):
            sums: list[float] = self.sum_of_squares(self.staged.grads).tolist()
        steps = len(self.back) > 0 and all(map(math.isfinite, sums))
        if steps:
            with self.timeline.stage("host_step", self.label):
                for launch in self.back:
                    launch.run()
        self.result = JobResult(sums, steps)


class Bucket:
    """Some host slots, and what was begun on them during this backward. Used by the caller's thread
    alone; what the worker gets is a :class:`BackwardJob`.

    NOTE: the memory changes hands only here, in the caller's thread: to the worker when a job is
    handed over, back when the worker was drained, to nobody when the step ends. See
    :class:`MemoryOwner` for what each may do.

    Attributes:
        slots: of the host's optimizer.
        waiting: gradients that got ready since the last job.
        job: what the worker was last given, if it may still be of use.
        owner: whose its memory is.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.owner = MemoryOwner.NOBODY
        self.slots = tuple(slots)
        self.waiting: dict[Slot, SlotUpdate] = {}
        self.job: BackwardJob | None = None
        self._is_trusted = True
        self._expected = frozenset(slots)

    def expect(self, slots: Sequence[Slot]) -> None:
        """The next job is due when the gradients of these are ready."""
        self._expected = frozenset(slots)

    def add(self, update: SlotUpdate) -> bool:
        """Take note of a gradient; whether the bucket is complete."""
        self.waiting[update.slot] = update
        return self.waiting.keys() >= self._expected

    def take_waiting(self) -> list[SlotUpdate]:
        """The gradients that are ready, in slot order; they are not waiting any more."""
        updates = [self.waiting[slot] for slot in sorted(self.waiting)]
        self.waiting = {}
        return updates

    @property
    def was_stepped(self) -> bool:
        """Whether the job was done, and stepped into the back buffer."""
        result = None if self.job is None else self.job.result
        return result is not None and result.stepped

    @property
    def holds_step(self) -> bool:
        """Whether the back buffer still holds what the job stepped."""
        return (
            self.owner is MemoryOwner.CALLER and self._is_trusted and self.was_stepped
        )

    def hand_over(self, job: BackwardJob) -> None:
        """The memory is the worker's from now on."""
        self.job, self.owner, self._is_trusted = job, MemoryOwner.WORKER, True

    def cancel(self) -> None:
        """Another gradient came for a slot of the job. Its memory stays the worker's."""
        if self.job is not None:
            self.job.cancel()
            self.job = None

    def take_back(self) -> None:
        """The worker was drained: what the job left, if it was done, is the caller's."""
        if self.owner is MemoryOwner.WORKER:
            is_done = self.job is not None and self.job.result is not None
            self.owner = MemoryOwner.CALLER if is_done else MemoryOwner.NOBODY

    def release(self) -> None:
        """What is in the memory is of no use any more. The worker is drained."""
        self.waiting, self.job, self.owner = {}, None, MemoryOwner.NOBODY

    def distrust(self) -> None:
        """Do not use what the job stepped: main params or moments may be written without a trace,
        or the back buffer will be."""
        self._is_trusted = False
