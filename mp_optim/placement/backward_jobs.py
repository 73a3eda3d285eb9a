"""One bucket's work during backward: gradients come down, are measured and, if that is speculated
on, stepped into the back buffer.

A result is used only where what it was made from is what the step would use: the same gradients,
settings, step numbers, main params and moments. So whatever happens between backward and
``step()``, the worst is work done twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.placement.double_buffer import BackLaunch
from mp_optim.placement.grad_hooks import GradVersion
from mp_optim.placement.staging import StagedTensors, Staging
from mp_optim.placement.timeline import WAIT_COPIES, StepTimeline
from mp_optim.slots import Slot, SlotUpdate, SlotUpdates

__all__ = ["BackwardJob", "Bucket", "JobResult", "MemoryOwner"]


class MemoryOwner(Enum):
    """Who may touch a bucket's staging memory and its back buffer.

    NOBODY: what is in them means nothing. Uploads of the last step may still read the staging.
    WORKER: a job was submitted, which fills both; nobody else reads or writes them, cancelled or
        not, before the worker is drained.
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


class BackwardJob:
    """A job for the worker (see :class:`~mp_optim.placement.worker.Job`).

    NOTE: the caller's thread makes it and may cancel it; the worker's runs it, and writes
    :attr:`result` once, as its last deed. The caller reads that after the worker was drained.

    Attributes:
        versions: the gradients it was given, by slot.
        tensors: where it puts them.
        back: launches into the back buffer; empty if it only copies and measures.
    """

    def __init__(
        self,
        staging: Staging,
        updates: SlotUpdates,
        tensors: StagedTensors,
        versions: dict[Slot, GradVersion],
        back: Sequence[BackLaunch],
        label: str,
        sum_of_squares: Callable[[Sequence[Tensor]], Tensor],
        timeline: StepTimeline,
    ) -> None:
        self.owner: Staging = staging
        self.label = label
        self.tensors, self.versions, self.back = tensors, versions, back
        self.result: JobResult | None = None
        self._is_cancelled = False
        self._grads: Sequence[Tensor] = updates.grads
        self._after = staging.transfer.mark()
        self._ticket: Any = None
        self._sum_of_squares, self._timeline = sum_of_squares, timeline

    def cancel(self) -> None:
        """The result is not wanted any more. From the caller's thread, at any time."""
        self._is_cancelled = True

    def prepare(self) -> None:
        if not self._is_cancelled:
            self._ticket = self.owner.download(self._grads, self.tensors.grads, self._after)

    @torch.no_grad()
    def run(self) -> None:
        grads, self._grads, self._after = self._grads, [], None
        if self._is_cancelled:
            return
        with self._timeline.stage(WAIT_COPIES, self.label):
            self.owner.transfer.wait(self._ticket)
        del grads  # they are the caller's again
        with self._timeline.stage("host_measure", self.label):
            sums: list[float] = self._sum_of_squares(self.tensors.grads).tolist()
        steps = len(self.back) > 0 and all(map(math.isfinite, sums))
        if steps:
            with self._timeline.stage("host_step", self.label):
                for launch in self.back:
                    launch.run()
        self.result = JobResult(sums, steps)


class Bucket:
    """Some host slots, and what was begun on them during this backward. Used by the caller's thread
    alone; what the worker gets is a :class:`BackwardJob`.

    Attributes:
        slots: of the host's optimizer.
        waiting: gradients that got ready since the last job.
        job: what the worker was last given, if it may still be of use.
        owner: whose its memory is.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.waiting: dict[Slot, SlotUpdate] = {}
        self.job: BackwardJob | None = None
        self.owner = MemoryOwner.NOBODY
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
        updates = sorted(self.waiting.values(), key=_by_slot)
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
        return self.owner is MemoryOwner.CALLER and self._is_trusted and self.was_stepped

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


def _by_slot(update: SlotUpdate) -> Slot:
    return update.slot
