"""One bucket's work during backward: gradients come down, are measured and, if that is speculated
on, stepped.

A result is used only where what it was made from is what the step would use: the same gradients,
settings, step numbers, main params and moments. So whatever happens between backward and
``step()``, the worst is work done twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mp_optim.placement.arena import HostArena
from mp_optim.placement.double_buffer import DoubleBuffer, Key
from mp_optim.placement.grad_hooks import GradVersion
from mp_optim.placement.pipeline import staging_bytes
from mp_optim.placement.timeline import WAIT_COPIES, StepTimeline
from mp_optim.placement.transfer import CopyPair, Transfer
from mp_optim.slots import CachedTensorList, Slot, SlotUpdate, all_same
from mp_optim.update.kernel_args import MAIN
from mp_optim.update.rule import PlannedLaunch, RuleOptimizer

__all__ = ["BackwardJob", "Bucket", "Halves", "HostArithmetic"]


@dataclass(frozen=True)
class Halves:
    """A launch, and the same launch with the other halves of what it steps.

    Attributes:
        planned: as the step would carry it out in place.
        target: on the other halves.
        keys: of all their tensors.
        versions: how often each present tensor had been written.
    """

    planned: PlannedLaunch
    target: PlannedLaunch
    keys: list[Key]
    versions: list[int]

    def stands(self, now: PlannedLaunch) -> bool:
        """Whether carrying out ``now`` would give what :attr:`target` gave."""
        then = self.planned
        return (
            then.group == now.group
            and then.positions == now.positions
            and then.launch == now.launch
            and then.settings == now.settings
            and list(then.updates.streams) == list(now.updates.streams)
            and list(then.updates.shard_groups) == list(now.updates.shard_groups)
            and list(then.updates.layouts) == list(now.updates.layouts)
            and all_same(_stepped(then), _stepped(now))
            and self.versions == _versions(now)
        )


def _stepped(planned: PlannedLaunch) -> list[Tensor]:
    """Main params and moments of a launch."""
    return [
        *planned.lists.main,
        *(tensor for tensors in planned.lists.state.values() for tensor in tensors),
    ]


def _versions(planned: PlannedLaunch) -> list[int]:
    return [tensor._version for tensor in _stepped(planned)]


def _keys(planned: PlannedLaunch) -> list[Key]:
    return [
        (planned.group, position, name)
        for name in (MAIN, *planned.lists.state)
        for position in planned.positions
    ]


class BackwardJob:
    """A job for the worker (see :class:`~mp_optim.placement.worker.Job`).

    Attributes:
        stamps: the gradients it was given, by slot.
        staged: the updates with gradients and outputs on the host.
        halves: what it steps; empty if it only copies and measures.
        sums: sum of squares of each gradient, FP64, when it is done.
        stepped: the other halves hold the step.
        void: nobody wants the result.
    """

    def __init__(
        self,
        bucket: Bucket,
        updates: Sequence[SlotUpdate],
        staged: list[SlotUpdate],
        stamps: dict[Slot, GradVersion],
        halves: list[Halves],
        label: str,
        host: HostArithmetic,
    ) -> None:
        self.owner: Bucket = bucket
        self.label = label
        self.staged, self.stamps, self.halves = staged, stamps, halves
        self.sums: list[float] | None = None
        self.stepped = self.void = False
        self._host = host
        self._pairs: list[CopyPair] = [
            (mine.grad, theirs.grad) for mine, theirs in zip(staged, updates, strict=True)
        ]
        self._after = bucket.transfer.mark()
        self._ticket: Any = None

    def prepare(self) -> None:
        if not self.void:
            self.owner.wait_until_free()
            self._ticket = self.owner.transfer.download(self._pairs, after=self._after)

    @torch.no_grad()
    def run(self) -> None:
        pairs, self._pairs, self._after = self._pairs, [], None
        if self.void:
            return
        with self._host.stages.stage(WAIT_COPIES, self.label):
            self.owner.transfer.wait(self._ticket)
        del pairs  # the gradients are the caller's again
        with self._host.stages.stage("host_measure", self.label):
            sums: list[float] = self._host.sum_of_squares(
                [update.grad for update in self.staged]
            ).tolist()
        if self.halves and all(map(math.isfinite, sums)):
            self._host.step_other_halves(self.halves, self.label)
            self.stepped = True
        self.sums = sums

    def was_written_to(self, updates: Sequence[SlotUpdate], arrivals: Mapping[Slot, int]) -> bool:
        """Whether a job that is done is of no use for these updates, though no other gradient has
        arrived since."""
        stamped = [
            (self.stamps[update.slot], update.slot)
            for update in updates
            if update.slot in self.stamps
        ]
        return self.sums is not None and all(
            stamp.arrivals == arrivals[slot] for stamp, slot in stamped
        )


class HostArithmetic:
    """What computes on the host: the rule, if it is one of this package's, and sums of squares."""

    def __init__(
        self, rule: Any, stages: StepTimeline, sum_of_squares: Callable[[Sequence[Tensor]], Tensor]
    ) -> None:
        self.rule = rule if isinstance(rule, RuleOptimizer) else None
        self.stages = stages
        self.sum_of_squares = sum_of_squares

    def step_other_halves(self, halves: Sequence[Halves], label: str) -> None:
        """Carry out launches on the other halves. Nothing that is in use is written."""
        assert self.rule is not None
        with self.stages.stage("host_step", label):
            for half in halves:
                self.rule.carry_out(half.target)


