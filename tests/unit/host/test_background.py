"""Calls in background threads: results, errors, and calls that never return."""

import threading

import pytest

from mp_optim.host.calls import in_background


def failing() -> None:
    raise ValueError("told")


def test_in_background_returns_results_raises_errors_and_reuses_threads():
    threads = set()
    for number in range(50):
        result, thread = in_background(
            lambda number=number: (number, threading.get_ident())
        ).result(timeout=30)
        assert result == number
        threads.add(thread)
    assert len(threads) <= 3  # A call may come before the last thread is idle again.
    with pytest.raises(ValueError, match="told"):
        in_background(failing).result(timeout=30)


def test_in_background_runs_a_call_while_another_call_does_not_return():
    gate = threading.Event()
    stuck = in_background(gate.wait)
    assert in_background(lambda: "done").result(timeout=30) == "done"
    assert not stuck.done()
    gate.set()
    assert stuck.result(timeout=30)
