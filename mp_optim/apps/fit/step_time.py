"""How long an optimizer step takes whose state lies in host memory: arithmetic on rates of the bus,
of host memory and of the device. Nothing here is measured.

A schedule is given to lanes (a direction of the bus, the device, the host), each of which does one
piece of work after the other. ``docs/benchmarks/streaming.md`` has the tables and what is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

# -- machines and forms of state ------------------------------------------------------------------
#
# Rates are bytes a second of ONE GPU: where several share a host, its memory is divided among them.

GB = 1e9
GRAD = 2
"""Bytes of a gradient, and of a model param, in 16 bits."""


@dataclass(frozen=True)
class Machine:
    """What one GPU has of a machine. All rates in bytes a second."""

    name: str
    up: float
    """Host to device, while the other direction is busy too."""
    down: float
    """Device to host, likewise."""
    host: float
    """Host memory, reading and writing together: copies and the host's step share it."""
    device: float
    """The device's memory, reading and writing together."""
    latency: float = 20e-6
    """Seconds that one window costs on each lane beside its bytes: launches, events, addresses."""

    @property
    def bus(self) -> float:
        """The rate of the slower direction."""
        return min(self.up, self.down)

    @property
    def each_way(self) -> float:
        """How fast state can go up and down at the same time: host memory is read and written for
        it."""
        return min(self.bus, self.host / 2)


@dataclass(frozen=True)
class Form:
    """How AdamW's state is stored; bytes a parameter."""

    name: str
    state: float
    """Main param (or its remainder) and both moments."""
    reads_param: bool
    """Whether the model param is the upper half of the main param, so that it is read too."""

    @property
    def update(self) -> float:
        """Memory traffic of stepping: gradient read, state read and written, model param
        written."""
        return GRAD + 2 * self.state + GRAD + GRAD * self.reads_param

    @property
    def measure(self) -> float:
        """Memory traffic of measuring: each gradient is read once."""
        return GRAD

    @property
    def on_host(self) -> float:
        """Host memory traffic of a parameter that the host steps: its gradient comes in, is
        measured and stepped, and the new model param goes out."""
        return GRAD + self.measure + self.update + GRAD


# Of a data sheet's memory bandwidth, what a program reaches.
HOST_SHARE, DEVICE_SHARE = 0.8, 0.9


def _machine(name: str, bus: tuple[float, float], host: float, device: float) -> Machine:
    """Rates in GB/s: the bus up and down as it is measured, memory by its data sheet."""
    up, down = bus
    return Machine(name, up * GB, down * GB, HOST_SHARE * host * GB, DEVICE_SHARE * device * GB)


MACHINES = (
    _machine("PCIe 4, desktop, 2 channels DDR5-5600", (25, 25), 2 * 44.8, 1008),
    _machine("PCIe 4, 1 of 8 GPUs, DGX A100", (25, 25), 16 * 25.6 / 8, 2039),
    _machine("the same, directions in each other's way", (12, 24), 16 * 25.6 / 8, 2039),
    _machine("PCIe 5, 1 GPU a socket, 8 channels DDR5-4800", (50, 50), 8 * 38.4, 3350),
    _machine("PCIe 5, 1 of 8 GPUs, DGX H100", (50, 50), 16 * 38.4 / 8, 3350),
    Machine("NVLink-C2C, GH200", 375 * GB, 297 * GB, 486 * GB, 3400 * GB),
)


# -- lanes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lane:
    """A direction of the bus, the device or the host: one piece of work after the other, in the
    order they were given, as in a CUDA stream."""

    name: str
    rate: float
    """Bytes a second."""
    latency: float = 0.0
    """Seconds that a piece takes whatever its size."""


@dataclass(frozen=True)
class Work:
    """A piece of work: bytes through a lane, from ``begin`` to ``end`` in seconds."""

    lane: Lane
    bytes: float
    begin: float
    end: float


