"""Who is missing, where ranks communicate: an error that names the ranks that are gone, within
seconds, and no others.

In a ring only the neighbours of a dead process notice that it is gone. So a rank that notices
leaves a note in the store through which the processes met, and a rank that waits reads the notes
now and then. Whether a process is gone is asked of its kernel: each process listens on a port and
never answers. The kernel completes the connection for as long as the process exists, also while it
computes, holds the interpreter's lock or is stopped, and refuses it from then on. So presence needs
no thread and no message while all is well, and is not inferred from who is late.

The store may outlive the process group (torchrun's agent keeps it), and the next one has the same
names. So notes belong to a life of the job: from ``init_process_group`` to
``destroy_process_group``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from mp_optim.process.calls import in_background

T = TypeVar("T")

_PATIENCE = 5.0
"""Seconds within which every rank that waits in the same place has noticed a failure too."""
_GRACE = 0.3
"""Seconds for others to read the last notes, before a process ends that may keep the store."""
_BETWEEN_READS = timedelta(seconds=1.0)
"""Of the notes, while waiting."""
_STORE = 3.0
"""Seconds that the store may take beyond that."""
_CONNECT = 2.0
"""Seconds for an answer from another machine."""
_BACKLOG = 4096
"""Connections that are never accepted: as many ranks can ask whether a process exists."""

_SIGNS = "gloo|Connection|[Tt]imed out|[Tt]imeout|NCCL|monitoredBarrier"
"""What the text of an error is known by that comes of communication."""

_STORE_KEEPER = 0
"""The rank whose process keeps the store, unless another process does (torchrun's agent)."""

_joined: WeakSet[ProcessGroup] = WeakSet()
"""The group of all processes, in whose life this one has announced itself."""
_life = 0
"""The number of that life."""
_addresses: dict[int, Address] = {}
_once_at_exit = functools.cache(atexit.register)
_questions: list[futures.Future[bool]] = []
"""Whether there is a note: the last that was asked of the store."""


class MissingRanksError(RuntimeError):
    """Communication failed; the message says who did not take part."""


class _NoticedError(RuntimeError):
    """Another rank left a note that communication failed."""


def shared_store(topic: str) -> PrefixStore:
    """Where the processes share what concerns a topic in this life of the job; this rank has
    announced itself."""
    announce()
    return PrefixStore(f"mp_optim/{_life}/{topic}", _get_default_store())


def _notes(group: ProcessGroup) -> PrefixStore:
    """Notes of failure: of each rank by its number what it was doing, ``any`` if there is one,
    ``verdict`` for who is missing."""
    return shared_store(f"failed/{group.group_name}")


def announce() -> None:
    """Let other ranks ask whether this process exists. Not collective; cheap when repeated."""
    _once_at_exit(finish)
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world in _joined:  # a stand-in for a group has no store
        return
    store, rank = _get_default_store(), dist.get_rank()
    last, own = store.add("mp_optim/life", 0), store.add(f"mp_optim/life/{rank}", 0)
    _joined.add(world)
    _addresses.clear()  # a process group before this one may have had other ranks
    # if this rank took part in the last one, that one is over
    _take_part(store, rank, last if own < last else last + 1)


def _take_part(store: Any, rank: int, life: int) -> None:
    global _life
    _life = life
    for name in ("life", f"life/{rank}"):
        store.set(f"mp_optim/{name}", str(life))
    master = store
    while hasattr(master, "underlying_store"):
        master = master.underlying_store
    host, port = getattr(master, "host", None), getattr(master, "port", None)
    address = own_address(None if host is None or port is None else (host, port))
    if address is not None:
        _addresses[rank] = address
        shared_store("present").set(str(rank), str(address))


def learn_addresses(group: ProcessGroup) -> None:
    """Read where a group's processes listen, so that it is known when the store is gone. Every rank
    has announced itself: this follows a communication of the group."""
    store = _get_default_store()
    if (last := store.add("mp_optim/life", 0)) != _life:  # it was not known which rank had begun
        _take_part(store, dist.get_rank(), last)
    _learn(dist.get_process_group_ranks(group))


def _learn(ranks: list[int]) -> None:
    present = shared_store("present")
    for rank in ranks:
        if rank not in _addresses and present.check([str(rank)]):
            _addresses[rank] = Address.parse(present.get(str(rank)).decode())


# -- waiting --------------------------------------------------------------------------------------


def wait_for(work: Any, group: ProcessGroup, device: torch.device) -> None:
    """Wait for communication of a group, or until another rank has found that it failed.

    On backends whose waiting blocks the host (gloo) this reads the notes of failure once a second;
    it costs nothing when the work is done sooner. Others watch over their communicators themselves.

    Raises:
        RuntimeError: the communication failed, here or elsewhere.
    """
    if not _uses_gloo(group, device):
        work.wait()
        return
    while True:
        try:
            work.wait(_BETWEEN_READS)
            return
        except RuntimeError as error:
            if work.is_completed() or "timed out" not in str(error).lower():
                raise
            _raise_if_noticed(group)


def wait_for_all(works: Sequence[Any], group: ProcessGroup, device: torch.device) -> None:
    """The same for several."""
    for work in works:
        wait_for(work, group, device)


def all_gather(group: ProcessGroup, doing: str, value: T) -> list[T]:
    """The objects of all ranks of a group, in order; collective.

    Raises:
        MissingRanksError: naming who is missing.
    """
    values: list[Any] = [None] * group.size()
    call(group, doing, lambda: dist.all_gather_object(values, value, group=group))
    return values


def call(group: ProcessGroup, doing: str, communicate: Callable[[], T]) -> T:
    """The same for what cannot be waited for in pieces, such as collectives of objects; in a thread
    of its own, and a failure names the ranks that are missing.

    NOTE: after a failure the thread stays where it is; a process that goes on has to leave the
    group alone. Objects that travel over an accelerator are sent by this thread, which knows the
    device.
    """
    with naming_missing_ranks(group)(doing):
        if not _uses_gloo(group, torch.device("cpu")):
            return communicate()
        result = in_background(communicate)
        while not futures.wait([result], _BETWEEN_READS.total_seconds()).done:
            _raise_if_noticed(group)
        return result.result()


def _uses_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """Whether tensors of a device travel over gloo, which blocks the host that waits."""
    if all(known.type != device.type for known in group._device_types):
        return False
    return bool(group._get_backend(device).name() == "gloo")


def _raise_if_noticed(group: ProcessGroup) -> None:
    """Read the notes in a thread: the process that keeps the store may be stopped, and then the
    question has no answer."""
    if any(not question.done() for question in _questions):
        return
    notes = _notes(group)

    def is_noticed() -> bool:
        try:
            return bool(notes.check(["any"]))
        except RuntimeError:  # the store is gone, and the rank that kept it
            return True

    _questions[:] = [in_background(is_noticed)]
    if futures.wait(_questions, _STORE).done and _questions[0].result():
        raise _NoticedError("another rank found that communication failed")


# -- naming ---------------------------------------------------------------------------------------


def naming_missing_ranks(group: ProcessGroup) -> Callable[[str], Any]:
    """A context for communication within a group; a failure in it raises MissingRanksError, which
    names the ranks that are gone, or did not get there."""
    announce()

    @contextlib.contextmanager
    def guard(doing: str) -> Iterator[None]:
        _check_alive(group, doing)
        try:
            yield
        except MissingRanksError:
            raise
        except (KeyboardInterrupt, SystemExit):
            with contextlib.suppress(RuntimeError):  # the store and its readers are gone
                _notes(group).set("any", "failed")  # the others need not wait for this rank
            raise
        except RuntimeError as error:
            is_known = isinstance(error, dist.DistError | _NoticedError)
            if not is_known and re.search(_SIGNS, str(error)) is None:
                raise
            who = _who_is_missing(group, doing)
            first_line = (str(error).splitlines() or [""])[0][:200]
            raise MissingRanksError(f"{doing} failed: {who} ({first_line})") from error

    return guard


def _check_alive(group: ProcessGroup, doing: str) -> None:
    """Raise RuntimeError if ``destroy_process_group`` has ended a group."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        raise RuntimeError(
            f"{doing}: the process group of {group.size()} ranks was destroyed; build the "
            "optimizer again over the present process group, and load the last checkpoint"
        ) from None


def _who_is_missing(group: ProcessGroup, doing: str) -> str:
    """In words. The store is asked in a thread: the process that keeps it may be the one that is
    gone, or stopped."""
    ranks = dist.get_process_group_ranks(group)
    noticed: set[int] = {dist.get_rank()}
    notes = _notes(group)
    verdict = in_background(lambda: _by_notes(notes, ranks, doing, noticed))
    with contextlib.suppress(RuntimeError, futures.TimeoutError):  # no store, or no answer
        return verdict.result(_PATIENCE + _STORE)
    gone = _gone(rank for rank in ranks if rank not in noticed)
    others = [rank for rank in gone if rank != _STORE_KEEPER]
    if _STORE_KEEPER in gone:
        who = _named([_STORE_KEEPER], ranks, "ended")
    else:
        who = (
            "the store is gone, or does not answer: the process that keeps it, perhaps rank "
            f"{_STORE_KEEPER}, has ended or is stuck"
        )
    # a rank that noticed the same failure before, and ended, cannot be distinguished from one that
    # failed
    too = f"; {_counted('rank', 'ranks', others)} ended, perhaps because of it"
    return who + (too if others else "")


def _gone(ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if rank in _addresses and exists(_addresses[rank]) is False]


def _by_notes(notes: PrefixStore, ranks: list[int], doing: str, noticed: set[int]) -> str:
    """Who is missing by the notes in the store.

    A rank that is well and busy somewhere else gets time to come here: a rank that ended earlier
    would seem gone to it.

    Args:
        noticed: gets those who left a note.

    Raises:
        RuntimeError: the store is gone.
    """
    own = dist.get_rank()
    notes.set(str(own), doing)
    notes.set("any", "failed")
    _learn(ranks)
    if notes.check(["verdict"]):  # of ranks that may have ended since
        missing, verdict = notes.get("verdict").decode().split(":", 1)
        if str(own) in missing.split():
            return f"{verdict}; rank {own} is this one, which came too late"
        return verdict
    silent, verdict = _watch(notes, ranks, noticed)
    notes.set("verdict", f"{' '.join(map(str, silent))}:{verdict}")
    time.sleep(_GRACE)
    return verdict


def _watch(notes: PrefixStore, ranks: list[int], noticed: set[int]) -> tuple[list[int], str]:
    """Wait until every rank has left a note or is gone, or has had the time to; who is missing,
    by number and in words."""
    until, gone = time.monotonic() + _PATIENCE, list[int]()
    silent = [rank for rank in ranks if rank not in noticed]
    while set(silent) != set(gone) and time.monotonic() < until:
        noticed.update(rank for rank in silent if notes.check([str(rank)]))
        silent = [rank for rank in silent if rank not in noticed]
        gone = _gone(silent)
        time.sleep(0.1 if set(silent) != set(gone) else 0.0)
    if gone:
        return gone, _named(gone, ranks, "ended")
    if silent:
        return silent, _named(silent, ranks, "stuck or doing something else")
    ranks_doing: dict[str, list[int]] = {}
    for rank in ranks:
        ranks_doing.setdefault(notes.get(str(rank)).decode(), []).append(rank)
    if len(ranks_doing) == 1:
        return [], f"all of ranks {ranks} noticed"
    where = "; ".join(
        f"{_counted('rank', 'each of ranks', group)} was {doing}"
        for doing, group in ranks_doing.items()
    )
    return [], (
        f"all of ranks {ranks} noticed, at different places: {where}; did one of them call step(), "
        "backward() or zero_grad() more often than the others?"
    )


def _counted(one: str, several: str, ranks: Sequence[int]) -> str:
    return f"{one if len(ranks) == 1 else several} {', '.join(map(str, ranks))}"


def _named(missing: list[int], ranks: list[int], how: str) -> str:
    return f"{_counted('rank', 'ranks', missing)} of {ranks} did not take part ({how})"


# -- whether a process exists ---------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """Where a process listens. A loopback address means something on its ``machine`` alone."""

    host: str
    port: int
    machine: str

    def __str__(self) -> str:
        return f"{self.port} {self.machine} {self.host}"

    @classmethod
    def parse(cls, text: str) -> Address:
        port, machine, host = text.split(" ", 2)
        return cls(host, int(port), machine)


_listening: list[tuple[socket.socket, Address]] = []
"""This process's socket and its address; nothing in a forked child."""


def own_address(towards: tuple[str, int] | None) -> Address | None:
    """Where this process listens, from now on; None if it may not.

    Args:
        towards: host and port through which the job's processes find each other: the way there
            shows under which address they know this machine.
    """
    for _, address in _listening:
        return address
    host = "127.0.0.1"
    if towards is not None:
        with contextlib.suppress(OSError):
            (way, *_) = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)
            with socket.socket(*way[:3]) as probe:
                probe.connect(way[4])  # a datagram socket only chooses a route
                host = probe.getsockname()[0]
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
    except OSError:
        return None
    address = Address(host, sock.getsockname()[1], _machine())
    _listening[:] = [(sock, address)]
    return address


