"""Loader of the compiled kernels of ``kernels/csrc``, and the number of their threads.

If the kernels are missing, the loader returns the reason.
"""

from __future__ import annotations

import ctypes
import operator
import os
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mp_optim.host.host_share import host_share

ENVIRONMENT = "MP_OPTIM_NATIVE"
"""Environment variable: ``off``, or the instruction-set level to use (``avx512``, ``avx2``,
``neon``). By default the best level of the CPU is used."""

_ABI = 22
_STATUS = {
    1: "a null pointer, negative size or unknown dtype reached the kernels",
    2: "out of memory",
    3: "the kernels failed",
}


_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def structure(*fields: tuple[Any, str]) -> Any:
    """Return a ctypes class for a struct of ``csrc/api.h``.

    Args:
        *fields: C type and names of neighboring fields of this type, in order.
    """
    each = [(name, kind) for kind, names in fields for name in names.split()]
    return type("Structure", (ctypes.Structure,), {"_fields_": each})


MpTensors = structure(
    (_N, "count"),
    (_P, "numel main remainder grad moment1 moment2 scale1 scale2 output stream"),
    (_I, "main_dtype remainder_dtype grad_dtype moment1_dtype moment2_dtype output_dtype"),
    (ctypes.c_uint32, "seed"),
    (_P, "from_main from_remainder from_moment1 from_moment2 from_scale1 from_scale2"),
    (_P, "average from_average"),
    (_I, "average_dtype"),
    (_F, "average_weight"),
    (_P, "changed"),
    (_I, "follows"),
)
"""Addresses, sizes and dtypes of the tensors of a call."""
Lamb = structure(
    (_F, "multiplier beta1 grad_weight beta2 one_minus_beta2 eps inv_bias1 inv_sqrt_bias2"),
    (_F, "decay l2"),
)
Muon = structure((_F, "multiplier average ahead"), (_I, "average_from_end ahead_from_end nesterov"))
_T = ctypes.POINTER(MpTensors)
_SIGNATURES = {
    "mp_step": [_T, ctypes.c_char_p, _P, _I, _I],
    "mp_lamb_moments": [_T, ctypes.POINTER(Lamb), _P, _I],
    "mp_lamb_apply": [_T, ctypes.POINTER(Lamb), _P, _I],
    "mp_muon_momentum": [_T, ctypes.POINTER(Muon), _I],
    "mp_muon_apply": [_T, _F, _I, _P, _I],
    "mp_average": [_T, _I],
    "mp_measure": [_T, _P, _P, _I],
    "mp_weighted_sum": [_P, _N, _P, _I],
    "mp_set_level": [ctypes.c_char_p],
}


@dataclass
class NativeLibrary:
    """The compiled kernels, or the reason why they are missing.

    Attributes:
        handle: the loaded library; None if it is missing.
        why: file name of the library, or the reason why it is missing.
    """

    handle: ctypes.CDLL | None
    why: str

    def call(self, name: str, *arguments: Any) -> None:
        """Call a kernel that returns a status.

        Raises:
            MemoryError: the kernel could not allocate memory.
            RuntimeError: the kernel returned another error.
        """
        status = getattr(self.handle, name)(*arguments)
        if status:
            raise (MemoryError if status == 2 else RuntimeError)(
                f"{name}: {_STATUS.get(status, status)}"
            )

    @property
    def level(self) -> str:
        """Name of the instruction-set level in use; empty without kernels."""
        return "" if self.handle is None else self.handle.mp_level().decode()

    @property
    def levels(self) -> list[str]:
        """Names of this CPU's instruction-set levels, best first."""
        return [] if self.handle is None else self.handle.mp_levels().decode().split(",")

    def set_level(self, name: str) -> None:
        """Use another instruction-set level for later calls.

        Raises:
            ValueError: this CPU does not have the level.
        """
        if self.handle is None or self.handle.mp_set_level(name.encode()):
            raise ValueError(
                f"{ENVIRONMENT}={name!r}: this machine has {self.levels or 'no native kernels'}; "
                "set one of its levels, or unset the variable"
            )


@cache
def native_library() -> NativeLibrary:
    """Return the library of this installation, loaded once per process.

    Raises:
        ValueError: the environment variable names a level that this CPU does not have.
    """
    wanted = os.environ.get(ENVIRONMENT, "")
    if wanted == "off":
        return NativeLibrary(None, f"{ENVIRONMENT}=off")
    path = Path(__file__).with_name("_native.so")
    if not path.exists():
        return NativeLibrary(None, "the package was installed without a C++ compiler")
    library = _load(path)
    if wanted and library.handle is not None:
        library.set_level(wanted)
    return library


