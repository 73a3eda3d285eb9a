"""The model of streamed state: no schedule is faster than what its lanes can carry, none loses a
byte."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.streaming import report
from lab.streaming.queues import BEFORE, NOW, Device, streamed_in
from lab.streaming.schedules import FORMS, behind_backward
from mp_optim.apps.fit.step_time import (
    GB,
    IN_FLIGHT,
    MACHINES,
    WINDOW,
    Form,
    Machine,
    Schedule,
    on_host,
    streamed,
)

SLACK = 1 + 1e-9
"""For sums of floats."""
PARAMS = 4 * 10**9
each_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)

rates = st.floats(1e9, 1e12)
latencies = st.floats(0, 1e-3)
machines = st.builds(Machine, st.just("any"), rates, rates, rates, rates, latencies)
forms = st.sampled_from(FORMS)
counts = st.integers(1, 2 * 10**9)
windows = st.integers(128 << 20, 1 << 30)
quickly = settings(max_examples=100, deadline=None, derandomize=True)


def bytes_through(schedule: Schedule, name: str) -> float:
    """All bytes that go through the lane of a name."""
    return sum(work.bytes for work in schedule.works if work.lane.name == name)


def memory(machine: Machine, form: Form, stream: int, host: int) -> float:
    """Seconds that the host's memory needs for its whole traffic."""
    return (stream * 2 * form.state + host * form.on_host) / machine.host


@quickly
@given(machines, forms, counts, windows)
def test_streaming_loses_no_byte_and_beats_no_lane(machine, form, params, window):
    schedule = streamed(machine, form, params, window)
    state = params * form.state
    assert bytes_through(schedule, "up") == pytest.approx(state)
    assert bytes_through(schedule, "down") == pytest.approx(state)
    traffic = params * (form.measure + form.update) + 2 * state
    assert bytes_through(schedule, "device") == pytest.approx(traffic)
    bound = max(
        state / machine.up,
        state / machine.down,
        traffic / machine.device,
        memory(machine, form, params, 0),
    )
    assert bound <= schedule.seconds * SLACK


@quickly
@given(machines, forms, counts, st.floats(0, 10))
def test_the_host_loses_no_byte_and_beats_no_lane(machine, form, params, backward):
    late = behind_backward(machine, form, params, backward)
    for schedule in (on_host(machine, form, params), late):
        assert bytes_through(schedule, "up") == bytes_through(schedule, "down") == 2 * params
        assert bytes_through(schedule, "host") == pytest.approx(params * form.on_host)
        bound = max(
            2 * params / machine.up, 2 * params / machine.down, memory(machine, form, 0, params)
        )
        assert bound <= schedule.seconds * SLACK
    assert late.seconds - backward >= 2 * params / machine.up / SLACK


@quickly
@given(machines, forms, counts, windows)
def test_work_of_a_lane_is_in_order_and_at_most_three_windows_are_on_the_device(
    machine, form, params, window
):
    works = streamed(machine, form, params, window).works
    for name in ("up", "down", "device"):
        own = [work for work in works if work.lane.name == name]
        assert all(a.end <= b.begin for a, b in itertools.pairwise(own))
    come = [work for work in works if work.lane.name == "up"]
    gone = [work for work in works if work.lane.name == "down"]
    assert all(work.bytes <= window for work in come)
    for index in range(IN_FLIGHT, len(come)):
        assert come[index].begin >= gone[index - IN_FLIGHT].end
    assert all(up.end <= down.begin for up, down in zip(come, gone, strict=True))


@quickly
@given(machines, forms, counts, st.sampled_from(["up", "down", "host", "device"]), st.floats(1, 4))
def test_more_bandwidth_is_never_slower(machine, form, params, rate, times):
    faster = dataclasses.replace(machine, **{rate: getattr(machine, rate) * times})
    for seconds in (
        lambda m: streamed(m, form, params).seconds,
        lambda m: on_host(m, form, params).seconds,
        lambda m: behind_backward(m, form, params, 0.5).seconds,
    ):
        assert seconds(faster) <= seconds(machine) * SLACK


