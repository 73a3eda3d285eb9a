"""The schedules: what goes through which lane, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lab.streaming.lanes import Lane, Schedule
from lab.streaming.machines import GRAD, Form, Machine

WINDOW = 256 << 20
"""Bytes of state in a window."""
IN_FLIGHT = 3
"""Windows on the device at most: one that comes, one that is stepped, one that goes."""
BUCKET = 64 << 20
"""Bytes of gradients in a bucket of the host's; a sixteenth of all if that is less."""


@dataclass(frozen=True)
class Lanes:
    """What the work of a schedule is given to."""

    up: Lane
    down: Lane
    device: Lane
    host: Lane

    @staticmethod
    def of(machine: Machine, streams: bool, hosts: bool) -> Lanes:
        """The lanes of a machine that streams state, steps on the host, or both at once.

        The host's memory is shared. Streaming comes first, since it takes fewer bytes of it for a
        parameter: each direction has half of the memory's rate at most, and the host's step has
        what two busy directions leave. The traffic of the host's own gradients and params is
        counted as work of the host.
        """
        limit = machine.host / 2 if streams else machine.host
        left = machine.host - (2 * machine.each_way if streams and hosts else 0.0)
        return Lanes(
            Lane("up", min(machine.up, limit), machine.latency),
            Lane("down", min(machine.down, limit), machine.latency),
            Lane("device", machine.device, machine.latency),
            Lane("host", left, machine.latency),
        )


def streamed(machine: Machine, form: Form, params: int, window: int = WINDOW) -> Schedule:
    """All state goes up, is stepped on the device and goes down, window by window. Gradients and
    model params stay on the device, whose first work is to measure."""
    schedule = Schedule()
    _stream(schedule, Lanes.of(machine, True, False), form, params, window)
    return schedule


def on_host(machine: Machine, form: Form, params: int) -> Schedule:
    """``sync``: all gradients come down and are measured, then each bucket is stepped and its
    params go up."""
    schedule, lanes = Schedule(), Lanes.of(machine, False, True)
    _step(schedule, lanes, form, params, _measure(schedule, lanes, form, params))
    return schedule


def both(machine: Machine, form: Form, stream: int, host: int, window: int = WINDOW) -> Schedule:
    """Numbers of parameters that are streamed and that the host steps, at the same time. The host's
    gradients come down before state does, and its params go up after state.

    Raises:
        ValueError: streaming leaves nothing of the host's memory
    """
    schedule, lanes = Schedule(), Lanes.of(machine, True, True)
    if lanes.host.rate <= 0:
        raise ValueError(f"{machine.name}: streaming takes all of the host's memory")
    measured = _measure(schedule, lanes, form, host)
    _stream(schedule, lanes, form, stream, window)
    _step(schedule, lanes, form, host, measured)
    return schedule


def behind_backward(machine: Machine, form: Form, params: int, backward: float) -> Schedule:
    """``speculative``: gradients come evenly during ``backward`` seconds, each bucket is measured
    and stepped as it comes, and all params go up once backward is over and everything is
    measured."""
    schedule, lanes = Schedule(), Lanes.of(machine, False, True)
    buckets = list(_buckets(params))
    stepped = []
    for index, count in enumerate(buckets):
        ready = backward * (index + 1) / len(buckets)
        there = schedule.add(lanes.down, count * GRAD, earliest=ready)
        traffic = count * (form.on_host - GRAD)
        stepped.append(schedule.add(lanes.host, traffic, (there,)))
    for count in buckets:
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
        Split(1.0, streamed(machine, form, params, window).seconds),
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
        stream = streamed(machine, form, count, window)
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


def _stream(schedule: Schedule, lanes: Lanes, form: Form, params: int, window: int) -> None:
    schedule.add(lanes.device, params * form.measure)  # the lane's first work
    gone: list[int] = []
    for count in _pieces(params, max(int(window // form.state), 1)):
        free = gone[-IN_FLIGHT:][:1] if len(gone) >= IN_FLIGHT else []
        there = schedule.add(lanes.up, count * form.state, free)
        # The copies read and write the device's memory too.
        traffic = count * (form.update + 2 * form.state)
        stepped = schedule.add(lanes.device, traffic, (there,))
        gone.append(schedule.add(lanes.down, count * form.state, (stepped,)))


def _measure(schedule: Schedule, lanes: Lanes, form: Form, params: int) -> int:
    """The index of the host's last measuring."""
    for count in _buckets(params):
        there = schedule.add(lanes.down, count * GRAD)
        measured = schedule.add(lanes.host, count * (GRAD + form.measure), (there,))
    return measured


def _step(schedule: Schedule, lanes: Lanes, form: Form, params: int, measured: int) -> None:
    for count in _buckets(params):
        stepped = schedule.add(lanes.host, count * (form.update + GRAD), (measured,))
        schedule.add(lanes.up, count * GRAD, (stepped,))


def _buckets(params: int) -> Iterator[int]:
    return _pieces(params, max(min(BUCKET // GRAD, -(-params // 16)), 1))


def _pieces(params: int, size: int) -> Iterator[int]:
    """Parameters of each window: as many as fit, the rest in the last."""
    while params > 0:
        yield min(size, params)
        params -= size
