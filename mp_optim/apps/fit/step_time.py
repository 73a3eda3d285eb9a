"""Estimated duration of an optimizer step with state in host memory.

The estimate is computed from the rates of the bus, of host memory and of the device, without any
measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GB = 1e9
GRAD = 2
"""Bytes of a 16-bit gradient or model parameter."""
WINDOW = 256 << 20
"""Bytes of state in a window."""
BUCKET = 64 << 20
"""Largest bytes of gradients in a bucket on the host. A bucket has at most a sixteenth of all
gradients."""


@dataclass(frozen=True)
class Machine:
    """One GPU's share of a machine. Rates are in bytes a second.

    Attributes:
        name: name of the machine.
        up: host to device, while the other direction is busy, too.
        down: device to host, while the other direction is busy, too.
        host: host memory, reading and writing together.
        device: device memory, reading and writing together.
        disk: reading or writing.
        latency: seconds of a window or bucket in addition to its transfer.
    """

    name: str
    up: float
    down: float
    host: float
    device: float
    disk: float = 3 * GB
    latency: float = 20e-6


DESKTOP = Machine("PCIe 4, desktop, 2 channels DDR5-5600", 25 * GB, 25 * GB, 71.68 * GB, 907.2 * GB)
"""A desktop with an RTX 4090. The rates are 0.8 (host) and 0.9 (device) of the memory bandwidth in
the data sheets."""


@dataclass(frozen=True)
class Form:
    """The storage format of AdamW's state.

    Attributes:
        name: name of the format.
        state: bytes per parameter of main param (or remainder) and both moments.
        reads_param: True if the model param is the upper half of the main param, so that a step
            reads it.
    """

    name: str
    state: float
    reads_param: bool

    @property
    def update(self) -> float:
        """Bytes per parameter that a step reads (gradient and state) and writes (state and model
        param)."""
        return GRAD + 2 * self.state + GRAD + GRAD * self.reads_param


def streamed(machine: Machine, form: Form, params: int) -> float:
    """Return the seconds of a step with ``offload_place="streamed"``.

    The device measures all gradients. Then windows of state are copied to the device, stepped and
    copied back. The three stages process different windows at the same time. The two copies share
    the bandwidth of the host's memory.
    """
    state, shared = params * form.state, machine.host / 2
    windows = max(math.ceil(state / WINDOW), 1)
    # The copies also read and write the device's memory, so less bandwidth is left for the step.
    stepped = params * form.update + 2 * state
    stages = ((state, min(machine.up, shared)), (stepped, machine.device))
    down = (state, min(machine.down, shared))
    return params * GRAD / machine.device + _pipelined(machine, windows, *stages, down)


def on_host(machine: Machine, form: Form, params: int) -> float:
    """Return the seconds of a step with ``offload_mode="sync"`` on the host.

    Buckets of gradients are copied to the host and measured. Then each bucket is stepped, and the
    bucket's parameters are copied to the device.
    """
    buckets = max(math.ceil(GRAD * params / BUCKET), min(params, 16))
    grads, up, down = params * GRAD, machine.up, machine.down
    measured = ((grads, min(down, machine.host)), (2 * grads, machine.host))
    stepped = ((params * form.update + grads, machine.host), (grads, min(up, machine.host)))
    return _pipelined(machine, buckets, *measured) + _pipelined(machine, buckets, *stepped)


def _pipelined(machine: Machine, pieces: int, *stages: tuple[float, float]) -> float:
    """Return the seconds in which pieces of equal size pass through a pipeline of stages.

    Args:
        machine: machine with the latency of a piece.
        pieces: number of pieces.
        stages: for each stage, bytes of all pieces, and bytes a second.
    """
    seconds = [machine.latency + size / pieces / rate for size, rate in stages]
    return sum(seconds) + (pieces - 1) * max(seconds)