@each_machine
@each_form
def test_streaming_reaches_its_limit_with_the_default_window(machine, form):
    """0.9 of what bus and host memory can carry, from 16 windows of state on."""
    assert WINDOW == 256 << 20
    for windows in (16, 64):
        params = windows * int(WINDOW // form.state)
        assert 0.9 <= report.reached(machine, form, params, WINDOW) <= SLACK
    assert report.reached(machine, form, int(WINDOW // form.state), WINDOW) < 0.7


def test_a_bus_that_host_memory_can_feed_is_the_limit():
    desktop, socket = MACHINES[0], MACHINES[3]
    for machine in (desktop, socket):
        seconds = streamed(machine, FORMS[1], PARAMS).seconds
        assert PARAMS * FORMS[1].state / seconds >= 0.9 * machine.bus
    shared = MACHINES[4]
    assert shared.each_way == shared.host / 2 < shared.bus == socket.bus


def test_by_hand():
    """One window of 100 parameters, and one bucket of the host's."""
    machine = Machine("by hand", 10.0, 5.0, 200.0, 1000.0, latency=1.0)
    form = FORMS[0]
    # measured; up 1 + 1200 / 10, stepped 1 + (2800 + 2400) / 1000, down 1 + 1200 / 5
    assert streamed(machine, form, 100, 1200).seconds == pytest.approx(121 + 6.2 + 241)
    # down 1 + 2 * 100 / 5, measured 1 + 2, stepped 1 + 15, up 1 + 20, in one piece
    one = on_host(machine, form, 1)
    assert one.seconds == pytest.approx(1.4 + 1.02 + 1.15 + 1.2)


def test_traffic_of_a_form_is_that_of_the_kernels():
    """docs/benchmarks.md: 30 bytes with FP32 state are moved by a full step on the host."""
    assert [form.measure + form.update for form in FORMS][:2] == [30, 20]
    assert FORMS[2].state == pytest.approx(4 + 8 / 256)


def test_the_tables_are_the_same_each_time_and_take_other_machines():
    mine = Machine("mine", 20 * GB, 20 * GB, 60 * GB, 900 * GB)
    setting = report.Setting((mine,), 10**9, WINDOW, 0.5)
    lines = list(report.lines(setting))
    assert lines == list(report.lines(setting))
    assert sum("not measured" in line for line in lines) == 4
    assert sum(line.startswith("| mine") for line in lines) == 3 * len(FORMS)


@each_machine
@each_form
def test_numbers_that_go_up_first_let_uploads_and_kernels_run_side_by_side(machine, form):
    """Else a window's kernel waits for the next window, and that for the kernel before."""
    now = streamed_in(NOW, machine, form, 10**9)
    before = streamed_in(BEFORE, machine, form, 10**9)
    ideal = streamed(machine, form, 10**9)
    assert now == pytest.approx(ideal.seconds, rel=2e-3)
    kernels = sum(work.end - work.begin for work in ideal.works if work.lane.name == "device")
    assert before - now > 0.5 * (kernels - 2e-5)


def test_queues_by_hand():
    """An engine takes what got ready first; a stream goes on at once, another one an event
    later."""
    device = Device()
    first = device.queue("up", "up", 1.0)
    device.queue("up", "up", 1.0)
    row = device.queue("compute", "up", 0.5, [first])
    other = device.queue("other", "down", 3.0, [row])
    device.wait(row)
    assert row.end == device.now == device.waited == 2.5
    assert device.finish() == other.end == pytest.approx(5.5, abs=1e-4)


def test_a_window_that_is_all_latency_never_reaches_the_limit():
    slow = dataclasses.replace(MACHINES[-1], latency=1e-3)
    assert "never" in list(report.sizes(slow))[2]
