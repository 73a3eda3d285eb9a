"""The tables that the documents show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lab.streaming.queues import BEFORE, NOW, streamed_in
from lab.streaming.schedules import FORMS, behind_backward
from mp_optim.apps.fit.step_time import GB, Form, Machine, on_host, streamed

NOT_MEASURED = "Modelled, not measured."
WINDOWS = (64 << 20, 256 << 20, 1 << 30)
ENOUGH = 0.9
"""The share of the bus that streaming should reach."""


@dataclass(frozen=True)
class Setting:
    """What the tables are about: ``params`` of one GPU, ``window`` in bytes, ``backward`` in
    seconds for each 10^9 parameters."""

    machines: tuple[Machine, ...]
    params: int
    window: int
    backward: float


def lines(setting: Setting) -> Iterator[str]:
    """All tables, each after a line that says what it shows."""
    million = setting.params / 1e6
    yield (
        f"{NOT_MEASURED} {million:,.0f} million parameters a GPU, windows of "
        f"{setting.window >> 20} MiB. Gparam/s:"
    )
    yield ""
    yield from rates(setting)
    yield ""
    yield (
        f"{NOT_MEASURED} Seconds of a step after backward, for each 10^9 parameters that the GPU "
        f"steps; backward takes {setting.backward:g} s for as many:"
    )
    yield ""
    yield from exposed(setting)
    yield ""
    yield (
        f"{NOT_MEASURED} Million parameters a GPU from which streaming reaches {ENOUGH:g} of its "
        f"limit ({setting.machines[-1].name}):"
    )
    yield ""
    yield from sizes(setting.machines[-1])
    yield ""
    yield (
        f"{NOT_MEASURED} Milliseconds of a step of {million:,.0f} million parameters, by the order "
        "in which copies are queued:"
    )
    yield ""
    yield from orders(setting)


def rates(setting: Setting) -> Iterator[str]:
    """Gparam/s of every machine and form, with what binds streaming and how near it comes."""
    yield (
        "| machine, GB/s up, down, host memory | state | host | streamed | streaming's limit "
        "| reached |"
    )
    yield "|---" * 6 + "|"
    for machine in setting.machines:
        binds = "bus" if machine.each_way == machine.bus else "host memory"
        for form in FORMS:
            stream = streamed(machine, form, setting.params, setting.window).seconds
            host = on_host(machine, form, setting.params).seconds
            speeds = (_speed(setting.params, s) for s in (host, stream))
            yield (
                f"| {_of(machine)} | {form.name} | {' | '.join(speeds)} | "
                f"{binds}, {machine.each_way / GB:.0f} GB/s each way | "
                f"{reached(machine, form, setting.params, setting.window):.2f} |"
            )


def reached(machine: Machine, form: Form, params: int, window: int) -> float:
    """Streaming's share of the rate at which bus and host memory can carry state each way."""
    seconds = streamed(machine, form, params, window).seconds
    return params * form.state / machine.each_way / seconds


def exposed(setting: Setting) -> Iterator[str]:
    """Seconds after backward: of what begins then, and of what the host did before."""
    yield "| machine | state | host, `sync` | host, `speculative` | streamed |"
    yield "|---" * 5 + "|"
    billions = setting.params / 1e9
    backward = setting.backward * billions
    for machine in setting.machines:
        for form in FORMS:
            hidden = behind_backward(machine, form, setting.params, backward)
            seconds = (
                on_host(machine, form, setting.params).seconds,
                hidden.seconds - backward,
                streamed(machine, form, setting.params, setting.window).seconds,
            )
            cells = " | ".join(f"{each / billions:.3f}" for each in seconds)
            yield f"| {machine.name} | {form.name} | {cells} |"


def sizes(machine: Machine) -> Iterator[str]:
    """From how many parameters on a window is small enough."""
    yield "| window | " + " | ".join(form.name for form in FORMS) + " |"
    yield "|---" * (1 + len(FORMS)) + "|"
    for window in WINDOWS:
        cells = (_fewest(machine, form, window) for form in FORMS)
        yield f"| {window >> 20} MiB | {' | '.join(cells)} |"


def _fewest(machine: Machine, form: Form, window: int) -> str:
    """In whole windows; "never" where a window's latency alone is too long."""
    size = int(window // form.state)
    for windows in range(1, 200):
        if reached(machine, form, windows * size, window) >= ENOUGH:
            return f"{windows * size / 1e6:.0f} ({windows} windows)"
    return "never"


def orders(setting: Setting) -> Iterator[str]:
    """Yield the table of what the order of copies costs."""
    yield "| machine | state | streamed, numbers behind the next window | streamed |"
    yield "|---" * 4 + "|"
    for machine in setting.machines:
        for form in FORMS:
            cells = []
            for order in (BEFORE, NOW):
                seconds = streamed_in(order, machine, form, setting.params, setting.window)
                cells.append(f"{1e3 * seconds:.0f}")
            yield f"| {machine.name} | {form.name} | {' | '.join(cells)} |"


def _of(machine: Machine) -> str:
    up, down, host = (rate / GB for rate in (machine.up, machine.down, machine.host))
    return f"{machine.name}: {up:.0f}, {down:.0f}, {host:.0f}"


def _speed(params: int, seconds: float) -> str:
    return f"{params / seconds / 1e9:.1f}"
