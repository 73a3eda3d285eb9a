"""Failures during backward raise in the step, name parameters and change no state."""

import threading
import time

import pytest

from mp_optim.offload.backward_grads import BackwardJob
from mp_optim.offload.backward_scheduler import BackwardScheduler, Worker, WorkerError
from mp_optim.rules.rule_executor import RuleExecutor
from support.launch import end_forked_program
from support.models import tokens_of
from support.offload import MODES, build_mode, differing, finish_backward_work, run, snapshot

SECONDS = 5.0
each_early = pytest.mark.parametrize("mode", MODES[1:])


def pair_before_step(mode, **settings):
    pairs = [build_mode(which, **{"clip_grad": 0.0, **settings}) for which in (mode, "sync")]
    for model, optimizer in pairs:
        run(model, optimizer, 3)
        optimizer.zero_grad()
        # The snapshot is taken here because reading state during a step discards the work of
        # backward.
        optimizer.before = snapshot(model, optimizer)
    return pairs


def assert_step_fails(model, optimizer, text):
    before, started = optimizer.before, time.monotonic()
    with pytest.raises((WorkerError, RuntimeError), match=text) as caught:
        optimizer.step()
    assert time.monotonic() - started < SECONDS
    assert differing(snapshot(model, optimizer), before) == []
    return caught.value


def assert_trains_like(pair, other):
    for model, optimizer in (pair, other):
        if not any(param.grad is not None for param in model.parameters()):
            model(tokens_of(50)).backward()
        assert optimizer.step().success
        run(model, optimizer, 3, start=60)
    assert differing(snapshot(*pair), snapshot(*other)) == []


@each_early
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_step_names_parameters_and_changes_nothing_when_a_worker_job_raises(
    mode, error, monkeypatch
):
    pair, other = pair_before_step(mode)
    with monkeypatch.context() as patch:
        patch.setattr(BackwardJob, "run", lambda job: (_ for _ in ()).throw(error("no such luck")))
        pair[0](tokens_of(50)).backward()
        raised = assert_step_fails(*pair, "no such luck")
    assert any(name in str(raised) for name, _ in pair[0].named_parameters())
    assert isinstance(raised.__cause__, error)
    assert_trains_like(pair, other)


@each_early
@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_step_quotes_the_error_that_a_gradient_hook_of_the_package_raised(mode, error, monkeypatch):
    """The step also raises TypeError and ValueError to refuse settings, so the hook's error must
    stay visible as the cause."""
    pair, other = pair_before_step(mode)
    with monkeypatch.context() as patch:
        prediction = "_predicted_multiplier"
        patch.setattr(
            BackwardScheduler, prediction, lambda _: (_ for _ in ()).throw(error("a bug"))
        )
        pair[0](tokens_of(50)).backward()
        raised = assert_step_fails(*pair, "could not be begun.*a bug")
    assert isinstance(raised.__cause__, error)
    assert_trains_like(pair, other)


def test_step_raises_a_kernel_error_of_the_worker_and_changes_nothing(monkeypatch):
    pair, other = pair_before_step("speculative")
    carry_out, calls = RuleExecutor.carry_out, []

    def once(self, planned):
        calls.append(threading.current_thread().name)
        if len(calls) == 2:
            carry_out(self, planned)  # The kernel writes its results before it fails.
            raise RuntimeError("mp_adam: the kernels failed")
        carry_out(self, planned)

    monkeypatch.setattr(RuleExecutor, "carry_out", once)
    pair[0](tokens_of(50)).backward()
    assert_step_fails(*pair, "work on the host during backward failed.*mp_adam: the kernels failed")
    assert set(calls) == {"mp_optim-host"}
    monkeypatch.undo()
    assert_trains_like(pair, other)


def test_step_changes_no_bucket_when_a_kernel_raises_after_the_clip(monkeypatch):
    """The step clips, so step() repeats all buckets, and the kernel of the third bucket raises."""
    pair, other = pair_before_step("speculative", fraction=1.0, experts=False)
    for model, optimizer in (pair, other):
        model(tokens_of(50)).backward()
        finish_backward_work(optimizer)  # The worker would otherwise read the halved gradients.
        for param in model.parameters():
            param.grad.mul_(0.5)
    with monkeypatch.context() as patch:
        calls = []

        def third(self, planned):
            calls.append(planned)
            if len(calls) == 3:
                raise RuntimeError("mp_adam: the kernels failed")

        patch.setattr(RuleExecutor, "carry_out", third)
        raised = assert_step_fails(*pair, "the step on the host failed.*did not change")
    assert len(calls) == 3 and any(name in str(raised) for name, _ in pair[0].named_parameters())
    assert_trains_like(pair, other)


class FunctionJob:
    label, owner, following = "a job", None, None

    def __init__(self, action):
        self.prepare, self.run = lambda: None, action


def test_worker_thread_ends_when_the_worker_is_deleted():
    worker, threads = Worker("short-lived"), []
    worker.submit(FunctionJob(lambda: threads.append(threading.current_thread())))
    worker.drain()
    del worker
    assert not threads[0].is_alive()


def test_worker_raises_its_set_up_error_when_drained():
    def fail():
        raise MemoryError("no pinned memory")

    worker = Worker("never", set_up=fail)
    worker.submit(FunctionJob(lambda: None))
    started = time.monotonic()
    with pytest.raises(WorkerError, match="no pinned memory"):
        worker.drain()
    assert time.monotonic() - started < SECONDS


SCRIPT = """
import sys, time, threading, signal, os
import torch
from support.models import tokens_of
from support.offload import build_mode, run
from mp_optim.offload.backward_grads import BackwardJob
model, optimizer = build_mode("speculative")
run(model, optimizer, 3)
run_job = BackwardJob.run
BackwardJob.run = lambda job: (time.sleep(1.0), run_job(job))
optimizer.zero_grad()
model(tokens_of(5)).backward()
print("pair_before_step", flush=True)
{end}
"""
ENDS = {
    "sys.exit": ("sys.exit(3)", 3),
    "Ctrl-C in step": (
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs "
        "ignore it\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start(); optimizer.step()",
        -2,
    ),
    "a child": (
        "pid = os.fork()\nif pid == 0:\n    sys.exit(0)\nassert os.waitpid(pid, 0)[1] == 0",
        0,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_interpreter_exits_cleanly_when_the_worker_is_busy(end):
    code, status = ENDS[end]
    script = SCRIPT.format(end=code)
    # torch may take long to end, so only a hang reaches this limit.
    ended = end_forked_program("-c", script, timeout=240)
    assert ended.stdout == "pair_before_step\n", ended.stderr
    assert ended.returncode in (status, 130 if status == -2 else status), ended.stderr
    assert "Fatal" not in ended.stderr
