"""A process of the pool: one rank of a gloo world, or all ranks of one as threads."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

# torch.optim imports it at its first use, which takes a second: once is enough
import torch._dynamo
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lab.layout_fuzz.running import Outcome, perform
from mp_optim.process_groups import missing_ranks

missing_ranks._PATIENCE = 5.0  # a case whose ranks do not meet ends soon


def send(pipe: Connection, message: Any) -> None:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    pipe.send_bytes(buffer.getvalue())


def receive(pipe: Connection) -> Any:
    """Return the next message from another process of this program.

    Raises:
        EOFError: the other process has ended.
    """
    return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)


def serve(kind: str, pipe: Connection, log: str) -> None:
    torch.set_num_threads(1)
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    work = {"threads": _as_threads, "processes": _as_process}[kind]
    if kind == "threads":
        _install_threads()
    with contextlib.suppress(EOFError):
        while True:
            job = receive(pipe)
            faulthandler.dump_traceback_later(job["patience"], file=sys.stderr)
            work(job, pipe)
            faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own exit


def _as_process(job: dict[str, Any], pipe: Connection) -> None:
    # of meshes' groups too
    timeout = distributed_c10d.default_pg_timeout = timedelta(seconds=job["timeout"])
    store = dist.TCPStore(*job["store"], is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(job["name"], store),
        rank=job["rank"],
        world_size=job["ranks"],
        timeout=timeout,
    )
    send(pipe, [perform(job["case"], job["phase"], job["rank"], job["folder"])])
    dist.destroy_process_group()
    send(pipe, "left")


def _as_threads(job: dict[str, Any], pipe: Connection) -> None:
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

    ProcessLocalGroup.reset()
    store, ranks = dist.HashStore(), job["ranks"]
    outcomes = [Outcome(error="ended, because another rank failed") for _ in range(ranks)]

    def work(rank: int) -> None:
        # how a collective ends that waits for a rank that failed
        with contextlib.suppress(SystemExit):
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            outcomes[rank] = perform(job["case"], job["phase"], rank, job["folder"])
            if outcomes[rank].error:
                ProcessLocalGroup.exception_handle(None)
            else:
                dist.destroy_process_group()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    send(pipe, outcomes)
    send(pipe, "left")


class _Backend:
    options = SimpleNamespace(_timeout=timedelta(seconds=60))

    @staticmethod
    def name() -> str:
        return "threaded"


def _install_threads() -> None:
    from torch.testing._internal.distributed import multi_threaded_pg

    group: Any = multi_threaded_pg.ProcessLocalGroup
    group._get_backend, group._device_types = (lambda self, device: _Backend, [torch.device("cpu")])
    missing_ranks._uses_gloo = lambda group, device: False
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
