"""How the native kernels go through memory: how far ahead they fetch, and whether what they do not
read again goes past the caches.

No result depends on it. Makes of CPU differ in what is fastest: those in :data:`KNOWN` are looked
up, on others the first large launch tries a few settings on memory of its own, once a process, and
keeps the default unless another one is faster by more than :data:`MARGIN`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mp_optim.update.backends import native_library as lib

ACCESS_VARIABLE = "MP_OPTIM_MEMORY_ACCESS"
"""``trial``, ``default``, or settings such as ``prefetch=1024,streaming=0``; else as said above."""
LARGE = 1 << 23
"""Elements of a launch that is worth a trial, and of the trial: far more than caches hold."""
MARGIN = 0.02
_ROUNDS = 5


@dataclass(frozen=True)
class MemoryAccess:
    """Settings of the kernels.

    Attributes:
        prefetch: elements from what an update uses to what it fetches; 0 leaves it to the CPU.
        streaming: whether 16-bit params of large launches are written past the caches.
        measure_prefetch: bytes from what a measurement reads to what it fetches; 0 as above.
    """

    prefetch: int = 512
    streaming: bool = True
    measure_prefetch: int = 8192

    @classmethod
    def parse(cls, text: str) -> MemoryAccess:
        """The inverse of ``str``; what is left out is as by default.

        Raises:
            ValueError: a name is none of the fields, or a value no whole number from 0.
        """
        names = [spec.name for spec in dataclasses.fields(cls)]
        settings: dict[str, int] = {}
        for item in text.split(","):
            name, _, value = item.strip().partition("=")
            if name not in names or not value.isdecimal():
                raise ValueError(
                    f"{ACCESS_VARIABLE}={text!r}: {item.strip()!r} is none of trial, default, "
                    + ", ".join(f"{known}=NUMBER" for known in names)
                )
            settings[name] = int(value)
        streaming = bool(settings.pop("streaming", True))
        return cls(**settings, streaming=streaming)

    def __str__(self) -> str:
        return (
            f"prefetch={self.prefetch},streaming={int(self.streaming)},"
            f"measure_prefetch={self.measure_prefetch}"
        )


KNOWN = {("GenuineIntel", "avx512"): MemoryAccess()}
"""By maker of the CPU and level of instructions: measured with :func:`try_out` on 50 million
elements, and nothing was faster by more than the margin."""


_Access = lib.scalars("", "prefetch streaming measure_prefetch")
"""``MpAccess``."""


def set_access(library: lib.NativeLibrary, access: MemoryAccess) -> None:
    """Use these settings from now on, in this process."""
    values = _Access(access.prefetch, access.streaming, access.measure_prefetch)
    library.call("mp_set_access", ctypes.byref(values))


def get_access(library: lib.NativeLibrary) -> MemoryAccess:
    """The settings in use."""
    values = _Access()
    library.call("mp_access", ctypes.byref(values))
    return MemoryAccess(values.prefetch, bool(values.streaming), values.measure_prefetch)


# -- the choice -----------------------------------------------------------------------------------


class AccessChoice:
    """Settles once what the kernels of a process use.

    Attributes:
        reason: why it is what it is, in words.
        is_settled: whether nothing is left to find out.
    """

    def __init__(self, library: lib.NativeLibrary) -> None:
        self._library = library
        self._lock = threading.Lock()
        self.is_settled = True
        if library.handle is None:
            self.reason = "no native kernels"
        elif wanted := os.environ.get(ACCESS_VARIABLE, ""):
            self.reason, self.is_settled = f"{ACCESS_VARIABLE}={wanted}", wanted != "trial"
            if wanted not in ("trial", "default"):
                set_access(library, MemoryAccess.parse(wanted))
        else:
            maker = cpu_maker()
            known = KNOWN.get((maker, library.level))
            self.reason = f"known for {maker} with {library.level}"
            if known is None:
                self.reason = f"default; {maker} with {library.level} is tried at the first step"
                self.is_settled = False
            else:
                set_access(library, known)

    def settle(self, threads: int) -> None:
        """Try what is fastest here, with so many threads, unless that is settled.

        Threads that come meanwhile wait; a process that has no memory for it keeps the default.
        """
        with self._lock:
            if self.is_settled:
                return
            self.is_settled = True
            try:
                set_access(self._library, try_out(self._library, threads))
                self.reason = f"tried on {cpu_maker()}"
            except MemoryError:
                self.reason = "default; there was no memory for a trial"

    def describe(self) -> str:
        """The settings in use and why."""
        if self._library.handle is None:
            return self.reason
        return f"{get_access(self._library)} ({self.reason})"


def cpu_maker() -> str:
    """``GenuineIntel``, ``AuthenticAMD``, ``ARM 0x41``, or what the system says otherwise."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip()
        if name.strip() == "CPU implementer":
            return f"ARM {value.strip()}"
    return platform.processor() or platform.machine()


