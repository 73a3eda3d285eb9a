"""Who is missing, where ranks communicate: an error that names the ranks that are gone, within
seconds, and no others.

In a ring only the neighbours of a dead process notice that it is gone. So a rank that notices
leaves a note in the store through which the processes met, and a rank that waits looks for such a
note now and then. Which process is gone is asked of its kernel (:mod:`mp_optim.ranks.presence`),
not inferred from who is late.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

from mp_optim.process.background_calls import in_background
from mp_optim.ranks import last_works
from mp_optim.ranks.presence import Address, exists, own_address

T = TypeVar("T")

_PATIENCE = 5.0
"""Seconds within which every rank that waits in the same place has noticed a failure too."""
_GRACE = 0.3
"""Seconds for others to read the last notes, before a process ends that may keep the store."""
_LOOK = timedelta(seconds=1.0)
"""Between two looks for a note of failure, while waiting."""
_STORE = 3.0
"""Seconds that the store may take beyond that."""

_SIGNS = "gloo|Connection|[Tt]imed out|NCCL|monitoredBarrier"
"""What the text of an error is known by that comes of communication."""

_addresses: dict[int, Address] = {}
_looks: list[futures.Future[bool]] = []


class MissingRanksError(RuntimeError):
    """Communication failed; the message says who did not take part."""


class _NoticedError(RuntimeError):
    """Another rank left a note that communication failed."""


def _failed(group: ProcessGroup, rank: int | str) -> str:
    return f"mp_optim/failed/{group.group_name}/{rank}"


def _present(rank: int) -> str:
    return f"mp_optim/present/{rank}"


def announce() -> None:
    """Let other ranks ask whether this process exists. Not collective; cheap when repeated."""
    last_works.finish_at_exit()
    if not dist.is_initialized():  # a stand-in for a group has no store
        return
    store = _get_default_store()
    address = own_address(_master(store))
    rank = dist.get_rank()
    if address is not None and _addresses.get(rank) != address:
        _addresses.clear()  # a process group before this one may have had other ranks
        _addresses[rank] = address
        store.set(_present(rank), str(address))


def _master(store: Any) -> tuple[str, int] | None:
    """Host and port of the store, if it has some."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return None if host is None or port is None else (host, port)


def learn_addresses(group: ProcessGroup) -> None:
    """Look up where a group's processes listen, so that it is known when the store is gone. Every
    rank has announced itself: this follows a communication of the group."""
    _learn(_get_default_store(), dist.get_process_group_ranks(group))


def _learn(store: Any, ranks: list[int]) -> None:
    for rank in ranks:
        if rank not in _addresses and store.check([_present(rank)]):
            _addresses[rank] = Address.parse(store.get(_present(rank)).decode())


# -- waiting --------------------------------------------------------------------------------------


def wait_for(work: Any, group: ProcessGroup, device: torch.device) -> None:
    """Wait for communication of a group, or until another rank has found that it failed.

    On backends whose waiting blocks the host (gloo) this looks for notes of failure once a second;
    it costs nothing when the work is done sooner. Others watch over their communicators themselves.

    Raises:
        RuntimeError: the communication failed, here or elsewhere.
    """
    if not _uses_gloo(group, device):
        work.wait()
        return
    while True:
        try:
            work.wait(_LOOK)
            return
        except RuntimeError as error:
            if work.is_completed() or "timed out" not in str(error).lower():
                raise
            _raise_if_noticed(group)


def wait_for_all(
    works: Sequence[Any], group: ProcessGroup, device: torch.device
) -> None:
    """The same for several."""
    for work in works:
        wait_for(work, group, device)


def call(group: ProcessGroup, communicate: Callable[[], T]) -> T:
    """The same for what cannot be waited for in pieces, such as collectives of objects; in a thread
    of its own.

    NOTE: after a failure the thread stays where it is; a process that goes on has to leave the
    group alone. Objects that travel over an accelerator are sent by this thread, which knows the
    device.
    """
    if not _uses_gloo(group, torch.device("cpu")):
        return communicate()
    result = in_background(communicate)
    while not futures.wait([result], _LOOK.total_seconds()).done:
        _raise_if_noticed(group)
    return result.result()


def _uses_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """Whether what lies on a device travels over gloo, which blocks the host that waits."""
    if all(known.type != device.type for known in group._device_types):
        return False
    return bool(group._get_backend(device).name() == "gloo")


def _raise_if_noticed(group: ProcessGroup) -> None:
    """Look for a note in a thread: the process that keeps the store may be stopped, and then the
    question has no answer."""
    if any(not look.done() for look in _looks):
        return
    look = in_background(lambda: _is_noticed(group))
    _looks[:] = [look]
    if futures.wait([look], _STORE).done and look.result():
        raise _NoticedError("another rank found that communication failed")


def _is_noticed(group: ProcessGroup) -> bool:
    try:
        noticed: bool = _get_default_store().check([_failed(group, "any")])
        return noticed
    except RuntimeError:  # the store is gone, and the rank that kept it
        return True


