"""How many threads the host kernels run, on which cores, and what is said about that."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Sequence
from typing import Any

from mp_optim.process.host_share import HostShare, host_share
from mp_optim.update.backends.native_library import native_library

MOST_THREADS = 4096
"""More than any machine has cores; beyond it the operating system refuses to start them."""
_host_threads: int | None = None


class _Here(threading.local):
    """What a thread was told by :func:`set_thread_share`."""

    threads: int | None = None


_here = _Here()


def set_host_threads(threads: int | None) -> None:
    """Threads of the kernels in this process; None for this rank's share of the host, whatever
    torch's number is (``torchrun`` sets it to 1).

    Raises:
        ValueError: not a whole number from 1 to :data:`MOST_THREADS`; what was set before stays.
    """
    global _host_threads
    _host_threads = None if threads is None else _checked(threads)


def set_host_cores(cores: Sequence[int]) -> None:
    """Pin the kernels' threads in this process to these cores, in turn; an empty list unpins them.

    Raises:
        ValueError: there are no native kernels to pin, or this process may not run on one of the
            cores.
    """
    library = native_library()
    if library.handle is None:
        raise ValueError(
            f"host_cores={tuple(cores)!r}: there are no native kernels to pin: {library.why}"
        )
    if cores:
        _check_cores(cores)
    library.set_cores(cores)


def set_thread_share(threads: int | None) -> None:
    """Threads of the kernels that the calling thread runs; None as everywhere.

    Raises:
        ValueError: as :func:`set_host_threads`.
    """
    _here.threads = None if threads is None else _checked(threads)


def _checked(threads: Any) -> int:
    """A number of threads that the kernels take: a plain int, whatever kind of whole number was
    given."""
    try:
        number = 0 if isinstance(threads, bool) else operator.index(threads)
    except TypeError:
        number = 0
    if not 1 <= number <= MOST_THREADS:
        raise ValueError(
            f"host_threads={threads!r}: must be a whole number from 1 to {MOST_THREADS}, or None "
            "for this rank's share of the host's cores"
        )
    return number


def _check_cores(cores: Sequence[int]) -> None:
    given = f"host_cores={tuple(cores)!r}"
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError(
            f"{given}: threads cannot be pinned on this system; leave host_cores unset"
        )
    available = sorted(os.sched_getaffinity(0))
    missing = [core for core in cores if core not in available]
    if missing:
        raise ValueError(
            f"{given}: this process may not run on core {missing[0]}; it has {available}"
        )


def thread_count() -> int:
    """Threads that the kernels may use now, in the calling thread."""
    return _here.threads or _host_threads or host_share().threads


def describe_threads() -> str:
    """How many threads the kernels run here, why, and what keeps them from more."""
    threads, share = thread_count(), host_share()
    words = [
        f"host kernels: {threads} threads" if threads > 1 else "host kernels: 1 thread"
    ]
    if _host_threads is not None:
        words.append(
            f"host_threads={_host_threads}; this rank's share is {share.threads}"
        )
    words.append(share.reason)
    return "; ".join([*words, *starving(threads, share)])


def starving(threads: int, share: HostShare) -> list[str]:
    """Warnings about settings that leave cores of the rank's share idle, or crowd them."""
    warnings = []
    if threads < share.threads:
        warnings.append(
            f"warning: {share.threads - threads} cores of the share stay idle in the step; "
            "unset host_threads"
        )
    if threads > len(share.cpus):
        warnings.append(
            f"warning: {threads} threads on {len(share.cpus)} cores wait for one another; "
            "unset host_threads"
        )
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    if limit.isdecimal() and 0 < int(limit) < threads:
        warnings.append(f"warning: OMP_THREAD_LIMIT={limit} allows no more; unset it")
    return warnings
