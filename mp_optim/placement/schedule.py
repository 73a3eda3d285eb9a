"""When host slots do what: what is done during backward, what ``step()`` takes over, and what it
does again.

Every bucket has one owner at any time: the worker from the moment its gradients are there until
``step()`` asks, then the caller of ``step()``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mp_optim.placement.backward_jobs import BackwardJob, Bucket, Halves, HostArithmetic
from mp_optim.placement.buckets import fitting_bucket_bytes, plan_buckets
from mp_optim.placement.grad_hooks import GradVersion
from mp_optim.placement.pipeline import TransferBytes
from mp_optim.placement.speculation import WINDOW, speculates_next, warn_of_written
from mp_optim.placement.timeline import WAIT_COPIES, WAIT_WORKER, StepTimeline
from mp_optim.placement.transfer import Transfer
from mp_optim.placement.worker import Worker, WorkerError
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots import Slot, SlotUpdate
from mp_optim.slots.optimizer import SlotOptimizer
from mp_optim.update import choose_backend

__all__ = ["HostSchedule", "OffloadMode"]

OffloadMode = Literal["sync", "overlap", "speculative"]


@dataclass
class _Piece:
    """One bucket's share of a step."""

    bucket: Bucket
    updates: list[SlotUpdate]
    staged: list[SlotUpdate]
    job: BackwardJob | None
    label: str
    ticket: Any = None
    halves: list[Halves] | None = None


@dataclass(frozen=True)
class _Round:
    """What holds from the first gradient to the end of ``step()``: whether to speculate, on which
    multiplier."""

    speculates: bool
    multiplier: float