# -- the trial ------------------------------------------------------------------------------------

_TRIED: dict[str, tuple[Any, ...]] = {
    "prefetch": (0, 256, 1024, 2048),
    "streaming": (False,),
    "measure_prefetch": (0, 2048),
}


def try_out(library: lib.NativeLibrary, threads: int, numel: int = LARGE) -> MemoryAccess:
    """The fastest settings for Adam's update and for measuring, one field after the other.

    Args:
        numel: elements of the scratch memory, 16 bytes each.

    Raises:
        MemoryError: there is not that much.
    """
    try:  # an FP32 param and two moments, a bf16 gradient and a bf16 output
        memory = [
            torch.zeros(numel, dtype=dtype, device="cpu")
            for dtype in (*[torch.float32] * 3, *[torch.bfloat16] * 2)
        ]
    except RuntimeError as error:  # torch's word for no memory
        raise MemoryError(str(error)) from error
    tables = [(ctypes.c_void_p * 1)(each.data_ptr()) for each in memory]
    main, moment1, moment2, grad, output = map(ctypes.addressof, tables)
    sizes, sums = (ctypes.c_int64 * 1)(numel), (ctypes.c_double * 1)()
    read = {"count": 1, "numel": ctypes.addressof(sizes), "grad": grad, "grad_dtype": 2}
    dtypes = {"main_dtype": 1, "moment1_dtype": 1, "moment2_dtype": 1, "output_dtype": 2}
    columns = {"main": main, "moment1": moment1, "moment2": moment2, "output": output}
    tensors = [ctypes.byref(lib.MpTensors(**each)) for each in (read | columns | dtypes, read)]
    scalars = (ctypes.c_float * 12)(1.0, 0.9, 0.1, 0.999, 0.001, 1e-8)
    adam = b"adam", scalars, len(scalars), None, threads
    update = partial(library.call, "mp_step", tensors[0], *adam)
    measure = partial(library.call, "mp_measure", tensors[1], sums, None, threads)
    before, best = get_access(library), MemoryAccess()
    try:
        for name, values in _TRIED.items():
            run = measure if name == "measure_prefetch" else update
            contenders = [best, *(replace(best, **{name: value}) for value in values)]
            best = _fastest(library, contenders, run)
    finally:
        set_access(library, before)
    return best


def _fastest(
    library: lib.NativeLibrary, contenders: Sequence[MemoryAccess], run: Callable[[], None]
) -> MemoryAccess:
    """The best of several, tried in turn; the first one if none is better by :data:`MARGIN`."""
    seconds: dict[MemoryAccess, list[float]] = {access: [] for access in contenders}
    run()
    for _ in range(_ROUNDS):
        for access in contenders:
            set_access(library, access)
            started = time.perf_counter()
            run()
            seconds[access].append(time.perf_counter() - started)
    medians = {access: statistics.median(times) for access, times in seconds.items()}
    fastest = min(contenders, key=medians.__getitem__)
    limit = (1.0 - MARGIN) * medians[contenders[0]]
    return fastest if medians[fastest] < limit else contenders[0]
