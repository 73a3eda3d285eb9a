"""The thread that works during backward, by its words: what is dropped, what is waited for, who
gets a new thread."""

import threading

import pytest

from mp_optim.offload import worker as module
from mp_optim.offload.worker import Worker, WorkerError


class Job:
    """Runs when it is let; tells where."""

    def __init__(self, label="a job", *, is_free=True, error=None):
        self.label, self.error, self.owner = label, error, self
        self.begun, self.free = threading.Event(), threading.Event()
        self.thread = None
        if is_free:
            self.free.set()

    def prepare(self): ...

    def run(self):
        self.thread = threading.current_thread()
        self.begun.set()
        assert self.free.wait(30)
        if self.error is not None:
            raise self.error


@pytest.fixture
def worker():
    worker = Worker("a worker", capacity=4)
    yield worker
    worker.close()


def submit(worker, *jobs):
    for job in jobs:
        worker.submit(job)
    assert jobs[0].begun.wait(30)
    return jobs


def test_nothing_in_progress_is_discarded_at_once(worker):
    assert worker.discard()
    (job,) = submit(worker, Job())
    worker.drain()
    thread = worker.thread
    assert worker.discard() and worker.thread is thread is job.thread
    (job,) = submit(worker, Job())
    worker.drain()
    assert job.thread is thread


def test_what_waits_is_dropped_and_what_runs_is_waited_for(worker):
    running, waiting = submit(worker, Job(is_free=False), Job("never"))
    threading.Timer(0.2, running.free.set).start()
    assert worker.discard() and running.free.is_set()
    (later,) = submit(worker, Job())
    worker.drain()
    assert waiting.thread is None and later.thread is running.thread


def test_one_that_does_not_end_is_left_alone_with_its_thread(worker, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    stuck, waiting = submit(worker, Job(is_free=False), Job("never"))
    assert not worker.discard()
    monkeypatch.undo()
    (later,) = submit(worker, Job())
    worker.drain()
    assert later.thread is worker.thread is not stuck.thread and stuck.thread.is_alive()
    stuck.free.set()
    stuck.thread.join(30)  # it ends, and takes nothing with it
    assert not stuck.thread.is_alive() and waiting.thread is None
    assert submit(worker, Job())[0].thread is later.thread


@pytest.mark.parametrize("forget", [False, True])
def test_a_failure_is_told_once_unless_it_is_discarded(worker, forget):
    job, waiting = submit(
        worker, Job("the third bucket", error=KeyError("x"), is_free=False), Job("never")
    )
    job.free.set()
    if forget:
        assert worker.discard()
    else:
        with pytest.raises(WorkerError, match=r"the third bucket: .*KeyError\('x'\)"):
            worker.drain()
    worker.drain()  # nothing is left of it
    (later,) = submit(worker, Job())
    worker.drain()
    assert later.thread is not None and waiting.thread is None


def test_a_full_queue_says_who_is_in_the_way(worker, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    running, *_ = submit(worker, Job("slow", is_free=False), *(Job() for _ in range(4)))
    with pytest.raises(WorkerError, match=r"one more: .*4 jobs wait.*works on slow"):
        worker.submit(Job("one more"))
    running.free.set()
    worker.drain()