class HostSchedule:
    """Steps the host's slots, partly during backward.

    Args:
        host: the host's optimizer.
        slots: its slots with the elements a rank holds of each (the same numbers on all ranks), in
            the order in which their gradients are expected.
        mode: ``overlap`` or ``speculative``.
        pipelined: in ``step()``, start all copies before the arithmetic.
        open_round: called before the first bucket of a round is planned: makes the host's optimizer
            have current tensors and settings.
        touch: called before a step is published (see
            :class:`~mp_optim.slots.interrupted_step.StepMark`).
        set_up: called once in the worker thread.

    Attributes:
        enabled: whether arriving gradients start work; off on all but the last micro-batch.
        settle_settings: called before ``open_round``: brings settings down from whoever holds them.
        predicted: the multiplier that the next verdict will have if nothing is clipped or skipped.
        counts: how many buckets were published as they had been speculated on, how many were
            stepped again, in how many steps speculation paused, and of how many buckets the
            gradients were written after backward.
    """

    def __init__(
        self,
        host: SlotOptimizer,
        slots: Sequence[tuple[Slot, int]],
        transfer: Transfer,
        *,
        mode: OffloadMode,
        stages: StepTimeline,
        bucket_bytes: int,
        pin_staging: bool,
        pin_mains: bool,
        pipelined: bool,
        open_round: Callable[[], None],
        touch: Callable[[], None],
        set_up: Callable[[], None],
    ) -> None:
        self.mode, self.stages, self.transfer = mode, stages, transfer
        self.arithmetic = HostArithmetic(host, stages, _sum_of_squares)
        self.enabled = True
        self.predicted: Callable[[], float] = lambda: 1.0
        self.settle_settings: Callable[[], None] = lambda: None
        self.traffic = TransferBytes()
        self.counts = Counter(
            {
                "speculation_hits": 0,
                "speculation_redone": 0,
                "speculation_paused": 0,
                "speculation_stale": 0,
            }
        )
        self._host = host
        self._bucket_bytes, self._pins, self._pipelined = (
            bucket_bytes,
            (pin_staging, pin_mains),
            pipelined,
        )
        self._open, self._touch = open_round, touch
        self._worker = Worker("mp_optim-host", capacity=64, set_up=set_up)
        self._arrivals: Counter[Slot] = Counter()
        self._order: dict[Slot, None] = {}
        self._knows_order = False
        self._round: _Round | None = None
        self._failure: WorkerError | None = None
        self._speculates = mode == "speculative"
        self._verdicts: deque[bool] = deque(maxlen=WINDOW)
        self._sums: dict[int, tuple[GradVersion, Slot, float]] = {}
        self._buckets: list[Bucket] = []
        self._cut(slots)

    def plan(self, slots: Sequence[tuple[Slot, int]]) -> None:
        """Cut buckets anew, for other slots. Unfinished work is dropped."""
        self.discard()
        self._knows_order = False
        self._cut(slots)

    def _cut(self, slots: Sequence[tuple[Slot, int]]) -> None:
        self._slots = dict(slots)
        sizes = [4 * share for share in self._slots.values()]  # 16-bit gradients and parameters
        plan = plan_buckets(
            list(self._slots), sizes, fitting_bucket_bytes(sum(sizes), self._bucket_bytes)
        )
        pin_staging, pin_mains = self._pins
        self._buckets = [
            Bucket(slots, self.transfer, pin_staging=pin_staging, pin_mains=pin_mains)
            for slots in plan.buckets
        ]
        self._bucket_of = plan.bucket_of

    @property
    def worker(self) -> Worker:
        """The thread."""
        return self._worker

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self._buckets)

    @property
    def staging_bytes(self) -> int:
        """Host bytes for gradients and outputs on their way."""
        return sum(bucket.staging_bytes for bucket in self._buckets)

    @property
    def double_buffer_bytes(self) -> int:
        """Host bytes of the other halves."""
        return sum(bucket.buffer.bytes for bucket in self._buckets)

    # -- during backward ------------------------------------------------------------------------

    @in_own_modes
    def arrived(self, update: SlotUpdate) -> None:
        """A gradient is there. Never raises: what goes wrong is reported by ``step()``.

        Args:
            update: of a slot of the host's optimizer; its multiplier is not used.
        """
        self._arrivals[update.slot] += 1
        bucket = self._buckets[self._bucket_of[update.slot]]
        if (
            bucket.job is not None and update.slot in bucket.job.stamps
        ):  # another micro-batch: what was begun is void
            bucket.job.void, bucket.job = True, None
        if not self.enabled or self._failure is not None:
            return
        self._order.setdefault(update.slot)
        bucket.waiting[update.slot] = update
        try:
            if bucket.waiting.keys() >= bucket.expected:
                self._dispatch_up_to(bucket)
        except WorkerError as error:
            self._failure = error
        except Exception as error:
            self._failure = WorkerError(
                f"{self._label(bucket.slots)}: work on the host during backward could not be "
                f"begun: {error!r}. The optimizer is as it was before this step"
            )
            self._failure.__cause__ = error

    def _dispatch_up_to(self, bucket: Bucket) -> None:
        """Hand a complete bucket to the worker, and before it those that backward has left behind:
        they lack gradients that will not come."""
        at = self._buckets.index(bucket)
        for earlier in self._buckets[: max(0, at - 1)]:
            if earlier.waiting and earlier.job is None:
                self._dispatch(earlier)
        self._dispatch(bucket)

    def _dispatch(self, bucket: Bucket) -> None:
        if self._round is None:
            self.settle_settings()
            self._open()
            self._round = _Round(self._speculates and self._knows_order, self.predicted())
        updates = sorted(
            (u._replace(multiplier=self._round.multiplier) for u in bucket.waiting.values()),
            key=_by_slot,
        )
        bucket.waiting = {}
        stamps = {u.slot: GradVersion.of(u.grad, self._arrivals[u.slot]) for u in updates}
        staged = bucket.stage(updates)
        halves = []
        rule = self.arithmetic.rule
        if self._round.speculates and rule is not None and not any(map(rule.is_collective, staged)):
            halves = bucket.halves(rule.plan(staged))
        bucket.job = BackwardJob(
            bucket, updates, staged, stamps, halves, self._label(list(stamps)), self.arithmetic
        )
        self._worker.submit(bucket.job)

    def _label(self, slots: Sequence[Slot]) -> str:
        names = [self._host.slot_name(slot) for slot in slots]
        return (
            names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} parameters)"
        )

    # -- between backward and step --------------------------------------------------------------

    def finish(self) -> None:
        """Wait until the worker is done.

        Raises:
            WorkerError: its work failed. All of this round's is dropped; nothing was stepped.
        """
        self.stages.begin_step()
        try:
            if self._failure is not None:
                raise self._failure
            with self.stages.stage(WAIT_WORKER):
                self._worker.drain()
        except WorkerError:
            self.discard()
            raise
        jobs = [
            bucket.job
            for bucket in self._buckets
            if bucket.job is not None and bucket.job.sums is not None
        ]
        self._sums = {
            job.stamps[update.slot].address: (job.stamps[update.slot], update.slot, value)
            for job in jobs
            for update, value in zip(job.staged, job.sums or (), strict=True)
        }

    def sum_of_squares(self, grad: Tensor) -> float | None:
        """The sum of squares of a gradient, if it was measured during backward and is the same
        still."""
        stamp, slot, value = self._sums.get(grad.data_ptr(), (None, None, None))
        known = stamp is not None and slot is not None and stamp.matches(grad, self._arrivals[slot])
        return value if known and grad.numel() else None

    def touched(self, slot: Slot) -> None:
        """Somebody got hold of a slot's state, and may write to it without a trace: do not trust
        what was stepped."""
        if (job := self._buckets[self._bucket_of[slot]].job) is not None:
            job.halves = []

    def discard(self) -> None:
        """Drop this round's work. Nothing is lost by it: ``step()`` does all of it again."""
        if not self._worker.discard():  # it is stuck: it keeps the memory it may still write to
            self._cut(list(self._slots.items()))
        self._failure = None
        self._end_round(judged=None)

    def skip(self) -> None:
        """The verdict is to change nothing."""
        self._end_round(judged=False)

    def _end_round(self, judged: bool | None) -> None:
        if judged is not None and self.mode == "speculative":
            self._verdicts.append(judged)
            self.counts["speculation_paused"] += not self._speculates
            self._speculates = speculates_next(self._speculates, self._verdicts)
        for bucket in self._buckets:
            bucket.waiting, bucket.job = {}, None
        self._round, self._sums = None, {}
        self.stages.end_step()

    # -- in step --------------------------------------------------------------------------------

    def step(
        self,
        updates: Sequence[SlotUpdate],
        grad_norm: float | None,
        step_device: Callable[[], None],
    ) -> None:
        """Step the host's slots, and the device's in between; on return uploads are ordered before
        later work there.

        Args:
            updates: with gradients and outputs on the device.
            step_device: steps what does not lie on the host.

        Raises:
            WorkerError: the worker failed; nothing was stepped.
        """
        self.finish()
        self.traffic = TransferBytes(
            down=sum(u.grad.nbytes for u in updates),
            up=sum(u.output.nbytes for u in updates if u.output is not None),
        )
        pieces = self._pieces(updates)
        if self._round is not None and self._round.speculates:
            self._step_other_halves(pieces, grad_norm)
            step_device()
            for piece in pieces:
                self._publish(piece)
        else:
            step_device()
        self._step_in_place([piece for piece in pieces if piece.halves is None], grad_norm)
        self.transfer.join()
        judged = all(u.multiplier == self._predicted_now() for u in updates) if updates else None
        self._learn(updates)
        self._end_round(judged)

    def _pieces(self, updates: Sequence[SlotUpdate]) -> list[_Piece]:
        """The updates by bucket, in the plan's order, with what is already on the host."""
        members: dict[int, list[SlotUpdate]] = {}
        for update in sorted(updates, key=_by_slot):
            members.setdefault(self._bucket_of[update.slot], []).append(update)
        pieces = []
        for index, mine in sorted(members.items()):
            bucket = self._buckets[index]
            job = (
                bucket.job if bucket.job is not None and self._is_fresh(bucket.job, mine) else None
            )
            if (
                job is None
                and bucket.job is not None
                and bucket.job.was_written_to(mine, self._arrivals)
            ):
                self.counts["speculation_stale"] += 1
                warn_of_written(self.mode, self.counts["speculation_stale"])
            staged = (
                bucket.stage(mine)
                if job is None
                else [
                    update._replace(grad=there.grad, output=there.output)
                    for there, update in zip(job.staged, mine, strict=True)
                ]
            )
            pieces.append(
                _Piece(bucket, mine, staged, job, self._label([update.slot for update in mine]))
            )
            bucket.expected = frozenset(update.slot for update in mine)
        return pieces

    def _is_fresh(self, job: BackwardJob, updates: Sequence[SlotUpdate]) -> bool:
        """Whether a job was given just these gradients, as they are now, and writes the outputs
        that are wanted."""
        return (
            job.sums is not None
            and list(job.stamps) == [update.slot for update in updates]
            and all(
                job.stamps[u.slot].matches(u.grad, self._arrivals[u.slot])
                and _output_form(there) == _output_form(u)
                for there, u in zip(job.staged, updates, strict=True)
            )
        )

    def _start(self, pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            if piece.job is None:
                piece.ticket = piece.bucket.download(piece.updates, piece.staged)

    def _await(self, piece: _Piece) -> None:
        if piece.job is None:
            with self.stages.stage(WAIT_COPIES):
                self.transfer.wait(piece.ticket)

    def _step_other_halves(self, pieces: Sequence[_Piece], grad_norm: float | None) -> None:
        """Make every bucket's other halves hold this step, mostly by finding that they do."""
        rule = self.arithmetic.rule
        assert rule is not None
        again = []
        for piece in pieces:
            launches, job = rule.plan(piece.staged, grad_norm), piece.job
            if (
                job is not None
                and job.stepped
                and len(job.halves) == len(launches)
                and all(half.stands(now) for half, now in zip(job.halves, launches, strict=True))
            ):
                piece.halves = job.halves
                self.counts["speculation_hits"] += 1
                continue
            piece.halves = piece.bucket.halves(launches) or None
            self.counts["speculation_redone"] += job is not None and job.stepped
            if piece.halves is not None:
                again.append(piece)
                if job is not None:
                    job.stepped = False  # its result is about to be written over
        self._start(again)
        for piece in again:
            try:
                self._await(piece)
                self.arithmetic.step_other_halves(piece.halves or (), piece.label)
            except Exception as error:
                self.discard()
                raise RuntimeError(
                    f"{piece.label}: the step on the host failed: {error!r}. The optimizer is as "
                    "it was "
                    "before this step"
                ) from error

    def _publish(self, piece: _Piece) -> None:
        """Make the other halves the present ones, and send the parameters up."""
        rule = self.arithmetic.rule
        if piece.halves is None or rule is None:
            return
        self._touch()
        with self.stages.stage("publish", piece.label):
            for half in piece.halves:
                piece.bucket.buffer.flip(half.keys)
                rule.moved(half.planned)
                rule.count(half.planned)
            piece.bucket.upload(piece.updates, piece.staged)

    def _step_in_place(self, pieces: Sequence[_Piece], grad_norm: float | None) -> None:
        if self._pipelined:
            self._start(pieces)
        for at, piece in enumerate(pieces):
            if not self._pipelined:
                self._start([piece])
            self._await(piece)
            try:
                with self.stages.stage("host_step", piece.label):
                    self._host.step_slots(piece.staged, grad_norm=grad_norm)
            except Exception as error:
                self.discard()
                raise RuntimeError(
                    f"{piece.label}: the step on the host failed: {error!r}. {at} of {len(pieces)} "
                    "buckets before it were already stepped: load the last checkpoint"
                ) from error
            with self.stages.stage("publish", piece.label):
                piece.bucket.upload(piece.updates, piece.staged)

    def _predicted_now(self) -> float:
        return self.predicted() if self._round is None else self._round.multiplier

    def _learn(self, updates: Sequence[SlotUpdate]) -> None:
        """After the first backward: cut buckets in the order in which gradients arrived."""
        if self._knows_order or not self._order:
            return
        self._knows_order = True
        order = [*self._order, *(slot for slot in self._slots if slot not in self._order)]
        if order != list(self._slots) and not any(map(_is_split, updates)):
            self._cut([(slot, self._slots[slot]) for slot in order])


def _is_split(update: SlotUpdate) -> bool:
    """Whether other ranks, which may see gradients in another order, hold the rest of a
    parameter."""
    return bool(update.shard_groups) or (
        update.layout is not None and update.layout.splits_matrices
    )


def _output_form(update: SlotUpdate) -> tuple[torch.Size, torch.dtype] | None:
    return None if update.output is None else (update.output.shape, update.output.dtype)


def _by_slot(update: SlotUpdate) -> Slot:
    return update.slot


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    return choose_backend("auto", torch.device("cpu"))[0].sum_of_squares(tensors)