def _load(path: Path) -> NativeLibrary:
    try:
        handle = ctypes.CDLL(str(path))
        abi = handle.mp_abi()
    except (OSError, AttributeError) as error:
        return NativeLibrary(None, f"{path.name} cannot be loaded: {error}")
    if abi != _ABI:
        return NativeLibrary(
            None, f"{path.name} has interface {abi}, this version needs {_ABI}; reinstall mp_optim"
        )
    handle.mp_level.restype = handle.mp_levels.restype = ctypes.c_char_p
    if not handle.mp_levels():
        return NativeLibrary(None, "this CPU has none of AVX2, AVX-512 and NEON")
    for name, arguments in _SIGNATURES.items():
        getattr(handle, name).argtypes = arguments
        getattr(handle, name).restype = ctypes.c_int32
    handle.mp_set_parallel.argtypes, handle.mp_set_parallel.restype = [_P], None
    # On Linux, torch uses GNU's OpenMP. Use torch's threads, because a second pool would compete
    # for cores.
    parallel = getattr(_gomp(), "GOMP_parallel", None)
    address = ctypes.cast(parallel, ctypes.c_void_p).value if parallel else None
    handle.mp_set_parallel(address)
    return NativeLibrary(handle, path.name)


def _gomp() -> ctypes.CDLL | None:
    """Return GNU's OpenMP library if this process has loaded it; else None."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    loaded = {
        line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "libgomp" in line
    }
    torch_first = sorted(loaded, key=lambda path: ("torch" not in path, path))
    return ctypes.CDLL(torch_first[0]) if torch_first else None


def limit_openmp(threads: int) -> None:
    """Set the number of threads that torch's operations use in the calling thread.

    Does nothing if torch does not use GNU's OpenMP.
    """
    # The first query in a new thread makes torch set its own number for that thread. So query
    # first, or torch would overwrite the number that is set below.
    torch.get_num_threads()
    set_threads = getattr(_gomp(), "omp_set_num_threads", None)
    if set_threads is not None:
        set_threads(ctypes.c_int(threads))


# -- threads of the kernels -----------------------------------------------------------------------


MOST_HOST_THREADS = 4096
"""Largest allowed number of kernel threads, above the cores of any machine. A larger number is a
mistake, and the operating system could refuse to start so many threads."""
_host_threads: int | None = None
_here = threading.local()
"""Attribute ``threads``: number of kernel threads for calls from one thread
(:func:`set_thread_share`). None, or no attribute, for the process's number."""


def set_host_threads(threads: int | None) -> None:
    """Set the number of kernel threads of this process.

    Args:
        threads: number of threads; None for this rank's share of the host's cores. torch's number
            of threads is ignored, because ``torchrun`` sets it to 1.

    Raises:
        ValueError: ``threads`` is not a whole number from 1 to :data:`MOST_HOST_THREADS`. The
            number of threads stays unchanged.
    """
    global _host_threads
    _host_threads = None if threads is None else _checked(threads)


def set_thread_share(threads: int | None) -> None:
    """Set the number of kernel threads for calls from the calling thread.

    Args:
        threads: number of threads; None for the process's number.

    Raises:
        ValueError: ``threads`` is not a whole number from 1 to :data:`MOST_HOST_THREADS`.
    """
    _here.threads = None if threads is None else _checked(threads)


def _checked(threads: Any) -> int:
    try:
        number = 0 if isinstance(threads, bool) else operator.index(threads)
    except TypeError:
        number = 0
    if not 1 <= number <= MOST_HOST_THREADS:
        raise ValueError(
            f"host_threads={threads!r}: must be a whole number from 1 to {MOST_HOST_THREADS}, or "
            "None for this rank's share of the host's cores"
        )
    return number


def thread_count() -> int:
    """Return the number of kernel threads for calls from the calling thread."""
    return getattr(_here, "threads", None) or _host_threads or host_share().threads


def describe_threads() -> str:
    """Return the number of kernel threads and the reason for this number, as text."""
    threads, share = thread_count(), host_share()
    words = [f"host kernels: {threads} threads" if threads > 1 else "host kernels: 1 thread"]
    if _host_threads is not None:
        words.append(f"host_threads={_host_threads}; this rank's share is {share.threads}")
    return "; ".join([*words, share.reason])
