"""Machines and forms of state that the model is asked about. Rates are bytes a second for ONE GPU:
where several share a host, its memory is divided among them."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def on_bus(self) -> float:
        """Host memory traffic of a parameter that is streamed."""
        return 2 * self.state


SCALES = 2 * 4 / 256
"""Two 8-bit moments: an FP32 scale for each block of 256."""

FORMS = (
    Form("FP32", 12, reads_param=False),
    Form("bf16 moments, 16-bit remainder", 6, reads_param=True),
    Form("8-bit moments, 16-bit remainder", 4 + SCALES, reads_param=True),
)

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