# -- naming ---------------------------------------------------------------------------------------


def naming_missing_ranks(group: ProcessGroup) -> Callable[[str], Any]:
    """A context for communication within a group; a failure in it raises MissingRanksError, which
    says who is gone, or did not get there."""
    announce()

    @contextlib.contextmanager
    def guard(doing: str) -> Iterator[None]:
        try:
            yield
        except MissingRanksError:
            raise
        except (KeyboardInterrupt, SystemExit):
            _tell_of_failure(group)  # the others need not wait for this rank
            raise
        except RuntimeError as error:
            if not _is_communication(error):
                raise
            who = _who_is_missing(group, doing)
            raise MissingRanksError(
                f"{doing} failed: {who} ({_first_line(error)})"
            ) from error

    return guard


def _tell_of_failure(group: ProcessGroup) -> None:
    with contextlib.suppress(
        RuntimeError
    ):  # the store is gone, and its readers with it
        _get_default_store().set(_failed(group, "any"), "failed")


def _is_communication(error: RuntimeError) -> bool:
    if isinstance(error, dist.DistError | _NoticedError):
        return True
    return re.search(_SIGNS, str(error)) is not None


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _who_is_missing(group: ProcessGroup, doing: str) -> str:
    """In words. The store is asked in a thread: the process that keeps it may be the one that is
    gone, or stopped."""
    ranks = dist.get_process_group_ranks(group)
    noticed: set[int] = {dist.get_rank()}
    verdict = in_background(lambda: _by_notes(group, doing, noticed))
    if futures.wait([verdict], _PATIENCE + _STORE).done and verdict.result():
        return verdict.result()
    if gone := _gone(rank for rank in ranks if rank not in noticed):
        return _named(gone, ranks, "ended")
    return (
        "the store is gone, or does not answer: the process that keeps it, perhaps rank 0, "
        "has ended or is stuck"
    )


def _gone(ranks: Iterable[int]) -> list[int]:
    """Those whose processes do not exist any more."""
    return [
        rank
        for rank in ranks
        if rank in _addresses and exists(_addresses[rank]) is False
    ]


def _by_notes(group: ProcessGroup, doing: str, noticed: set[int]) -> str:
    """Who is missing by the notes in the store; empty if it is gone.

    A rank that is well and busy somewhere else gets time to come here: a rank that ended earlier
    would look gone to it.

    Args:
        noticed: gets those who left a note.
    """
    ranks = dist.get_process_group_ranks(group)
    try:
        store = _get_default_store()
        store.set(_failed(group, dist.get_rank()), doing)
        store.set(_failed(group, "any"), "failed")
        _learn(store, ranks)
        if store.check(
            [_failed(group, "verdict")]
        ):  # of ranks that may have ended since
            told: str = store.get(_failed(group, "verdict")).decode()
            return told
        verdict = _watch(group, ranks, noticed)
        store.set(_failed(group, "verdict"), verdict)
        time.sleep(_GRACE)
        return verdict
    except RuntimeError:
        return ""


def _watch(group: ProcessGroup, ranks: list[int], noticed: set[int]) -> str:
    """Wait until every rank has left a note or is gone, or has had the time to; who is missing, in
    words."""
    store, until, gone = _get_default_store(), time.monotonic() + _PATIENCE, list[int]()
    silent = [rank for rank in ranks if rank not in noticed]
    while set(silent) != set(gone) and time.monotonic() < until:
        noticed.update(rank for rank in silent if store.check([_failed(group, rank)]))
        silent = [rank for rank in silent if rank not in noticed]
        gone = _gone(silent)
        time.sleep(0.1 if set(silent) != set(gone) else 0.0)
    if gone:
        return _named(gone, ranks, "ended")
    if silent:
        return _named(silent, ranks, "stuck or doing something else")
    doings = {rank: store.get(_failed(group, rank)).decode() for rank in ranks}
    return f"all of ranks {ranks} noticed{_at_other_places(doings)}"


def _at_other_places(doings: dict[int, str]) -> str:
    """Who was doing what, if that differs."""
    if len(set(doings.values())) == 1:
        return ""
    ranks_of: dict[str, list[int]] = {}
    for rank, doing in doings.items():
        ranks_of.setdefault(doing, []).append(rank)
    where = "; ".join(
        f"{_counted('rank', 'each of ranks', ranks)} was {doing}"
        for doing, ranks in ranks_of.items()
    )
    return (
        f", at different places: {where}; did one of them call step(), backward() or zero_grad() "
        "more often than the others?"
    )


def _counted(one: str, several: str, ranks: Sequence[int]) -> str:
    return f"{one if len(ranks) == 1 else several} {', '.join(map(str, ranks))}"


def _named(missing: list[int], ranks: list[int], how: str) -> str:
    return f"{_counted('rank', 'ranks', missing)} of {ranks} did not take part ({how})"
