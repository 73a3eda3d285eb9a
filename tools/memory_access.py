#!/usr/bin/env python
"""Print a row of ``mp_optim.kernels.native.KNOWN`` for this CPU: the fastest memory settings.

python tools/memory_access.py --threads 2        # on an idle machine
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import tyro
from measuring.kernels import require_kernels

from mp_optim.kernels.native import MemoryAccess, cpu_maker, get_access, set_access
from mp_optim.kernels.native_library import MpTensors, NativeLibrary, native_library, thread_count

MARGIN = 0.02
"""A setting has to save more than this part of the default's time."""
_ROUNDS = 5
_TRIED: dict[str, tuple[Any, ...]] = {
    "prefetch": (0, 256, 1024, 2048),
    "streaming": (False,),
    "measure_prefetch": (0, 2048),
}


def try_out(library: NativeLibrary, threads: int, numel: int) -> MemoryAccess:
    """Return the fastest settings for Adam's update and for measuring, one field after the other.

    Args:
        threads: of the kernels.
        numel: elements of the scratch memory, 16 bytes each.
    """
    # an FP32 param and two moments, a bf16 gradient and a bf16 output
    memory = [
        torch.zeros(numel, dtype=dtype, device="cpu")
        for dtype in (*[torch.float32] * 3, *[torch.bfloat16] * 2)
    ]
    tables = [(ctypes.c_void_p * 1)(each.data_ptr()) for each in memory]
    main, moment1, moment2, grad, output = map(ctypes.addressof, tables)
    sizes, sums = (ctypes.c_int64 * 1)(numel), (ctypes.c_double * 1)()
    read = {"count": 1, "numel": ctypes.addressof(sizes), "grad": grad, "grad_dtype": 2}
    dtypes = {"main_dtype": 1, "moment1_dtype": 1, "moment2_dtype": 1, "output_dtype": 2}
    columns = {"main": main, "moment1": moment1, "moment2": moment2, "output": output}
    tensors = [ctypes.byref(MpTensors(**each)) for each in (read | columns | dtypes, read)]
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
    library: NativeLibrary, contenders: Sequence[MemoryAccess], run: Callable[[], None]
) -> MemoryAccess:
    """Return the best of several, tried in turn; the first if none is better by `MARGIN`."""
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


@dataclass
class Options:
    """How to measure."""

    threads: int = thread_count()
    """Threads of the kernels."""
    elements: int = 50_000_000
    """Elements of the scratch memory, 16 bytes each: far more than caches hold."""


def main(options: Options) -> None:
    require_kernels()
    library = native_library()
    found = try_out(library, options.threads, options.elements)
    print(f"{(cpu_maker(), library.level)!r}: {found!r},")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