def _close_in_child() -> None:
    """A forked child would keep the port open after its parent's end."""
    for sock, _ in _listening:
        sock.close()
    _listening.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = platform.node().replace(" ", "-")
    return f"{name}/{boot.read_text().strip()}" if boot.exists() else name


def exists(address: Address) -> bool | None:
    """Whether the process is there; None if that is not known from here."""
    if address.machine != _machine() and address.host.startswith(("127.", "::1")):
        return None
    try:
        with socket.create_connection((address.host, address.port), timeout=_CONNECT):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None


# -- the last collectives of a process ------------------------------------------------------------
#
# A thread of gloo first reports that a collective is complete and then frees its tensors, which
# takes the interpreter's lock where they have a Python object. If the interpreter has ended by
# then, the process aborts ("terminate called without an active exception"), with all its work done.
# ``destroy_process_group`` joins those threads, unless another object, such as an optimizer or a
# DDP model, still holds the group.

_TASKS = Path("/proc/self/task")
_THREAD = "pt_gloo_runloop"
"""The name that torch gives to those threads."""
_EXIT_PATIENCE = 2.0
"""Seconds, after which a collective that hangs is not waited for."""


def finish() -> None:
    """Let gloo's threads run until all of them sleep, for at most two seconds; registered to be
    called at this process's exit."""
    end = time.monotonic() + _EXIT_PATIENCE
    while time.monotonic() < end:
        time.sleep(1e-3)  # a thread that waits for the interpreter's lock gets it here
        if "R" not in _states():
            return


def _states() -> Iterator[str]:
    """Of this process's gloo threads: ``R`` runs or wants to, ``S`` sleeps. None where the system
    has no such list."""
    for task in _TASKS.glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            name, _, rest = (task / "stat").read_text().rpartition(")")
            if name.endswith(f"({_THREAD}"):
                yield rest.split()[0]
