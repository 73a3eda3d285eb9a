"""Calls of the native kernels: which bytes they touch, read from the tables that they are given."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from mp_optim.update.backends.native_library import MpTensors, NativeLibrary
from support.accelerator.memory import Deed, Memory, Span
from support.accelerator.simulation import Simulation

_HALF_BYTES = {0: 8, 1: 8, 2: 4, 3: 4, 4: 2, 5: 2, 6: 4, 7: 1}
"""Units of 4 bits of an element, by the kernels' code of its dtype."""
_STATE = ("main", "remainder", "moment1", "moment2", "moment3")
_WRITTEN: dict[str, tuple[str, ...]] = {
    "mp_step": (*_STATE, "output"),
    "mp_lamb_moments": ("moment1", "moment2"),
    "mp_lamb_apply": ("main", "remainder", "output"),
    "mp_measure": (),
}
_QUEUED = ("mp_step",)
"""Kernels that tell the host nothing."""


class _Table:
    """A copy of the table that a kernel is given, which stays when the caller's goes."""

    def __init__(self, table: MpTensors) -> None:
        self.tensors = MpTensors.from_buffer_copy(table)
        self._columns: dict[str, Any] = {}
        for name, kind in MpTensors._fields_:
            address = getattr(table, name)
            if kind is ctypes.c_void_p and address:
                item = ctypes.c_uint32 if name == "stream" else ctypes.c_uint64
                column = (item * table.count)()
                ctypes.memmove(column, address, ctypes.sizeof(column))
                self._columns[name] = column
                setattr(self.tensors, name, ctypes.addressof(column))

    def spans(self, memory: Memory, written: tuple[str, ...]) -> Iterator[tuple[Span, bool]]:
        """The bytes of all tensors, and whether they are written."""
        for name, column in self._columns.items():
            if name in ("numel", "stream"):
                continue
            dtype = getattr(self.tensors, f"{name.removeprefix('from_')}_dtype", 0)
            for address, numel in zip(column, self._columns["numel"], strict=True):
                region = memory.at(address)
                if region is not None:
                    count = 1 if "scale" in name else numel
                    start = address - region.base
                    size = -(-count * _HALF_BYTES[dtype] // 2)
                    span = Span(region, start, start + size)
                    yield span, name in written


def replacement(simulation: Simulation, original: Callable[..., None]) -> Callable[..., None]:
    """For ``NativeLibrary.call``: kernels on memory of a device are launches there."""

    def call(library: NativeLibrary, name: str, *arguments: Any) -> None:
        if name not in _WRITTEN:
            return original(library, name, *arguments)
        with simulation.lock:
            table = _Table(arguments[0]._obj)
            deed = Deed(name, list(table.spans(simulation.memory, _WRITTEN[name])))

            def run() -> None:
                original(library, name, ctypes.byref(table.tensors), *arguments[1:])

            if _launch(simulation, deed, run):
                return None
            simulation.do(deed)
        return original(library, name, *arguments)

    return call


def _launch(simulation: Simulation, deed: Deed, run: Callable[[], None]) -> bool:
    """Queue a kernel on the device that has some of its memory, if one has."""
    regions = [span.region for span, _ in deed.spans]
    devices = [region.device for region in regions if region.device is not None]
    if not devices:
        return False
    stream = simulation.thread.streams[devices[0]]
    for region in regions:
        if region.device is None:
            if region.is_page_locked:
                simulation.report(f"{deed.what} on {stream.name} is given host memory")
            region.device, region.home = devices[0], stream
    simulation.queue(stream, run, deed)
    if deed.what not in _QUEUED:
        simulation.finish(stream)
    return True
