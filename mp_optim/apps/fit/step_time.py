"""Estimated duration of an optimizer step with state in host memory.

It is arithmetic on rates of the bus, of host memory and of the device, without any measurement.
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
"""Bytes of gradients in a bucket on the host; a sixteenth of all gradients if that is less."""


@dataclass(frozen=True)
class Machine:
    """One GPU's share of a machine. Rates are in bytes a second.

    Attributes:
        up: host to device, while the other direction is busy, too.
        down: device to host, while the other direction is busy, too.
        host: host memory, reading and writing together.
        device: device memory, reading and writing together.
        latency: seconds of a window or bucket in addition to its transfer.
    """

    name: str
    up: float
    down: float
    host: float
    device: float
    latency: float = 20e-6


DESKTOP = Machine("PCIe 4, desktop, 2 channels DDR5-5600", 25 * GB, 25 * GB, 71.68 * GB, 907.2 * GB)
"""Assumes 0.8 (host) and 0.9 (device) of the memory bandwidth in the data sheet."""


@dataclass(frozen=True)
class Form:
    """The form of AdamW's state.

    Attributes:
        state: bytes a parameter of main param (or remainder) and both moments.
        reads_param: True if the model param is the upper half of the main param.
    """

    name: str
    state: float
    reads_param: bool

    @property
    def update(self) -> float:
        """Bytes a parameter that a step moves in memory: gradient and state read, state and model
        param written."""
        return GRAD + 2 * self.state + GRAD + GRAD * self.reads_param


def streamed(machine: Machine, form: Form, params: int) -> float:
    """Return the seconds of a step of ``offload_place="streamed"``.

    The device measures all gradients. Then windows of state are copied to the device, stepped and
    copied back, each stage with its own window. Both directions share the host's memory.
    """
    state, shared = params * form.state, machine.host / 2
    windows = max(math.ceil(state / WINDOW), 1)
    # The copies read and write the device's memory, too.
    stepped = params * form.update + 2 * state
    stages = ((state, min(machine.up, shared)), (stepped, machine.device))
    down = (state, min(machine.down, shared))
    return params * GRAD / machine.device + _pipelined(machine, windows, *stages, down)


def on_host(machine: Machine, form: Form, params: int) -> float:
    """Return the seconds of a step of ``offload_mode="sync"`` on the host.

    Buckets of gradients are copied to the host and measured. Then each bucket is stepped, and its
    parameters are copied to the device.
    """
    buckets = max(math.ceil(GRAD * params / BUCKET), min(params, 16))
    grads, up, down = params * GRAD, machine.up, machine.down
    measured = ((grads, min(down, machine.host)), (2 * grads, machine.host))
    stepped = ((params * form.update + grads, machine.host), (grads, min(up, machine.host)))
    return _pipelined(machine, buckets, *measured) + _pipelined(machine, buckets, *stepped)


def _pipelined(machine: Machine, pieces: int, *stages: tuple[float, float]) -> float:
    """Return the seconds of equal pieces that pass through a pipeline of stages.

    Args:
        stages: bytes of all pieces, and bytes a second, of each stage.
    """
    seconds = [machine.latency + size / pieces / rate for size, rate in stages]
    return sum(seconds) + (pieces - 1) * max(seconds)
