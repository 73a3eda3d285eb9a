"""Model the time of a step whose state is in host memory: stepped by the host, or streamed through
the accelerator. Prints markdown, by default the tables of docs/benchmarks/streaming.md. Nothing is
measured.

$ python tests/lab streams
$ python tests/lab streams --rates 25 25 60 900      # your own machine
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.streaming import report
from mp_optim.apps.fit.step_time import GB, MACHINES, WINDOW, Machine


@dataclass
class Options:
    """What to model."""

    params: float = 4e9
    """Parameters whose state one GPU steps."""
    window: int = WINDOW >> 20
    """MiB of state in a window; three are on the device."""
    backward: float = 0.5
    """Seconds of backward for each 10^9 parameters that the GPU steps."""
    rates: tuple[float, float, float, float] | None = None
    """GB/s of one GPU, instead of the machines of the documents: the bus up and down while both are
    busy, host memory, device memory (each reading and writing together)."""


def main(options: Options) -> int:
    machines = MACHINES
    if options.rates is not None:
        machines = (Machine("as given", *(rate * GB for rate in options.rates)),)
    setting = report.Setting(machines, int(options.params), options.window << 20, options.backward)
    print("\n".join(report.lines(setting)))
    return 0
