"""Schedules that the documents compare with those of ``mp_optim.apps.fit.step_time``: streamed and
host at once, behind backward, and the best split of both; and the forms of state that their tables
show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mp_optim.apps.fit.step_time import (
    GRAD,
    WINDOW,
    Form,
    Lanes,
    Machine,
    Schedule,
    buckets,
    measure_on_host,
    on_host,
    step_on_host,
    stream_windows,
    streamed,
)

SCALES = 2 * 4 / 256
"""Two 8-bit moments: an FP32 scale for each block of 256."""

FORMS = (
    Form("FP32", 12, reads_param=False),
    Form("bf16 moments, 16-bit remainder", 6, reads_param=True),
    Form("8-bit moments, 16-bit remainder", 4 + SCALES, reads_param=True),
)


def whole(form: Form) -> Form:
    """The form with main params that rest on the host, all of them: where the host steps some of
    them, none is left on the device for its upper half."""
    return replace(form, state=form.state + GRAD, reads_param=False) if form.reads_param else form


def both(machine: Machine, form: Form, stream: int, host: int, window: int = WINDOW) -> Schedule:
    """Numbers of parameters that are streamed and that the host steps, at the same time. The host's
    gradients come down before state does, and its params go up after state.

    Raises:
        ValueError: streaming leaves nothing of the host's memory
    """
    schedule, lanes = Schedule(), Lanes.of(machine, True, True)
    if lanes.host.rate <= 0:
        raise ValueError(f"{machine.name}: streaming takes all of the host's memory")
    measured = measure_on_host(schedule, lanes, form, host)
    stream_windows(schedule, lanes, whole(form), stream, window)
    step_on_host(schedule, lanes, form, host, measured)
    return schedule


def behind_backward(machine: Machine, form: Form, params: int, backward: float) -> Schedule:
    """``speculative``: gradients come evenly during ``backward`` seconds, each bucket is measured
    and stepped as it comes, and all params go up once backward is over and everything is
    measured."""
    schedule, lanes = Schedule(), Lanes.of(machine, False, True)
    counts = list(buckets(params))
    stepped = []
    for index, count in enumerate(counts):
        ready = backward * (index + 1) / len(counts)
        there = schedule.add(lanes.down, count * GRAD, earliest=ready)
        traffic = count * (form.on_host - GRAD)
        stepped.append(schedule.add(lanes.host, traffic, (there,)))
    for count in counts:
        # The verdict needs every gradient: the last come as backward ends.
        schedule.add(lanes.host, count * GRAD, stepped[-1:])
        schedule.add(lanes.up, count * GRAD, stepped[-1:])
    return schedule


@dataclass(frozen=True)
class Split:
    """Which share of the parameters is streamed, and how many seconds the step takes then."""

    share: float
    seconds: float


def auto(machine: Machine, form: Form, params: int, window: int = WINDOW) -> Split:
    """Streamed and host at once, split so that both finish together; one of them alone where that
    is as fast."""
    tried = [
        Split(0.0, on_host(machine, form, params).seconds),
        Split(1.0, streamed(machine, whole(form), params, window).seconds),
    ]
    low, high = 0, params
    while machine.each_way < machine.host / 2 and high - low > max(params // 1000, 1):
        count = (low + high) // 2
        schedule = both(machine, form, count, params - count, window)
        tried.append(Split(count / params, schedule.seconds))
        done = {lane.name: end for lane, end in schedule.free.items()}
        if done.get("down", 0.0) < done["host"]:
            low = count
        else:
            high = count
    return min(tried, key=lambda split: split.seconds)


def auto_behind_backward(
    machine: Machine, form: Form, params: int, backward: float, window: int = WINDOW
) -> Split:
    """The host steps what fits behind backward, the rest is streamed after it; ``seconds`` are
    those after backward. The host's params go up first, then streaming begins."""

    def exposed(count: int) -> float:
        host = behind_backward(machine, form, params - count, backward)
        stream = streamed(machine, whole(form), count, window)
        return max(host.seconds - backward, 0.0) + stream.seconds * (count > 0)

    count = _least(exposed, params)
    return Split(count / params, exposed(count))


def _least(of: Callable[[int], float], end: int) -> int:
    """The number from 0 to ``end`` where a function that falls and then rises is least, to a
    thousandth of ``end``; both ends are tried too."""
    low, high = 0, end
    while high - low > max(end // 1000, 2):
        third = (high - low) // 3
        if of(low + third) <= of(high - third):
            high -= third
        else:
            low += third
    return min(0, end, low, high, key=of)
