"""Bytes that calls of native kernels read and write, taken from their tensor tables."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from mp_optim.kernels.native_library import MpTensors, NativeLibrary
from support.accelerator.memory import Deed, Memory, Span
from support.accelerator.simulation import Simulation

_HALF_BYTES = {0: 8, 1: 8, 2: 4, 3: 4, 4: 2, 5: 2, 6: 4, 7: 1}
"""Size of an element in units of 4 bits, by the kernels' dtype code."""
_STATE = ("main", "remainder", "moment1", "moment2")
_WRITTEN: dict[str, tuple[str, ...]] = {
    "mp_step": (*_STATE, "output"),
    "mp_lamb_moments": ("moment1", "moment2"),
    "mp_lamb_apply": ("main", "remainder", "output"),
    "mp_measure": (),
}


def _spans(table: MpTensors, memory: Memory, written: tuple[str, ...]) -> Iterator[Any]:
    numels = (ctypes.c_uint64 * table.count).from_address(table.numel)
    for name, kind in MpTensors._fields_:
        column = getattr(table, name)
        if kind is not ctypes.c_void_p or not column or name in ("numel", "stream"):
            continue
        dtype = getattr(table, f"{name.removeprefix('from_')}_dtype", 0)
        addresses = (ctypes.c_uint64 * table.count).from_address(column)
        for address, numel in zip(addresses, numels, strict=True):
            region = memory.at(address)
            if region is not None:
                start = address - region.base
                size = -(-(1 if "scale" in name else numel) * _HALF_BYTES[dtype] // 2)
                yield Span(region, start, start + size), name in written


def replacement(simulation: Simulation, original: Callable[..., None]) -> Callable[..., None]:
    def call(library: NativeLibrary, name: str, *arguments: Any) -> None:
        if name in _WRITTEN:
            with simulation.lock:
                table = arguments[0]._obj
                deed = Deed(name, list(_spans(table, simulation.memory, _WRITTEN[name])))
                if any(span.region.device is not None for span, _ in deed.spans):
                    simulation.report(f"{name} is given memory of a device")
                simulation.do(deed)
        original(library, name, *arguments)

    return call