@dataclass
class Schedule:
    """Work in the order in which it was given to its lanes."""

    works: list[Work] = field(default_factory=list)
    free: dict[Lane, float] = field(default_factory=dict)
    """When each lane is done with what it was given."""

    def add(self, lane: Lane, size: float, after: Iterable[int] = (), earliest: float = 0.0) -> int:
        """Give ``size`` bytes to a lane. They wait for the work whose indices are in ``after``, and
        for ``earliest``. Returns the index of this work."""
        ready = max((self.works[i].end for i in after), default=0.0)
        begin = max(earliest, ready, self.free.get(lane, 0.0))
        self.free[lane] = begin + lane.latency + size / lane.rate
        self.works.append(Work(lane, size, begin, self.free[lane]))
        return len(self.works) - 1

    @property
    def seconds(self) -> float:
        """When everything is done."""
        return max(self.free.values(), default=0.0)


# -- schedules: what goes through which lane, in which order --------------------------------------

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
    def of(machine: Machine, streams: bool) -> Lanes:
        """Return the lanes of a machine that streams state, or steps on the host.

        Streaming shares the host's memory between two directions: each has half of its rate at
        most. The traffic of the host's own gradients and params is counted as work of the host.
        """
        limit = machine.host / 2 if streams else machine.host
        return Lanes(
            Lane("up", min(machine.up, limit), machine.latency),
            Lane("down", min(machine.down, limit), machine.latency),
            Lane("device", machine.device, machine.latency),
            Lane("host", machine.host, machine.latency),
        )


def streamed(machine: Machine, form: Form, params: int, window: int = WINDOW) -> Schedule:
    """All state goes up, is stepped on the device and goes down, window by window. Gradients and
    model params stay on the device, whose first work is to measure."""
    schedule = Schedule()
    stream_windows(schedule, Lanes.of(machine, streams=True), form, params, window)
    return schedule


def on_host(machine: Machine, form: Form, params: int) -> Schedule:
    """``sync``: all gradients come down and are measured, then each bucket is stepped and its
    params go up."""
    schedule, lanes = Schedule(), Lanes.of(machine, streams=False)
    step_on_host(schedule, lanes, form, params, measure_on_host(schedule, lanes, form, params))
    return schedule


def stream_windows(schedule: Schedule, lanes: Lanes, form: Form, params: int, window: int) -> None:
    schedule.add(lanes.device, params * form.measure)  # the lane's first work
    gone: list[int] = []
    for count in _pieces(params, max(int(window // form.state), 1)):
        free = gone[-IN_FLIGHT:][:1] if len(gone) >= IN_FLIGHT else []
        there = schedule.add(lanes.up, count * form.state, free)
        # The copies read and write the device's memory too.
        traffic = count * (form.update + 2 * form.state)
        stepped = schedule.add(lanes.device, traffic, (there,))
        gone.append(schedule.add(lanes.down, count * form.state, (stepped,)))


def measure_on_host(schedule: Schedule, lanes: Lanes, form: Form, params: int) -> int:
    """The index of the host's last measuring."""
    for count in buckets(params):
        there = schedule.add(lanes.down, count * GRAD)
        measured = schedule.add(lanes.host, count * (GRAD + form.measure), (there,))
    return measured


def step_on_host(schedule: Schedule, lanes: Lanes, form: Form, params: int, measured: int) -> None:
    for count in buckets(params):
        stepped = schedule.add(lanes.host, count * (form.update + GRAD), (measured,))
        schedule.add(lanes.up, count * GRAD, (stepped,))


def buckets(params: int) -> Iterator[int]:
    return _pieces(params, max(min(BUCKET // GRAD, -(-params // 16)), 1))


def _pieces(params: int, size: int) -> Iterator[int]:
    """Parameters of each window: as many as fit, the rest in the last."""
    while params > 0:
        yield min(size, params)
        params -= size
