"""Which cores the host's work during backward may use: not all, others need some then."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mp_optim.process.host_share import host_share
from mp_optim.update import set_thread_share
from mp_optim.update.backends.native_library import limit_openmp


def threads_beside_backward(threads: int) -> int:
    """Of a process's threads, how many work for the optimizer during backward.

    Two are left to the main thread and autograd, and a quarter to the data loader: memory
    bandwidth, not arithmetic, bounds an optimizer, so the last quarter would not make it faster.
    """
    return max(1, min(threads - 2, 3 * threads // 4))


def worker_threads(host_threads: int | None) -> int:
    """``host_threads`` if it is set, else most of this rank's share of the host."""
    return host_threads or threads_beside_backward(host_share().threads)


def occupy(threads: int, cores: Sequence[int] | None) -> None:
    """Make the calling thread use that many threads, and these cores if they are named.

    ``torch.set_num_threads`` would do it for the whole process.
    """
    set_thread_share(threads)
    limit_openmp(threads)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(
            0, cores
        )  # on Linux 0 is the calling thread, not the process
