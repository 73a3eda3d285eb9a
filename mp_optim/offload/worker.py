"""The thread that works during backward: it runs jobs in order, and its owner gets their errors."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from mp_optim.host.calls import DaemonExecutor
from mp_optim.host.host_share import host_share
from mp_optim.kernels.native_library import limit_openmp, set_thread_share


class WorkerError(RuntimeError):
    """Work in the background failed; none of it was applied."""


class Job:
    """Work for the thread.

    Attributes:
        label: names the work in errors.
        owner: memory that no two jobs use at once.
        following: the job that was submitted next, if any.
        future: the end of the work, once it is submitted.
    """

    label: str
    owner: object
    following: Job | None = None
    future: Future[None] | None = None

    def prepare(self) -> None:
        """Start the copies, if that was not done: before :meth:`run`, or during the job before."""

    def run(self) -> None:
        """Do the work."""


class Worker:
    """One thread, started with the first job and again after a failure or a fork.

    Args:
        name: name of the thread.
        set_up: called in the thread before its first job.
    """

    def __init__(self, name: str, set_up: Callable[[], None] | None = None) -> None:
        self._name, self._set_up = name, set_up
        self._pool: DaemonExecutor | None = None
        self._pid = os.getpid()
        self._begun: list[tuple[str, Future[None]]] = []  # jobs since the last drain, with labels
        self._last: Job | None = None

    def submit(self, job: Job) -> None:
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

    def wait_for(self, job: Job) -> None:
        """Wait until a job is done or dropped; :meth:`drain` raises its error."""
        if job.future is not None and self._pid == os.getpid():
            with contextlib.suppress(CancelledError):
                job.future.exception()

    def drain(self) -> None:
        """Wait until all jobs are done.

        Raises:
            WorkerError: a job raised, or this is a forked child without the thread. All jobs are
                dropped; the next one finds a working thread.
        """
        if self._begun and self._pid != os.getpid():
            label, _ = self._begun[-1]
            self._forget()
            raise WorkerError(
                f"{label}: work during backward was started by the parent of this forked process; "
                "call step() again to do it in this process"
            )
        while self._begun:
            label, future = self._begun[0]
            if (error := future.exception()) is not None:
                self.discard()
                self._pool = None  # a failed start of a thread would leave it unusable
                raise WorkerError(
                    f"{label}: work on the host during backward failed: {error!r}. The optimizer "
                    "is as it was before this step; call step() again, or continue with the next "
                    "batch"
                ) from error
            del self._begun[0]
        self._last = None

    def discard(self) -> None:
        """Drop the jobs that are queued, and wait for the one in progress; forget its error."""
        if self._pid == os.getpid():
            running = [future for _, future in self._begun if not future.cancel()]
            for future in running:
                future.exception()
        self._forget()

    def _forget(self) -> None:
        self._begun, self._last = [], None
        if self._pid != os.getpid():
            self._pool = None


def _run(job: Job) -> None:
    job.prepare()
    following = job.following
    if following is not None and following.owner is not job.owner:
        # Its copies run next to this job's arithmetic. It fails under its own name, in its turn.
        with contextlib.suppress(Exception):
            following.prepare()
    job.run()


def _stop(pool: DaemonExecutor, pid: int) -> None:
    """End the thread of a worker that is gone; a forked child does not have it."""
    if os.getpid() == pid:
        is_own = pool.thread is threading.current_thread()  # the worker cannot wait for itself
        pool.shutdown(wait=not is_own, cancel_futures=True)


# -- cores: not all are for the worker, others need some during backward ---------------------------


def threads_beside_backward(threads: int) -> int:
    """Return how many of a process's threads work for the optimizer during backward.

    Two are left to the main thread and autograd, and a quarter to the data loader. Memory bandwidth
    bounds an optimizer, so the last quarter would not make it faster.
    """
    return max(1, min(threads - 2, 3 * threads // 4))


def worker_threads(host_threads: int | None) -> int:
    """Return ``host_threads`` if it is set, else most of this rank's share of the host."""
    return host_threads or threads_beside_backward(host_share().threads)


def occupy(threads: int) -> None:
    """Make the calling thread use that many threads.

    ``torch.set_num_threads`` would do it for the whole process.
    """
    set_thread_share(threads)
    limit_openmp(threads)
