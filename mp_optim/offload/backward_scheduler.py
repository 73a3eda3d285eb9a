"""The schedule of offloaded slots: work that backward begins, results that ``step()`` uses, and
work that it repeats.

With ``offload_mode="sync"`` backward begins nothing. With ``overlap`` gradients are copied to the
host and measured. With ``speculative`` they are also stepped into a back buffer, as if the step
were neither clipped nor skipped.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.config.setting_checks import RefusedSettings
from mp_optim.core import Slot, SlotUpdates
from mp_optim.host.calls import in_own_modes, warn
from mp_optim.host.transfer import fetch
from mp_optim.kernels import choose_backend
from mp_optim.kernels.kernel_args import fp32
from mp_optim.offload.backward_grads import BackwardGrads, GradSource, ReleasableGrad
from mp_optim.offload.backward_jobs import BackwardBucket, BackwardJob, ReleasedGrads
from mp_optim.offload.buckets import BucketStep, Staging
from mp_optim.offload.double_buffer import BackLaunch
from mp_optim.offload.host_part import HostPart
from mp_optim.offload.timeline import WAIT_WORKER
from mp_optim.offload.worker import Worker, WorkerError
from mp_optim.rules.rule import Launch

_HOST = torch.device("cpu")


class Phase(enum.Enum):
    """The phases of an iteration, from the end of one step to the end of the next.

    BACKWARD begins with the first gradient, which fixes the predicted multiplier and whether jobs
    step ahead. COLLECTED begins when the worker is drained: staging memory and back buffers belong
    to the caller until the step ends. A further gradient leads back to BACKWARD.
    """

    IDLE, BACKWARD, COLLECTED = enum.auto(), enum.auto(), enum.auto()


class CollectedGrads(NamedTuple):
    """Results of backward that a step starts from.

    Attributes:
        held: gradients that left their parameters and are in host memory, by slot.
        sums: sums of squares of gradients that the worker measured and that did not change, by
            slot.
    """

    held: Mapping[Slot, Tensor]
    sums: Mapping[Slot, float]


class BackwardScheduler:
    """Begins work on offloaded slots during backward; with ``sync`` none.

    Args:
        host_part: the slots, and their buckets and windows.
        bind_tensors: updates the executor's tensors to the present ones.
        source: the optimizer that takes the step.

    Attributes:
        worker: the worker thread.
        buckets: buckets that backward may begin, in the order in which their gradients are
            expected.
        counts: numbers of buckets that were published as speculated, of buckets that were stepped
            again, of steps in which speculation paused, and of buckets whose gradients changed
            after backward.
        released: gradients of which the host has the only copy.
        grads: reports gradients as they arrive, and compares them with those of jobs.
        is_last_microbatch: True if arriving gradients are complete.
        phase: phase of this iteration.
        speculates: True, except when idle, if gradients are stepped as soon as they are on the
            host.
    """

    def __init__(
        self, host_part: HostPart, bind_tensors: Callable[[], object], source: GradSource
    ) -> None:
        settings = host_part.settings
        self.mode, self.runs_in_backward = host_part.how.mode, host_part.how.runs_in_backward
        self.counts = Counter(
            speculation_hits=0, speculation_redone=0, speculation_paused=0, speculation_stale=0
        )
        self.worker = Worker("mp_optim-host", settings.set_up)
        self.released = ReleasedGrads(self.worker)
        self.buckets: list[BackwardBucket] = []
        self.is_last_microbatch = True
        self.grads = BackwardGrads(source, host_part.place_of, self.on_grad_ready)
        self.phase, self.speculates = Phase.IDLE, False
        self._multiplier = 1.0  # the predicted multiplier; None when idle
        self._expected: Callable[[], Tensor] | None = None
        self._host_part, self._speculation = host_part, host_part.speculation
        self._executor, self._bind_tensors = host_part.executor, bind_tensors
        self._timeline = settings.timeline
        self._reporting = threading.Lock()
        self._bucket_of: dict[Slot, BackwardBucket] = {}
        self._failure: WorkerError | None = None

    def expect_multiplier(self, inverse_scale: Tensor) -> None:
        """Predict from now on that gradients are multiplied with this inverse loss scale, shape
        (1,) FP32, on the host in the next backward."""
        self._expected = fetch(self._transfer, inverse_scale)

    def _predicted_multiplier(self) -> float:
        """Return the multiplier of gradients in FP32 if nothing is clipped or skipped."""
        return 1.0 if self._expected is None else fp32(float(self._expected()))

    def use_buckets(self) -> None:
        """Have the buckets that the host part has now. Nothing may be begun."""
        host_part, settings = self._host_part, self._host_part.settings
        self._transfer = settings.transfer
        self.buckets, largest = [], 0
        if self.runs_in_backward and (buckets := host_part.buckets) is not None:
            indices = range(len(buckets.members))
            self.buckets = [BackwardBucket(buckets, at, host_part.comes_down) for at in indices]
            for staging in buckets.staging:
                largest = max(largest, staging.capacity // (1 + buckets.has_outputs))
        self._bucket_of = {slot: bucket for bucket in self.buckets for slot in bucket.slots}
        if self.runs_in_backward:
            self.grads.places_changed()
        make = partial(Staging, settings.transfer, largest, settings.pin_staging)
        self.released.landings = [(make(), None), (make(), None)]
        self.released.previous = None

    # -- during backward --------------------------------------------------------------------------

    @in_own_modes
    def on_grad_ready(self, slot: Slot, grad: Tensor, claim: ReleasableGrad | None) -> None:
        """A gradient is complete; the step will be given the same one, or its copy on the host if
        it is released. Never raises: :meth:`collect` reports errors.

        Args:
            grad: the local gradient.
            claim: the gradient, if it may be released.
        """
        if not self.runs_in_backward:
            return
        # NOTE: backward has a thread for each device that has parameters, and one for the CPU.
        with self._reporting:
            self.grads.count(slot)
            self._take(slot, grad, claim)

    def _take(self, slot: Slot, grad: Tensor, claim: ReleasableGrad | None) -> None:
        if self.phase is Phase.COLLECTED:
            self.phase = Phase.BACKWARD
        if (bucket := self._bucket_of.get(slot)) is None:
            self._try((slot,), lambda: None)  # the first gradient of an iteration
            return
        if bucket.job is not None and slot in bucket.job.versions:
            # a further micro-batch makes the job's result stale, but the worker still uses its
            # memory
            bucket.job.is_cancelled = True
            bucket.job = None
        if self._failure is not None:
            return
        if not (self.is_last_microbatch or self._host_part.releases):
            return
        if not (self._host_part.releases or bucket.comes_down):
            self._try((slot,), lambda: None)
            return
        released = self.released
        if slot in released.held and slot in released.claims and slot in bucket.waiting:
            # one gradient is added to the copy later; further ones are added in order
            self._try(bucket.slots, partial(self._begin, bucket))
        if self._host_part.releases:
            released.claim(slot, grad, claim)
        bucket.waiting[slot] = grad
        if bucket.waiting.keys() >= bucket.expected:
            self._try(bucket.slots, partial(self._begin_up_to, bucket))

    def _try(self, slots: Sequence[Slot], begin: Callable[[], None]) -> None:
        """Begin work on some slots. An error is kept for :meth:`collect`."""
        try:
            self._begin_iteration()
            begin()
        except RefusedSettings:
            return  # the step raises the same error, before anything is stepped
        except WorkerError as error:
            self._failure = error
        except Exception as error:
            if not self._host_part.releases and self._settings_are_refused():
                return  # they arrived after the first micro-batch
            what = f"{self._host_part.label(slots)}: work on the host"
            self._failure = _not_begun(what, error)

    def _settings_are_refused(self) -> bool:
        """Whether those that work would have been begun with cannot be, or those of now."""
        try:
            self._executor.check_groups()
            self.grads.source.share_settings()
            self._executor.check_groups()
        except RefusedSettings:
            return True
        return False

    def _begin_up_to(self, bucket: BackwardBucket) -> None:
        """Hand a complete bucket to the worker, and before it those that backward has left behind:
        they lack gradients that will not come."""
        for earlier in self.buckets[: max(0, bucket.index - 1)]:
            if earlier.waiting and earlier.job is None:
                self._begin(earlier)
        self._begin(bucket)

    def _begin_iteration(self) -> None:
        """Fix settings and the predicted multiplier at the first gradient of an iteration."""
        if self.phase is not Phase.IDLE:
            return
        self.grads.source.share_settings()
        self._executor.check_groups()
        self._bind_tensors()
        self._multiplier = self._predicted_multiplier()
        self.phase = Phase.BACKWARD
        self.speculates = self._speculation is not None and self._speculation.is_on

    def _begin(self, bucket: BackwardBucket) -> None:
        """Submit the arrived gradients of a bucket to the worker, or those that can be released,
        and release them."""
        releases, released = self._host_part.releases, self.released
        if releases:
            grads = released.take_from(bucket)
        else:
            grads, bucket.waiting = dict(sorted(bucket.waiting.items())), {}
        updates = self.grads.source.updates(grads, self._multiplier)
        if not updates:
            return
        # NOTE: a cancelled job of this bucket may still run, and write to the same staging memory.
        # Nothing is written here; jobs of one bucket run one after the other.
        destination = (
            released.destination_for(updates, bucket)
            if releases
            else bucket.destination_for(updates)
        )
        launches: Sequence[BackLaunch] = ()
        goes_ahead = self.speculates and destination.in_place and self.is_last_microbatch
        if self._speculation is not None and goes_ahead:
            launches = self._speculation.predicted(bucket.index, destination.staged)
        # On an accelerator the host cannot compare its copy with the gradient at the step.
        with_bits = not (releases or self._transfer.is_same_place)
        is_whole = len(updates) == len(bucket.slots)
        job = BackwardJob(
            bucket.label if is_whole else self._host_part.label(updates.slots),
            destination.memory,
            updates,
            destination.staged,
            self.grads.versions(updates, with_bits),
            launches,
            choose_backend(self.grads.source.fused_backend, _HOST)[0].sum_of_squares,
            self._timeline,
            self.is_last_microbatch,
            releases or len(launches) > 0 or any(grad.is_cpu for grad in grads.values()),
            destination.landing,
            releases,
            None if self._speculation is None else self._speculation.run,
        )
        if releases:
            released.begin(job)
        bucket.job, bucket.is_trusted = job, True
        self.worker.submit(job)
        if releases:
            released.release(updates.slots, destination.staged.grads)

    # -- between backward and step ----------------------------------------------------------------

    def collect(self) -> CollectedGrads:
        """Wait for the work begun during backward, and return its results. The step's time begins
        here.

        NOTE: the caller waits for the worker. The wait cannot be later: the verdict reads the sums
        of the jobs, and the worker owns staging memory and back buffers until it is drained. It is
        not earlier, so that backward hides as much as possible.

        Raises:
            WorkerError: the work failed. All of it is dropped; nothing was stepped.
        """
        if (file := self._host_part.settings.state_file) is not None:
            file.check_owner()
        self._timeline.begin_step()
        if not self.runs_in_backward:
            return CollectedGrads({}, {})
        self.grads.update_hooks()
        try:
            if self.released.lost:
                raise WorkerError(self.released.lost)
            if self.phase is not Phase.COLLECTED:
                self._finish_jobs()
        except WorkerError as error:
            self.released.lose(error)
            self.discard()
            if self.released.lost:
                raise WorkerError(self.released.lost) from error
            raise
        if self.phase is Phase.BACKWARD:
            self.phase = Phase.COLLECTED
        return CollectedGrads(self.released.held, dict(self._sums()))

    def _sums(self) -> Iterator[tuple[Slot, float]]:
        """Yield the sums of squares that hold for the gradients as they are now."""
        self.grads.forget_comparisons()
        for job in [bucket.job for bucket in self.buckets if bucket.job is not None]:
            compares = self._transfer.is_same_place and not job.releases
            grad_of = self.released.held.get if job.releases else self.grads.present
            rows = zip(job.versions.items(), job.sums or (), job.staged.grads, strict=False)
            for (slot, version), value, staged in rows:
                grad = grad_of(slot)
                if grad is None or not grad.is_cpu:
                    continue  # an accelerator measures its gradients itself
                if self.grads.is_same(slot, version, grad, staged if compares else None):
                    yield slot, value

    def _finish_jobs(self) -> None:
        """Finish all jobs, and add the last gradients to the held copies."""
        if self._host_part.releases:
            for bucket in filter(self.released.has_held, self.buckets):
                self._try(bucket.slots, partial(self._begin, bucket))
        if self._failure is not None:
            raise self._failure
        with self._timeline.stage(WAIT_WORKER):
            self.worker.drain()
        if self._host_part.releases:
            self.released.finish()
            for bucket in self.buckets:
                if bucket.job is not None:
                    bucket.job.track_copies()

    def distrust(self, slot: Slot) -> None:
        """Discard comparisons of a slot, because a caller gets its live tensors and may write to
        them."""
        if (file := self._host_part.settings.state_file) is not None:
            file.exposed()
        if (bucket := self._bucket_of.get(slot)) is not None:
            bucket.is_trusted = False

    def forget_released(self) -> None:
        """Released gradients are of no use any more."""
        released = self.released
        if not (released.held or released.claims or released.lost):
            return
        released.forget()
        for bucket in self.buckets:
            bucket.staging.is_kept = False
        if self.phase is not Phase.IDLE or self._failure is not None:
            self.discard()

    def stop(self) -> None:
        """Discard all work and remove the hooks: nothing is begun any more."""
        self.discard()
        self.grads.stop()

    def discard(self) -> None:
        """Discard the work begun during backward; the step does it again."""
        if self.released.held:
            try:
                self._finish_jobs()
            except WorkerError as error:
                self.released.lose(error)
        self.worker.discard()
        self._failure = None
        self.end_iteration()
        self._timeline.end_step()

    def skip(self) -> None:
        """Discard the work of backward because the step is skipped. No prediction covers a skip."""
        if self._speculation is not None:
            self.counts["speculation_paused"] += self._speculation.record(False)
        self.end_iteration()
        self._timeline.end_step()

    def check_prediction(self, updates: SlotUpdates) -> None:
        """Take note of whether the step was the one that was predicted."""
        if self._speculation is None or not updates:
            return
        is_known = self.phase is not Phase.IDLE
        predicted = self._multiplier if is_known else self._predicted_multiplier()
        was_right = set(updates.multipliers) == {predicted}
        self.counts["speculation_paused"] += self._speculation.record(was_right)

    def end_iteration(self) -> None:
        """Forget the work of this backward. The worker must be drained."""
        for bucket in self.buckets:
            bucket.waiting, bucket.job = {}, None
        self.grads.forget_comparisons()
        self.phase, self.speculates = Phase.IDLE, False

    # -- in step ----------------------------------------------------------------------------------

    def judge(self, steps: Sequence[BucketStep]) -> None:
        """Find out what of the steps of the host's buckets came down during backward, and is the
        same."""
        if not self.runs_in_backward:
            return
        stale = 0
        for step in steps:
            bucket = self.buckets[step.bucket]
            bucket.expected = frozenset(step.updates.slots)
            if self.released.held:
                step.downloaded = self.released.put_in_place(step.updates, step.staged)
            job = self._job_of(bucket)
            # Where its tensors did not fit these updates, others were made just now.
            if job is None or job.staged.grads is not step.staged.grads:
                continue
            compares = self._transfer.is_same_place and not job.releases
            staged = job.staged.grads if compares else None
            step.is_downloaded = self.grads.are_same(job.versions, step.updates, staged)
            if not (step.is_downloaded or job.releases):
                stale += self.grads.are_complete(job.versions, step.updates)
        if stale:
            self._count_changed(stale)

    def gradients_on_host(
        self, routes: Iterable[tuple[BackwardBucket, SlotUpdates]]
    ) -> dict[Slot, Tensor]:
        """Return gradients that windows find in host memory: released ones, and unchanged copies.

        Args:
            routes: the step's updates by bucket.
        """
        found: dict[Slot, Tensor] = {}
        for bucket, updates in routes:
            bucket.expected = frozenset(updates.slots)
            for slot, grad in zip(updates.slots, updates.grads, strict=True):
                if self.released.is_held(slot, grad):
                    found[slot] = grad
            job = self._job_of(bucket)
            # Gradients in host memory are read in place at the step, so any write counts.
            is_copied = job is not None and not (job.releases or self._transfer.is_same_place)
            if job is not None and is_copied and self.grads.are_same(job.versions, updates, None):
                found.update(zip(updates.slots, job.staged.grads, strict=True))
        return found

    def _job_of(self, bucket: BackwardBucket) -> BackwardJob | None:
        job = bucket.job
        return None if job is None or not job.is_done else job

    def hits(
        self, steps: Sequence[BucketStep], planned: Mapping[int, Sequence[Launch]]
    ) -> set[int]:
        """Return the buckets whose back buffers hold this step. Count them, and the buckets that
        were stepped from the same gradients to another result."""
        found = set()
        for step in steps:
            bucket = self.buckets[step.bucket]
            if (job := bucket.job) is None or not (job.stepped and step.is_downloaded):
                continue
            now = planned[step.bucket]
            is_same = len(job.back) == len(now) and all(map(BackLaunch.gives, job.back, now))
            is_hit = bucket.is_trusted and is_same
            self.counts["speculation_hits" if is_hit else "speculation_redone"] += 1
            if is_hit:
                found.add(step.bucket)
        return found

    def _count_changed(self, changed: int) -> None:
        """Count buckets whose gradients changed after the worker used them, and warn the first
        time."""
        self.counts["speculation_stale"] += changed
        if self.counts["speculation_stale"] == changed:
            warn(
                f"offload_mode={self.mode!r}: gradients changed after backward, so step() "
                "repeats the work of backward on them. If clip_grad_norm_ did it, clip with "
                "OptimizerConfig.clip_grad (HF Trainer: max_grad_norm=0; Lightning: "
                "gradient_clip_val=None). metrics()['speculation_stale'] counts the buckets"
            )


def _not_begun(what: str, error: Exception) -> WorkerError:
    failure = WorkerError(
        f"{what} during backward could not be begun: {error!r}. The optimizer is as it was before "
        "this step"
    )
    failure.__cause__ = error
    return failure