class Bucket:
    """Some host slots, their staging memory and their other halves: one of them for all time, with
    one user at a time.

    Attributes:
        slots: of the host's optimizer.
        expected: those whose gradients are waited for before the bucket is handed to the worker.
        waiting: gradients that arrived since.
        job: what the worker was last given, if it may still be of use.
    """

    def __init__(
        self, slots: Sequence[Slot], transfer: Transfer, *, pin_staging: bool, pin_mains: bool
    ) -> None:
        self.slots = tuple(slots)
        self.transfer = transfer
        self.expected = frozenset(slots)
        self.waiting: dict[Slot, SlotUpdate] = {}
        self.job: BackwardJob | None = None
        self._pin = pin_staging
        self._arena = HostArena(transfer, 0, pin_staging)
        self.buffer = DoubleBuffer(transfer, pin_mains)
        self._upload: Any = None

    @property
    def staging_bytes(self) -> int:
        """Host bytes for gradients and outputs."""
        return self._arena.capacity

    def stage(self, updates: Sequence[SlotUpdate]) -> list[SlotUpdate]:
        """The updates with staging memory in place of gradients and outputs; nothing is copied."""
        if (needed := sum(map(staging_bytes, updates))) > self._arena.capacity:
            self._arena = HostArena(self.transfer, needed, self._pin)
        self._arena.reset()
        take = self._arena.take
        return [
            update._replace(
                grad=take(update.grad.shape, update.grad.dtype),
                output=None
                if update.output is None
                else take(update.output.shape, update.output.dtype),
            )
            for update in updates
        ]

    def wait_until_free(self) -> None:
        """Wait until nothing is read from the staging memory any more."""
        if self._upload is not None:
            self.transfer.wait(self._upload)
            self._upload = None

    def download(self, updates: Sequence[SlotUpdate], staged: Sequence[SlotUpdate]) -> Any:
        """Start the copies of gradients; returns the ticket."""
        self.wait_until_free()
        return self.transfer.download(
            [(mine.grad, theirs.grad) for mine, theirs in zip(staged, updates, strict=True)]
        )

    def upload(self, updates: Sequence[SlotUpdate], staged: Sequence[SlotUpdate]) -> None:
        """Start the copies of parameters."""
        pairs: list[CopyPair] = [
            (theirs.output, mine.output)
            for mine, theirs in zip(staged, updates, strict=True)
            if mine.output is not None and theirs.output is not None
        ]
        self._upload = self.transfer.upload(pairs)

    def halves(self, launches: Sequence[PlannedLaunch]) -> list[Halves]:
        """Launches with their other halves; empty if a tensor is not contiguous and would be
        stepped as a copy."""
        if any(p.mains is not p.lists.main or p.outputs is not p.lists.output for p in launches):
            return []
        self.buffer.reserve(
            [key for planned in launches for key in _keys(planned)],
            [tensor for planned in launches for tensor in _stepped(planned)],
        )
        return [self._half(planned) for planned in launches]

    def _half(self, planned: PlannedLaunch) -> Halves:
        keys, live = _keys(planned), _stepped(planned)
        others, count = self.buffer.others(keys, live), len(planned.positions)
        main = CachedTensorList(others[:count])
        state: dict[str, list[Tensor]] = {
            name: CachedTensorList(others[count * at : count * (at + 1)])
            for at, name in enumerate(planned.lists.state, start=1)
        }
        present = {MAIN: planned.lists.main, **planned.lists.state}
        target = planned._replace(
            mains=main, lists=replace(planned.lists, main=main, state=state, source=present)
        )
        return Halves(planned, target, keys, [tensor._version for tensor in live])
