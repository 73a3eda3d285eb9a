"""What the times in ``metrics()`` mean, told by a clock that goes as the test says."""

import pytest

from mp_optim.offload import timeline as module
from mp_optim.offload.timeline import ARITHMETIC, WAIT_COPIES, WAIT_WORKER, StepTimeline


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def during(stages, clock, name, start, end):
    clock[0] = start
    with stages.stage(name, "a bucket"):
        clock[0] = end


def test_what_is_over_when_the_step_begins_to_wait_is_hidden(clock):
    stages = StepTimeline()
    during(stages, clock, ARITHMETIC[0], 101.0, 103.0)  # all of it during backward
    during(stages, clock, WAIT_COPIES, 103.0, 103.5)
    during(stages, clock, ARITHMETIC[-1], 104.0, 108.0)  # half of it
    clock[0] = 106.0
    stages.begin_step()
    during(stages, clock, WAIT_WORKER, 106.0, 108.0)
    stages.begin_step()  # asked twice: the first time counts
    during(stages, clock, ARITHMETIC[0], 108.0, 109.0)  # none of it
    assert set(stages.metrics().values()) == {0.0}  # the round is not complete
    clock[0] = 110.0
    stages.end_step()
    assert stages.metrics() == {
        "copy_wait_ms": 500.0,
        "worker_wait_ms": 2000.0,
        "host_ms": 7000.0,
        "hidden_ms": 4000.0,
    }
    assert [span.label for span in stages.last] == ["a bucket"] * 5


def test_a_round_that_nobody_waited_for_is_hidden_whole(clock):
    stages = StepTimeline()
    during(stages, clock, ARITHMETIC[0], 101.0, 103.0)
    stages.end_step()
    assert stages.metrics()["hidden_ms"] == stages.metrics()["host_ms"] == 2000.0
    stages.end_step()
    assert stages.last == [] and set(stages.metrics().values()) == {0.0}


def test_a_stage_that_fails_is_timed_too(clock):
    stages = StepTimeline()
    with pytest.raises(KeyError), stages.stage(WAIT_WORKER):
        clock[0] += 0.25
        raise KeyError
    stages.end_step()
    assert stages.metrics()["worker_wait_ms"] == 250.0
