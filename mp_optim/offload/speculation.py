"""Steps into a back buffer of main params and moments, before clipping and skipping are decided.

Present values stay while a step during backward writes the back buffer. Tensors stay the same
objects: publishing a step gives the tensors the memory of the back buffer, and their former memory
becomes the back buffer. Nothing has to be undone to discard a step.

A speculated step is right if the step is neither clipped nor skipped, so that the multiplier is the
inverse loss scale. A right step saves the whole arithmetic of ``step()``. A wrong step costs
arithmetic that ran next to backward, and one more copy of the state. So speculation saves time even
if fewer than half of the predictions are right, and pauses only if nearly all predictions fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from mp_optim.core import CachedTensorList, Slot, SlotUpdates, all_same, param_at
from mp_optim.core.slot_state import STEP
from mp_optim.host.host_memory import Block, aligned_bytes
from mp_optim.host.leases import give_memory
from mp_optim.host.transfer import Transfer
from mp_optim.kernels.kernel_args import MAIN
from mp_optim.offload.buckets import BucketStep, StepTimeline
from mp_optim.rules.rule import Launch
from mp_optim.rules.rule_executor import RuleExecutor

Key = tuple[int, int, str]
"""Group and position of a slot, and the key of one of its tensors: a key of its state, or
``MAIN``."""


@dataclass(slots=True, eq=False)
class _BufferedTensor:
    """A live tensor, its present memory (``front``), and the back buffer of equal size
    (``back``)."""

    live: Tensor
    front: Tensor
    back: Tensor


@dataclass(frozen=True)
class BackLaunch:
    """A launch that steps in place, and a copy of the launch that steps into the back buffer.

    Attributes:
        planned: the launch as the step would carry it out, in place.
        target: the launch from the present values into the back buffer.
        keys: keys of all tensors that are stepped.
        versions: number of writes of each present tensor when the launch was made.
    """

    planned: Launch
    target: Launch
    keys: list[Key]
    versions: list[int]

    def gives(self, now: Launch) -> bool:
        """True if carrying out ``now`` would give the result of :attr:`target`."""
        then = self.planned
        return (
            _inputs(then) == _inputs(now)
            and all_same(_stepped(then), _stepped(now))
            and self.versions == [tensor._version for tensor in _stepped(now)]
        )


class DoubleBuffer:
    """The back buffer of some slots: one allocation of host memory for main params and one for
    state.

    Args:
        executor: the executor of the slots.
        slots: the slots.
        transfer: the transfer that allocates host memory.
        pin: True to page-lock the memory of main params.

    Attributes:
        blocks: host memory by the key "is a main param": True for main params, False for state.
    """

    def __init__(
        self, executor: RuleExecutor, slots: Sequence[Slot], transfer: Transfer, pin: bool
    ) -> None:
        self._executor, self._slots = executor, slots
        self._transfer, self._pin = transfer, pin
        self.blocks: dict[bool, Block] = {}
        self._buffered: dict[Key, _BufferedTensor] = {}

    def reserve(self) -> tuple[int, int]:
        """Plan host memory for copies of the slots' tensors, unless it is planned already. The
        first use allocates the memory. Return the planned bytes of main params and of state."""
        if not self.blocks:
            sizes = {True: 0, False: 0}
            for slot in self._slots:
                # NOTE: do not call state_of() here. state_of() compares samples of audits, and the
                # worker may still add samples.
                state = self._executor.rows.live_state(slot)
                main = param_at(self._executor.param_groups, slot)
                for key, each in {**state, MAIN: main}.items():
                    if key != STEP:
                        sizes[key == MAIN] += aligned_bytes(each.numel(), each.dtype)
            for is_main, size in sizes.items():
                allocate = partial(self._transfer.empty_host, pin=self._pin and is_main)
                self.blocks[is_main] = Block(size, allocate)
        return self.blocks[True].capacity, self.blocks[False].capacity

    def launches(self, launches: Sequence[Launch]) -> list[BackLaunch]:
        """Return launches into the back buffer. Return none if a launch cannot step into it."""
        if not all(map(_fits, launches)):
            return []
        self.reserve()
        found = []
        for planned in launches:
            lists, count = planned.lists, len(planned.positions)
            names, live = (MAIN, *lists.state), _stepped(planned)
            keys = [(planned.group, where, name) for name in names for where in planned.positions]
            backs = [self._pair(key, each).back for key, each in zip(keys, live, strict=True)]
            main = CachedTensorList(backs[:count])
            state: dict[str, list[Tensor]] = {
                name: CachedTensorList(backs[count * place : count * (place + 1)])
                for place, name in enumerate(lists.state, start=1)
            }
            present = {MAIN: lists.main, **lists.state}
            lists = replace(lists, main=main, state=state, source=present, prepared=None)
            target = planned._replace(mains=main, lists=lists)
            versions = [tensor._version for tensor in live]
            found.append(BackLaunch(planned, target, keys, versions))
        return found

    def _pair(self, key: Key, live: Tensor) -> _BufferedTensor:
        pair = self._buffered.get(key)
        if pair is not None and pair.live is live:
            front = pair.front.data_ptr(), pair.front.shape
            if front == (live.data_ptr(), live.shape):
                return pair
        form = live.shape, live.dtype
        if pair is not None and (pair.back.shape, pair.back.dtype) == form:
            # The tensor was replaced, but its back buffer is kept. After an interrupted swap the
            # tensor may have either piece of memory, so take the other piece.
            back = pair.front if pair.back.data_ptr() == live.data_ptr() else pair.back
        else:
            memory = self.blocks[key[2] == MAIN]
            back = memory.with_room(aligned_bytes(live.numel(), live.dtype)).take(*form)
        self._buffered[key] = _BufferedTensor(live, live.data, back)
        return self._buffered[key]

    def swap(self, keys: Iterable[Key]) -> None:
        """Exchange the memory of these tensors and of the back buffer."""
        for key in keys:
            pair = self._buffered[key]
            pair.front, pair.back = pair.back, pair.front
            give_memory(pair.live, pair.front)


def _inputs(planned: Launch) -> tuple[object, ...]:
    """Return the inputs of a launch that are not tensors."""
    plan = planned.updates.slots
    columns = map(list, (plan.streams, plan.shard_groups, plan.layouts))
    shared = planned.device, planned.step, planned.multiplier, list(planned.lists.state)
    return planned.group, planned.positions, planned.settings, shared, *columns


def _fits(launch: Launch) -> bool:
    """True if a launch can step into a back buffer.

    A tensor that is not contiguous would be stepped as a copy. A parameter that was cut has smaller
    gradients than main params, and the step refuses it.
    """
    lists = launch.lists
    in_place = launch.mains is lists.main and launch.outputs is lists.output
    sizes = zip(lists.grad, lists.main, strict=True)
    return in_place and all(grad.numel() == main.numel() for grad, main in sizes)


def _stepped(planned: Launch) -> list[Tensor]:
    moments = [tensor for tensors in planned.lists.state.values() for tensor in tensors]
    return [*planned.lists.main, *moments]


# -- steps into back buffers ----------------------------------------------------------------------

WINDOW = 8
"""Number of last verdicts that decide whether speculation pauses."""
_PAUSE_BELOW, _RESUME_AT = 2, 4
"""Numbers of right predictions in the last ``WINDOW`` verdicts. Speculation pauses below the
first number, and resumes from the second number on: verdicts are still compared during a pause."""


class SpeculativeStepper:
    """Steps buckets of offloaded slots into back buffers, and publishes the results.

    Attributes:
        is_on: False while speculation pauses.
        back_buffers: the back buffer of each bucket.
    """

    def __init__(self, executor: RuleExecutor, timeline: StepTimeline) -> None:
        self.is_on = True
        self._executor, self._timeline = executor, timeline
        self.back_buffers: Sequence[DoubleBuffer] = ()
        self._outcomes: deque[bool] = deque(maxlen=WINDOW)

    # -- back buffers -----------------------------------------------------------------------------

    def use_buckets(self, buckets: Sequence[Sequence[Slot]], transfer: Transfer, pin: bool) -> None:
        """Replace the back buffers by one buffer for each of these buckets. No job may be in
        progress."""
        self.back_buffers = [
            DoubleBuffer(self._executor, slots, transfer, pin) for slots in buckets
        ]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of host memory that are allocated for back buffers now."""
        blocks = (block for buffer in self.back_buffers for block in buffer.blocks.values())
        return sum(block.allocated for block in blocks)

    # -- launches ---------------------------------------------------------------------------------

    def predicted(self, bucket: int, staged: SlotUpdates) -> Sequence[BackLaunch]:
        """Return the launches that step a bucket into its back buffer during backward, before the
        step's gradient multiplier is known. Empty if the bucket cannot be stepped during backward.

        Args:
            bucket: index of the bucket.
            staged: updates with the predicted multiplier, whose gradients are on the host.
        """
        if any(map(self._executor.is_collective, staged)):
            return ()
        return self.back_buffers[bucket].launches(self._executor.plan(staged))

    def run(self, launches: Sequence[BackLaunch], label: str) -> None:
        """Step into a back buffer. Live tensors are not written."""
        with self._timeline.stage("host_step", label):
            for launch in launches:
                self._executor.carry_out(launch.target)

    # -- in step ----------------------------------------------------------------------------------

    def fill(
        self,
        steps: Sequence[BucketStep],
        planned: Mapping[int, Sequence[Launch]],
        hits: Mapping[int, Sequence[BackLaunch]],
        mark: Any,
    ) -> dict[int, Sequence[BackLaunch]]:
        """Step every bucket into its back buffer, except the buckets in ``hits``, whose back
        buffers hold this step already. Return the launches of all buckets, also of the buckets
        in ``hits``; empty for a bucket that has to be stepped in place.

        Args:
            steps: the buckets of the step.
            planned: launches of each bucket in this step.
            hits: launches of buckets whose back buffers hold this step already.
            mark: result of ``Transfer.mark()``, taken after the code that computes the gradients
                was queued. Downloads of gradients start after that code has run.

        Raises:
            RuntimeError: a step failed; the optimizer did not change.
        """
        launches = dict(hits)
        for step in steps:
            if step.bucket not in hits:
                back = self.back_buffers[step.bucket]
                launches[step.bucket] = back.launches(planned[step.bucket])
        again = [step for step in steps if step.bucket not in hits and launches[step.bucket]]
        for step in again:
            step.start(mark)
        for step in again:
            try:
                step.wait(self._timeline)
                self.run(launches[step.bucket], step.label)
            except Exception as error:
                raise RuntimeError(
                    f"{step.label}: the step on the host failed: {error!r}. The optimizer did not "
                    "change; call step() again, or continue with the next batch"
                ) from error
        return launches

    def publish(self, step: BucketStep, launches: Sequence[BackLaunch]) -> None:
        """Swap back buffer and live tensors, and upload the parameters."""
        self._executor.step_mark.touch()
        with self._timeline.stage("publish", step.label):
            for launch in launches:
                self.back_buffers[step.bucket].swap(launch.keys)
                group, positions = launch.planned.group, launch.planned.positions
                self._executor.rows.groups[group].replaced(positions)
                self._executor.rows.groups[group].count(positions)
            step.upload()

    def record(self, was_right: bool) -> bool:
        """Record whether the step was the predicted step. Return True if speculation paused in
        this step."""
        paused = not self.is_on
        self._outcomes.append(was_right)
        if len(self._outcomes) == WINDOW:
            self.is_on = sum(self._outcomes) >= (_RESUME_AT if paused else _PAUSE_BELOW)
        return paused
