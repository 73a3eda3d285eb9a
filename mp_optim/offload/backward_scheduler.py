"""Jobs that backward begins on offloaded slots, results of these jobs that ``step()`` uses, and the
worker thread that runs the jobs.

With ``offload_mode="sync"`` backward begins no job. With ``"overlap"`` a gradient passes these
functions:

1. The hook of :class:`~mp_optim.offload.backward_grads.BackwardGrads` passes each final gradient to
   :meth:`BackwardScheduler.on_grad_ready`, which adds the gradient to its bucket.
2. If the bucket is complete, :meth:`BackwardScheduler._begin` makes a
   :class:`~mp_optim.offload.backward_grads.BackwardJob` and submits it to the :class:`Worker`.
3. The worker calls :meth:`BackwardJob.prepare`, which starts the copies to staging memory in the
   gradient's dtype (:meth:`Staging.download`), and :meth:`BackwardJob.run`, which waits for the
   copies. With ``release_gradients`` the caller's thread calls ``prepare``. ``run`` also measures
   gradients that are in host memory, and gradients that leave the device. The device measures all
   other gradients.
4. ``step()`` calls :meth:`BackwardScheduler.collect`, which waits for the worker.
5. :meth:`BackwardScheduler.find_copied` compares gradients with the versions that the job recorded.
   A changed gradient is copied again.
6. :meth:`Stepper._step_in_place` steps each bucket (the kernel converts gradients to FP32).
   :meth:`BucketStep.upload` copies the parameters to the device.

With ``"speculative"`` the worker also measures every gradient, and steps each bucket into a back
buffer, as if the step were neither clipped nor skipped.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.config.setting_checks import RefusedSettings
from mp_optim.core import Slot, SlotUpdates
from mp_optim.core.executor import Executor
from mp_optim.host.calls import DaemonExecutor, in_own_modes, warn
from mp_optim.host.host_share import host_share
from mp_optim.host.transfer import fetch
from mp_optim.kernels import choose_backend
from mp_optim.kernels.kernel_args import fp32
from mp_optim.kernels.native_library import limit_openmp, set_thread_share
from mp_optim.offload.backward_grads import (
    BackwardBucket,
    BackwardGrads,
    BackwardJob,
    GradSource,
    ReleasableGrad,
    ReleasedGrads,
)
from mp_optim.offload.buckets import WAIT_WORKER, Buckets, BucketStep, Staging
from mp_optim.offload.settings import HostStepSettings
from mp_optim.offload.speculation import BackLaunch, SpeculativeStepper
from mp_optim.rules.rule import Launch

_HOST = torch.device("cpu")


class WorkerError(RuntimeError):
    """A job of the worker thread failed. The optimizer did not apply any result of the job."""


class Phase(enum.Enum):
    """The phases of an iteration, from the end of one step to the end of the next step.

    IDLE lasts until the first job begins. That job fixes the predicted multiplier, and whether
    jobs of this iteration step into back buffers. BACKWARD lasts until the worker is drained.
    COLLECTED lasts until the step ends: staging memory and back buffers belong to the caller. A
    further gradient leads back to BACKWARD.
    """

    IDLE, BACKWARD, COLLECTED = enum.auto(), enum.auto(), enum.auto()


class CollectedGrads(NamedTuple):
    """Results of backward that a step starts from.

    Attributes:
        held: gradients that left their parameters and are in host memory, by slot.
        sums: sums of squares by slot, only of gradients in host memory that the worker measured and
            that did not change afterwards.
    """

    held: Mapping[Slot, Tensor]
    sums: Mapping[Slot, float]


class BackwardScheduler:
    """Begins jobs on offloaded slots during backward. In mode ``sync`` no job begins.

    Args:
        executor: the executor that keeps the state of the slots.
        bind_tensors: function that gives the present tensors to the executor.
        settings: memory and copies of the steps.
        source: the optimizer that takes the step.
        speculation: stepper into back buffers; None without speculation.
        label: function that returns a label for some slots, for errors.

    Attributes:
        runs_in_backward: True if backward copies gradients to the host.
        worker: the worker thread.
        buckets: buckets that backward may begin, in the order in which gradients are expected.
        counts: counts by name. ``speculation_hits``: buckets that were published as speculated.
            ``speculation_redone``: buckets that were stepped again. ``speculation_paused``: steps
            in which speculation paused. ``stale_buckets``: buckets whose gradients changed after
            backward.
        released: gradients that only the host has.
        grads: hooks that report gradients as they arrive, and versions of gradients.
        is_last_microbatch: True if arriving gradients are complete.
        phase: phase of this iteration.
        speculates: True if gradients are stepped as soon as they are on the host; False in phase
            IDLE.
    """

    def __init__(
        self,
        executor: Executor,
        bind_tensors: Callable[[], object],
        settings: HostStepSettings,
        source: GradSource,
        speculation: SpeculativeStepper | None,
        label: Callable[[Sequence[Slot]], str],
    ) -> None:
        self._executor, self._bind_tensors = executor, bind_tensors
        self._settings, self._timeline = settings, settings.timeline
        self._speculation, self._label = speculation, label
        self.runs_in_backward = self._releases = False
        self.counts = Counter(
            speculation_hits=0, speculation_redone=0, speculation_paused=0, stale_buckets=0
        )
        self.worker = Worker("mp_optim-host", settings.set_up)
        self.released = ReleasedGrads(self.worker.wait_for)
        self.buckets: list[BackwardBucket] = []
        self.is_last_microbatch = True
        self.grads = BackwardGrads(source, self.on_grad_ready)
        self.phase, self.speculates = Phase.IDLE, False
        # The gradient multiplier of all jobs of this backward pass. The first job sets this number.
        self._multiplier = 1.0
        self._expected: Callable[[], Tensor] | None = None
        self._reporting = threading.Lock()
        self._plan: Buckets | None = None
        self._bucket_of: dict[Slot, BackwardBucket] = {}
        self._failure: WorkerError | None = None

    def expect_multiplier(self, inverse_scale: Tensor) -> None:
        """Predict that the next steps multiply gradients by this inverse loss scale.

        Args:
            inverse_scale: FP32, shape (1,); copied to the host, for the next backward.
        """
        self._expected = fetch(self._settings.transfer, inverse_scale)

    def _predicted_multiplier(self) -> float:
        """Return the multiplier of gradients for a step that is neither clipped nor skipped,
        rounded to FP32."""
        return 1.0 if self._expected is None else fp32(float(self._expected()))

    def use_buckets(
        self,
        settings: HostStepSettings,
        buckets: Buckets | None,
        offloaded: frozenset[Slot],
        releases: bool,
    ) -> None:
        """Begin jobs on these buckets from now on. No job may be in progress.

        Args:
            settings: memory and copies of the steps.
            buckets: buckets of gradients that are copied to the host; None if no gradient is.
            offloaded: the offloaded slots.
            releases: True if gradients leave the device during backward.
        """
        self._settings, self._releases, self._plan = settings, releases, buckets
        self.runs_in_backward = settings.runs_in_backward and buckets is not None
        self.buckets, largest = [], 0
        if self.runs_in_backward and buckets is not None:
            indices = range(len(buckets.members))
            self.buckets = [BackwardBucket(buckets, index) for index in indices]
            for staging in buckets.staging:
                largest = max(largest, staging.memory.capacity // (1 + buckets.has_outputs))
        self._bucket_of = {slot: bucket for bucket in self.buckets for slot in bucket.slots}
        self.grads.watch(offloaded if self.runs_in_backward else frozenset())
        make = partial(Staging, settings.transfer, largest, settings.pin_staging)
        self.released.landings = [(make(), None), (make(), None)]
        self.released.previous = None

    # -- during backward --------------------------------------------------------------------------

    @in_own_modes
    def on_grad_ready(self, slot: Slot, grad: Tensor, found: ReleasableGrad | None) -> None:
        """Take a complete gradient, and begin a job if its bucket is complete. Never raise:
        :meth:`collect` raises the errors.

        Args:
            slot: the slot of the gradient.
            grad: the local gradient. The step gets this gradient, or its copy on the host if it is
                released.
            found: the gradient with its parameter, if the gradient may be released; else None.
        """
        # NOTE: backward has a thread for each device that has parameters, and one for the CPU. So
        # gradients of two threads may arrive at once.
        with self._reporting:
            self.grads.counts[slot] += 1
            if (bucket := self._bucket_of.get(slot)) is None:
                return
            if self.phase is Phase.COLLECTED:
                self.phase = Phase.BACKWARD
            if bucket.job is not None and slot in bucket.job.versions:
                # A further micro-batch makes the job's result stale, but the worker still uses the
                # job's memory. So the job is cancelled, not deleted.
                bucket.job.is_cancelled = True
                bucket.job = None
            if self._failure is not None or not (self.is_last_microbatch or self._releases):
                return
            if self._releases:
                released = self.released
                if slot in released.held and slot in released.releasable and slot in bucket.waiting:
                    # Begin a job now, because the worker must add the slot's previous gradient to
                    # the held copy before this gradient.
                    self._begin_jobs([bucket])
                released.register(slot, grad, found)
            bucket.waiting[slot] = grad
            if bucket.waiting.keys() >= bucket.expected:
                # Backward has passed earlier buckets, so their missing gradients will not arrive.
                passed = self.buckets[: max(0, bucket.index - 1)]
                begun = [each for each in passed if each.waiting and each.job is None]
                self._begin_jobs([*begun, bucket])

    def _begin_jobs(self, buckets: Iterable[BackwardBucket]) -> None:
        """Begin a job on each bucket, and keep an error for :meth:`collect`."""
        slots: Sequence[Slot] = ()
        try:
            for bucket in buckets:
                slots = bucket.slots
                if self.phase is Phase.IDLE:
                    # Fix settings and the predicted multiplier for all jobs of this iteration.
                    self.grads.source.share_settings()
                    self._executor.check_groups()
                    self._bind_tensors()
                    self._multiplier = self._predicted_multiplier()
                    self.phase = Phase.BACKWARD
                    self.speculates = self._speculation is not None and self._speculation.is_on
                self._begin(bucket)
        except RefusedSettings:
            return  # The step raises this error itself, before any parameter is stepped.
        except WorkerError as error:
            self._failure = error
        except Exception as error:
            if not self._releases and self._settings_are_refused():
                # The refused settings were assigned after the first micro-batch, and the step
                # raises their error.
                return
            self._failure = WorkerError(
                f"{self._label(slots)}: work on the host during backward could not be "
                f"begun: {error!r}. The optimizer did not change; call step() again, or continue "
                "with the next batch"
            )
            self._failure.__cause__ = error

    def _settings_are_refused(self) -> bool:
        """True if the executor refuses its settings, before or after it gets the settings of the
        optimizer that takes the step."""
        try:
            self._executor.check_groups()
            self.grads.source.share_settings()
            self._executor.check_groups()
        except RefusedSettings:
            return True
        return False

    def _begin(self, bucket: BackwardBucket) -> None:
        """Submit gradients of a bucket to the worker. With ``release_gradients`` these are the
        gradients that can be released, otherwise all gradients that arrived."""
        releases, released, transfer = self._releases, self.released, self._settings.transfer
        if releases:
            grads = released.take_from(bucket)
        else:
            grads, bucket.waiting = dict(sorted(bucket.waiting.items())), {}
        updates = self.grads.source.updates(grads, self._multiplier)
        if not updates:
            return
        # NOTE: a cancelled job of this bucket may still write to the bucket's staging memory, so
        # this thread must not write there. The worker runs the jobs of a bucket one after the
        # other.
        destination = (
            released.destination_for(updates, bucket)
            if releases
            else bucket.destination_for(updates)
        )
        launches: Sequence[BackLaunch] = ()
        goes_ahead = self.speculates and destination.in_place and self.is_last_microbatch
        if self._speculation is not None and goes_ahead:
            launches = self._speculation.predicted(bucket.index, destination.staged)
        is_whole = len(updates) == len(bucket.slots)
        job = BackwardJob(
            bucket.label if is_whole else self._label(updates.slots),
            destination.memory,
            updates,
            destination.staged,
            # At the step, the host cannot compare its copy with a gradient on an accelerator. So
            # record sums of the gradient's bits, too.
            self.grads.versions(updates, with_bits=not (releases or transfer.is_same_place)),
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
        """Wait for the jobs begun during backward, and return their results. The timeline of the
        step begins here.

        NOTE: the caller waits for the worker. The wait cannot be later, because the verdict reads
        the sums of the jobs, and the worker owns staging memory and back buffers until it is
        drained. The wait is not earlier, so that backward hides as much time as possible.

        Raises:
            WorkerError: a job failed. All jobs are dropped; nothing was stepped.
        """
        if (file := self._settings.state_file) is not None:
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
        """Yield slot and sum of squares of each gradient in host memory that did not change since a
        job measured the gradient."""
        self.grads.forget_comparisons()
        for job in [bucket.job for bucket in self.buckets if bucket.job is not None]:
            compares = self._settings.transfer.is_same_place and not job.releases
            grad_of = self.released.held.get if job.releases else self.grads.present
            rows = zip(job.versions.items(), job.sums or (), job.staged.grads, strict=False)
            for (slot, version), value, staged in rows:
                grad = grad_of(slot)
                if grad is None or not grad.is_cpu:
                    # An accelerator measures its own gradients, so the job's sum is not used.
                    continue
                if self.grads.is_same(slot, version, grad, staged if compares else None):
                    yield slot, value

    def _finish_jobs(self) -> None:
        """Begin jobs that add the last released gradients to the held copies. Then wait for all
        jobs."""
        if self._releases:
            self._begin_jobs(filter(self.released.has_held, self.buckets))
        if self._failure is not None:
            raise self._failure
        with self._timeline.stage(WAIT_WORKER):
            self.worker.drain()
        if self._releases:
            self.released.finish()
            for bucket in self.buckets:
                if bucket.job is not None:
                    bucket.job.track_copies()

    def distrust(self, slot: Slot) -> None:
        """Do not use the speculated step of a slot, because a caller gets the slot's live
        tensors and may write to them."""
        if (file := self._settings.state_file) is not None:
            file.check_owner()
            file.is_exposed = True
        if (bucket := self._bucket_of.get(slot)) is not None:
            bucket.is_trusted = False

    def forget_released(self) -> None:
        """Discard released gradients, because no step will use them."""
        released = self.released
        if not (released.held or released.releasable or released.lost):
            return
        released.held, released.releasable, released.previous = {}, {}, None
        released.lost = ""
        for bucket in self.buckets:
            bucket.staging.is_kept = False
        if self.phase is not Phase.IDLE or self._failure is not None:
            self.discard()

    def stop(self) -> None:
        """Discard all jobs and remove the hooks, so that no further job begins."""
        self.discard()
        self.grads.stop()

    def discard(self) -> None:
        """Discard the jobs begun during backward. The step repeats the discarded jobs."""
        if self.released.held:
            try:
                self._finish_jobs()
            except WorkerError as error:
                self.released.lose(error)
        self.worker.discard()
        self._failure = None
        self._end_iteration()

    def skip(self) -> None:
        """Discard the results of backward because the step is skipped. Speculation never
        predicts a skip."""
        if self._speculation is not None:
            self.counts["speculation_paused"] += self._speculation.record(False)
        self._end_iteration()

    def end_step(self, updates: SlotUpdates) -> None:
        """Record whether the step's multipliers are the predicted multiplier, and drop the jobs of
        this backward."""
        if self._speculation is not None and updates:
            is_known = self.phase is not Phase.IDLE
            predicted = self._multiplier if is_known else self._predicted_multiplier()
            was_right = set(updates.multipliers) == {predicted}
            self.counts["speculation_paused"] += self._speculation.record(was_right)
        self._end_iteration()

    def _end_iteration(self) -> None:
        self._timeline.end_step()
        for bucket in self.buckets:
            bucket.waiting, bucket.job = {}, None
        self.grads.forget_comparisons()
        self.phase, self.speculates = Phase.IDLE, False

    # -- in step ----------------------------------------------------------------------------------

    def find_copied(self, steps: Sequence[BucketStep]) -> None:
        """Record in ``steps`` which gradients backward copied to the host. The step copies only the
        other gradients, and gradients that changed after their copy."""
        if not self.runs_in_backward:
            return
        stale = 0
        for step in steps:
            bucket = self.buckets[step.bucket]
            bucket.expected = frozenset(step.updates.slots)
            if self.released.held:
                step.downloaded = self.released.put_in_place(step.updates, step.staged)
            job = bucket.job
            # Skip a job that copied into other tensors. Its tensors did not fit these updates, so
            # the step has just made new tensors.
            if job is None or not job.is_done or job.staged.grads is not step.staged.grads:
                continue
            compares = self._settings.transfer.is_same_place and not job.releases
            staged = job.staged.grads if compares else None
            step.is_downloaded = self.grads.are_same(job.versions, step.updates, staged)
            if not (step.is_downloaded or job.releases):
                stale += self.grads.are_complete(job.versions, step.updates)
        self.counts["stale_buckets"] += stale
        # Warn only in the first step with changed gradients.
        if 0 < stale == self.counts["stale_buckets"]:
            warn(
                f"offload_mode={self._settings.mode!r}: gradients changed after backward, so "
                "step() copies and measures them again. If clip_grad_norm_ changed them, clip with "
                "OptimizerConfig.clip_grad instead (HF Trainer: max_grad_norm=0; Lightning: "
                "gradient_clip_val=None). metrics()['stale_buckets'] counts the buckets"
            )

    def gradients_on_host(self, updates: SlotUpdates) -> dict[Slot, Tensor]:
        """Return, by slot, the gradients that windows read from host memory: released gradients,
        and copies of gradients that did not change after backward."""
        found: dict[Slot, Tensor] = {}
        routes = () if self._plan is None else self._plan.routes(updates.slots)
        for index, _, selection in routes:
            bucket, part = self.buckets[index], selection.take(updates)
            bucket.expected = frozenset(part.slots)
            for slot, grad in zip(part.slots, part.grads, strict=True):
                if self.released.is_held(slot, grad):
                    found[slot] = grad
            job = bucket.job
            # The step reads gradients in host memory in place, so their copies are not used.
            if job is None or job.releases or self._settings.transfer.is_same_place:
                continue
            if job.is_done and self.grads.are_same(job.versions, part, None):
                found.update(zip(part.slots, job.staged.grads, strict=True))
        return found

    def hits(
        self, steps: Sequence[BucketStep], planned: Mapping[int, Sequence[Launch]]
    ) -> dict[int, Sequence[BackLaunch]]:
        """Return the launches of buckets whose back buffers hold this step, by bucket.

        These buckets count as hits. A bucket counts as redone if its gradients are unchanged but
        its back buffer holds another result.
        """
        found: dict[int, Sequence[BackLaunch]] = {}
        for step in steps:
            bucket, now = self.buckets[step.bucket], planned[step.bucket]
            job, was_trusted = bucket.job, bucket.is_trusted
            # The step overwrites the back buffer next, unless the buffer is a hit. So a later step
            # must not trust the buffer.
            bucket.is_trusted = False
            if job is None or not (job.stepped and step.is_downloaded):
                continue
            is_same = len(job.back) == len(now) and all(map(BackLaunch.gives, job.back, now))
            bucket.is_trusted = was_trusted and is_same
            if bucket.is_trusted:
                found[step.bucket] = job.back
            self.counts["speculation_hits" if bucket.is_trusted else "speculation_redone"] += 1
        return found


# -- the worker thread ----------------------------------------------------------------------------


class Worker:
    """One thread that runs jobs. The thread starts with the first job, and again after a failure or
    a fork.

    Args:
        name: name of the thread.
        set_up: called in the thread before its first job.
    """

    def __init__(self, name: str, set_up: Callable[[], None] | None = None) -> None:
        self._name, self._set_up = name, set_up
        self._pool: DaemonExecutor | None = None
        self._pid = os.getpid()
        # Jobs since the last drain, with the labels that errors name.
        self._begun: list[tuple[str, Future[None]]] = []
        self._last: BackwardJob | None = None

    def submit(self, job: BackwardJob) -> None:
        """Queue a job."""
        if self._pool is None or self._pid != os.getpid():
            self._pid, self._pool = os.getpid(), DaemonExecutor(self._name)
            weakref.finalize(self, _stop, self._pool, self._pid)
            self._begun = []
            if self._set_up is not None:
                self._begun.append(("the first job", self._pool.submit(self._set_up)))
        elif self._last is not None:
            self._last.following = job
        self._last, job.future = job, self._pool.submit(_run, job)
        self._begun.append((job.label, job.future))

    def wait_for(self, job: BackwardJob) -> None:
        """Wait until a job is done or dropped. :meth:`drain` raises the error of the job."""
        if job.future is not None and self._pid == os.getpid():
            with contextlib.suppress(CancelledError):
                job.future.exception()

    def drain(self) -> None:
        """Wait until all jobs are done.

        Raises:
            WorkerError: a job raised, or this process is a forked child without the thread. All
                jobs are dropped; the next job gets a working thread.
        """
        if self._begun and self._pid != os.getpid():
            label, _ = self._begun[-1]
            self.discard()
            raise WorkerError(
                f"{label}: the parent of this forked process started the step during backward; "
                "call step() again to take the step in this process"
            )
        while self._begun:
            label, future = self._begun[0]
            if (error := future.exception()) is not None:
                self.discard()
                # Start a new thread for the next job: if the set-up of this thread failed, it would
                # run jobs without its settings.
                self._pool = None
                raise WorkerError(
                    f"{label}: work on the host during backward failed: {error!r}. The optimizer "
                    "did not change; call step() again, or continue with the next batch"
                ) from error
            del self._begun[0]
        self._last = None

    def discard(self) -> None:
        """Drop the jobs that are queued, and wait for the job in progress. An error of that job is
        dropped, too."""
        if self._pid == os.getpid():
            running = [future for _, future in self._begun if not future.cancel()]
            for future in running:
                future.exception()
        else:
            self._pool = None
        self._begun, self._last = [], None


def _run(job: BackwardJob) -> None:
    job.prepare()
    following = job.following
    if following is not None and following.owner is not job.owner:
        # Start the copies of the next job, so that they overlap with this job's arithmetic. Drop an
        # error here, because the next job starts the copies again and raises the error under its
        # own label.
        with contextlib.suppress(Exception):
            following.prepare()
    job.run()


def _stop(pool: DaemonExecutor, pid: int) -> None:
    """End the thread of a deleted worker. A forked child does not have the thread."""
    if os.getpid() == pid:
        # The worker thread itself may delete the worker, and a thread cannot wait for itself.
        is_own = pool.thread is threading.current_thread()
        pool.shutdown(wait=not is_own, cancel_futures=True)


def worker_threads(host_threads: int | None) -> int:
    """Return the number of kernel threads of the worker: ``host_threads`` if it is set.

    The default is three quarters of this rank's share of the host's threads, so that the data
    loader keeps a quarter. From a small share, two threads are left to the main thread and
    autograd. Memory bandwidth bounds an optimizer, so the last quarter would not make a step
    faster.
    """
    if host_threads:
        return host_threads
    threads = host_share().threads
    return max(1, min(threads - 2, 3 * threads // 4))


def occupy(threads: int) -> None:
    """Make kernels of the calling thread use this number of threads.

    ``torch.set_num_threads`` would change the number for the whole process.
    """
    set_thread_share(threads)
    limit_openmp(threads)
