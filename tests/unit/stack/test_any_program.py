"""Random programs over the public API keep its promises; ``python tests/lab programs --minutes N``
tries more."""

import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from lab.any_program.breaking import signal_at
from lab.any_program.machine import AnyProgram


@pytest.mark.repeats
@pytest.mark.timeout(900)  # Hypothesis shortens a failing program before it reports the failure.
@pytest.mark.parametrize(("operations", "programs"), [(6, 80), (15, 80), (40, 40)])
def test_random_programs_keep_the_promises_of_the_public_api(operations, programs):
    run_state_machine_as_test(
        AnyProgram,
        settings=settings(
            max_examples=programs,
            stateful_step_count=operations,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            print_blob=False,
        ),
    )


HOLD = """
def hold(lock, way):
    with lock:
        x = len(way)
        if way == "value":
            return x
        if way == "none":
            return None
        while way == "loop" and x < 6:
            with lock:
                x += 1
    return x
"""


@pytest.mark.parametrize("way", ["value", "none", "loop", "through"])
def test_lock_is_released_when_a_signal_interrupts_any_line_of_a_with_block(way):
    """A signal between the last operation of a block and its exit call would keep the lock."""
    module: dict[str, Any] = {}
    exec(compile(HOLD, "mp_optim/hold.py", "exec"), module)
    interrupted = 0
    for line in range(20):
        lock = threading.RLock()
        try:
            with signal_at(line):
                module["hold"](lock, way)
        except KeyboardInterrupt:
            interrupted += 1
        taken: list[bool] = []
        other = threading.Thread(target=lambda: taken.append(lock.acquire(timeout=1.0)))  # noqa: B023
        other.start()
        other.join()
        assert taken == [True], line
    assert 3 <= interrupted < 20
