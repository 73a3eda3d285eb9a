"""A thread that takes jobs from a bounded queue, and never leaves its caller waiting for nothing.

Whatever ends the thread, the caller hears of it: a job that raises, a thread that is gone, a queue
  that does not move.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import torch

from mp_optim.host.host_share import host_share
from mp_optim.kernels.native_library import limit_openmp, set_thread_share

PATIENCE = 4.0
"""Seconds that :meth:`Worker.submit` waits for a full queue in which no job gets done."""
_LOOK = 0.1
"""Seconds between two looks whether the thread is still alive."""
_FAREWELL = 2.0
"""Seconds that the end of the process waits for the job in progress."""


class WorkerError(RuntimeError):
    """Work in the background failed. What was asked of it has not happened."""


class Job:
    """Something to do. ``label`` says to whom; ``owner`` is what no two jobs may use at once."""

    label: str
    owner: object

    def prepare(self) -> None:
        """Start what needs no arithmetic; called before :meth:`run`, if possible during the job
        before this one."""

    def run(self) -> None:
        """Do it."""


class _Queue:
    """What the thread and its owner share.

    NOTE: signals are handled in the owner's thread, between any two operations of Python. So the
    owner takes ``lock`` itself, which is one operation where entering a Condition is several, and
    waits for ``progress``, not ``changed``: an interrupt there would leave the lock taken for good,
    or not taken where it is released.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.progress = threading.Lock()  # taken: nothing was done since the owner last looked
        self.jobs: deque[Job] = deque()
        self.running: Job | None = None
        self.prepared: Job | None = None
        self.finished = 0
        self.failure: tuple[str, BaseException] | None = None
        self.closed = False

    def tell_owner(self) -> None:
        """Something was done. Called with the lock."""
        if self.progress.locked():
            self.progress.release()

    def wait_until(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Have the owner wait; whether it is done."""
        until = time.monotonic() + seconds
        while True:
            with self.lock:
                if is_done():
                    return True
                # an interrupt may have kept the thread from hearing of a job
                self.changed.notify_all()
            left = until - time.monotonic()
            if left <= 0.0:
                return False
            self.progress.acquire(timeout=min(left, _LOOK))

    def is_full(self) -> bool:
        """Whether another job has to wait for room."""
        return len(self.jobs) >= self.capacity and self.failure is None


class Worker:
    """One daemon thread, started with the first job and again if it is gone.

    Args:
        name: of the thread.
        capacity: jobs that may wait.
        set_up: called in the thread before its first job.

    Attributes:
        thread: the present one.
    """

    def __init__(self, name: str, capacity: int, set_up: Callable[[], None] | None = None) -> None:
        self._name = name
        self._set_up = set_up
        self._queue = _Queue(capacity)
        self._pid = os.getpid()
        self.thread: threading.Thread | None = None
        self._finalizer: weakref.finalize[..., Worker] | None = None

    def _wait_for_room(self, finished: int) -> None:
        """Wait until a job more than ``finished`` is done, for as long as one may take."""
        queue = self._queue
        queue.wait_until(lambda: queue.finished != finished or not queue.is_full(), PATIENCE)

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            WorkerError: the queue is full and nothing gets done.
        """
        queue = self._queue
        self._start()
        while queue.is_full():
            finished = queue.finished
            self._wait_for_room(finished)
            if queue.is_full() and queue.finished == finished:
                state = "is gone" if not self._is_alive() else f"works on {_label(queue.running)}"
                raise WorkerError(
                    f"{job.label}: the queue of the host worker is full: {len(queue.jobs)} jobs "
                    f"wait and none was finished in {PATIENCE:g} s; the worker {state}"
                )
        with queue.lock:
            if queue.failure is None:  # else it is reported by drain(); more work would be lost
                queue.jobs.append(job)
                queue.changed.notify_all()

    def wait_for(self, job: Job) -> None:
        """Wait until a job is done, or will not be any more, of which :meth:`drain` tells."""
        queue = self._queue

        def is_over() -> bool:
            waits = job is queue.running or job in queue.jobs
            return not waits or queue.failure is not None or not self._is_alive()

        while not queue.wait_until(is_over, PATIENCE):
            pass

    def drain(self) -> None:
        """Wait until all jobs are done.

        Raises:
            WorkerError: one of them raised, or the thread is gone. The jobs left are dropped; the
                next one submitted finds a working thread.
        """
        queue = self._queue

        def is_done() -> bool:
            idle = not queue.jobs and queue.running is None
            return queue.failure is not None or idle or not self._is_alive()

        while not queue.wait_until(is_done, PATIENCE):
            pass
        with queue.lock:
            if queue.failure is None and (queue.jobs or queue.running is not None):
                queue.failure = (
                    _label(queue.running or queue.jobs[0]),
                    WorkerError(f"the thread {self._name!r} is gone"),
                )
            failure, queue.failure = queue.failure, None
            if failure is None:
                return
            queue.jobs.clear()
            queue.running = queue.prepared = None
        label, error = failure
        raise WorkerError(
            f"{label}: work on the host during backward failed: {error!r}. The optimizer is as it "
            "was before this step; call step() again to do the work in it, or go on with the next "
            "batch"
        ) from error

    def discard(self) -> bool:
        """Drop the jobs that wait and wait for the one in progress; its failure is forgotten.

        Returns:
            False if it does not end: then the thread is left alone with it, and the next job gets
            another one. What the job writes to must not be used any more.
        """
        queue = self._queue
        with queue.lock:
            queue.jobs.clear()
        queue.wait_until(lambda: queue.running is None or not self._is_alive(), PATIENCE)
        with queue.lock:
            is_stuck = queue.running is not None and self._is_alive()
            queue.closed = queue.closed or is_stuck
            queue.running = queue.failure = queue.prepared = None
        if is_stuck:
            if self._finalizer is not None:
                self._finalizer.detach()
            self.thread = self._finalizer = None
            self._queue = _Queue(queue.capacity)
        return not is_stuck

    def close(self) -> None:
        """End the thread; a later job starts another one."""
        if self._finalizer is not None:
            self._finalizer()
        self._finalizer = self.thread = None
        self._queue = _Queue(self._queue.capacity)

    def _is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def _start(self) -> None:
        if self._is_alive():
            return
        # A forked child: the thread that held the lock is not here to release it.
        if self._pid != os.getpid():
            self._queue, self._pid = _Queue(self._queue.capacity), os.getpid()
        if self._finalizer is not None:
            self._finalizer.detach()
        thread = threading.Thread(
            target=_serve, args=(self._queue, self._set_up), name=self._name, daemon=True
        )
        self.thread = thread
        # Called when this object goes, and at exit before the interpreter stops daemon threads
        # wherever they are.
        self._finalizer = weakref.finalize(self, _stop, self._queue, thread, os.getpid())
        thread.start()


def _label(job: Job | None) -> str:
    return "nothing" if job is None else job.label


def _stop(queue: _Queue, thread: threading.Thread, pid: int) -> None:
    # A forked child has no such thread, and maybe a lock that nobody will release.
    if os.getpid() != pid:
        return
    with queue.changed:
        queue.closed = True
        queue.jobs.clear()
        queue.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(_FAREWELL)


def _serve(queue: _Queue, set_up: Callable[[], None] | None) -> None:
    """The thread. It holds no reference to its owner."""
    label = "the first job"
    torch.set_flush_denormal(False)  # a thread inherits the mode of the one that started it
    try:
        if set_up is not None:
            set_up()
        while (job := _take(queue)) is not None:
            label = job.label
            prepared, queue.prepared = queue.prepared, None
            if prepared is not job:
                job.prepare()
            del prepared
            _prepare_next(queue, job)
            job.run()
            with queue.changed:
                queue.running = None
                queue.finished += 1
                queue.tell_owner()
            del job
    except BaseException as error:  # whatever it is, the caller has to know
        with queue.changed:
            queue.running = None
            queue.failure = queue.failure or (label, error)
            queue.tell_owner()


def _take(queue: _Queue) -> Job | None:
    with queue.changed:
        while not queue.jobs and not queue.closed:
            queue.changed.wait()
        if queue.closed:
            return None
        queue.running = queue.jobs.popleft()
        queue.tell_owner()
        return queue.running


def _prepare_next(queue: _Queue, current: Job) -> None:
    """Start the copies of the next job, so that they run beside this one's arithmetic."""
    with queue.changed:
        following = queue.jobs[0] if queue.jobs else None
        if following is None or following.owner is current.owner:
            return
    # When its turn comes it is prepared again, and fails under its own name.
    with contextlib.suppress(Exception):
        following.prepare()
        queue.prepared = following


# -- cores: not all are for the worker, others need some during backward ---------------------------


def threads_beside_backward(threads: int) -> int:
    """Of a process's threads, how many work for the optimizer during backward.

    Two are left to the main thread and autograd, and a quarter to the data loader: memory
    bandwidth, not arithmetic, bounds an optimizer, so the last quarter would not make it faster.
    """
    return max(1, min(threads - 2, 3 * threads // 4))


def worker_threads(host_threads: int | None) -> int:
    """``host_threads`` if it is set, else most of this rank's share of the host."""
    return host_threads or threads_beside_backward(host_share().threads)


def occupy(threads: int) -> None:
    """Make the calling thread use that many threads.

    ``torch.set_num_threads`` would do it for the whole process.
    """
    set_thread_share(threads)
    limit_openmp(threads)
