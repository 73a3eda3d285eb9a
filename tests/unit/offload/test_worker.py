"""The worker thread: discarded jobs, waits and failures."""

import threading

import pytest

from mp_optim.offload.backward_scheduler import Worker, WorkerError


class HeldJob:
    following = None

    def __init__(self, label="a job", *, is_free=True, error=None):
        self.label, self.error, self.owner = label, error, self
        self.begun, self.free = threading.Event(), threading.Event()
        self.thread = None
        if is_free:
            self.free.set()

    def prepare(self):
        pass

    def run(self):
        self.thread = threading.current_thread()
        self.begun.set()
        assert self.free.wait(30)
        if self.error is not None:
            raise self.error


@pytest.fixture
def worker():
    return Worker("a worker")


def submit(worker, *jobs):
    for job in jobs:
        worker.submit(job)
    assert jobs[0].begun.wait(30)
    return jobs


def test_worker_keeps_its_thread_after_a_discard_without_jobs(worker):
    worker.discard()
    (job,) = submit(worker, HeldJob())
    worker.drain()
    thread = job.thread
    worker.discard()
    (job,) = submit(worker, HeldJob())
    worker.drain()
    assert job.thread is thread


def test_worker_discard_drops_queued_jobs_and_waits_for_the_running_job(worker):
    running, waiting = submit(worker, HeldJob(is_free=False), HeldJob("never"))
    threading.Timer(0.2, running.free.set).start()
    worker.discard()
    assert running.free.is_set()
    (later,) = submit(worker, HeldJob())
    worker.drain()
    assert waiting.thread is None and later.thread is running.thread


@pytest.mark.parametrize("forget", [False, True])
def test_worker_raises_a_job_failure_once_unless_discarded(worker, forget):
    (job,) = submit(worker, HeldJob("the third bucket", error=KeyError("x"), is_free=False))
    job.free.set()
    if forget:
        worker.discard()
    else:
        with pytest.raises(WorkerError, match=r"the third bucket: .*KeyError\('x'\)"):
            worker.drain()
    worker.drain()  # The failure was raised or discarded, so it does not return.
    (later,) = submit(worker, HeldJob())
    worker.drain()
    assert later.thread is not None
