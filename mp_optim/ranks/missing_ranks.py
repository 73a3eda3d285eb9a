"""Who is missing, where ranks communicate: an error that names the ranks that are gone, within
seconds, and no others.

In a ring only the neighbours of a dead process notice that it is gone. So a rank that notices
leaves a note in the store through which the processes met, and a rank that waits looks for such a
note now and then. Which process is gone is asked of its kernel (:mod:`mp_optim.ranks.presence`),
not inferred from who is late.

The store may outlive the process group (torchrun's agent keeps it), and the next one has the same
names. So notes belong to a life of the job: from ``init_process_group`` to
``destroy_process_group``.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

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

_SIGNS = "gloo|Connection|[Tt]imed out|[Tt]imeout|NCCL|monitoredBarrier"
"""What the text of an error is known by that comes of communication."""

_STORE_KEEPER = 0
"""The rank whose process keeps the store, unless another process does (torchrun's agent)."""

_joined: WeakSet[ProcessGroup] = WeakSet()
"""The group of all processes, in whose life this one has said that it takes part."""
_life = 0
"""The number of that life."""
_addresses: dict[int, Address] = {}
_looks: list[futures.Future[bool]] = []


class MissingRanksError(RuntimeError):
    """Communication failed; the message says who did not take part."""


class _NoticedError(RuntimeError):
    """Another rank left a note that communication failed."""


def shared_store(topic: str) -> PrefixStore:
    """What the processes tell each other about a topic in this life of the job; every rank has
    announced itself."""
    announce()
    return PrefixStore(f"mp_optim/{_life}/{topic}", _get_default_store())


def _notes(group: ProcessGroup) -> PrefixStore:
    """Notes of failure: of each rank by its number what it was doing, ``any`` if there is one,
    ``verdict`` for who is missing."""
    return shared_store(f"failed/{group.group_name}")


def announce() -> None:
    """Let other ranks ask whether this process exists. Not collective; cheap when repeated."""
    last_works.finish_at_exit()
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world in _joined:  # a stand-in for a group has no store
        return
    store, rank = _get_default_store(), dist.get_rank()
    last, own = _number(store, "life"), _number(store, f"life/{rank}")
    _joined.add(world)
    _addresses.clear()  # a process group before this one may have had other ranks
    # if this rank took part in the last one, that one is over
    _take_part(store, rank, last if own < last else last + 1)


def _take_part(store: Any, rank: int, life: int) -> None:
    global _life
    _life = life
    for name in ("life", f"life/{rank}"):
        store.set(f"mp_optim/{name}", str(life))
    address = own_address(_master(store))
    if address is not None:
        _addresses[rank] = address
        shared_store("present").set(str(rank), str(address))


def _number(store: Any, name: str) -> int:
    return int(store.add(f"mp_optim/{name}", 0))


def _master(store: Any) -> tuple[str, int] | None:
    """Host and port of the store, if it has some."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return None if host is None or port is None else (host, port)


def learn_addresses(group: ProcessGroup) -> None:
    """Look up where a group's processes listen, so that it is known when the store is gone. Every
    rank has announced itself: this follows a communication of the group."""
    store = _get_default_store()
    if (last := _number(store, "life")) != _life:  # it was not known who has begun
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
    look = in_background(partial(_is_noticed, _notes(group)))
    _looks[:] = [look]
    if futures.wait([look], _STORE).done and look.result():
        raise _NoticedError("another rank found that communication failed")


def _is_noticed(notes: PrefixStore) -> bool:
    try:
        noticed: bool = notes.check(["any"])
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
    with contextlib.suppress(RuntimeError):  # the store and its readers are gone
        _notes(group).set("any", "failed")


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
    verdict = in_background(partial(_by_notes, _notes(group), ranks, doing, noticed))
    is_over = bool(futures.wait([verdict], _PATIENCE + _STORE).done)
    if is_over and verdict.result():
        return verdict.result()
    return _without_store(ranks, _gone(rank for rank in ranks if rank not in noticed))


def _without_store(ranks: list[int], gone: list[int]) -> str:
    """Who is missing, where no note can be read: a rank that noticed the same failure before, and
    ended, looks like one that failed."""
    others = [rank for rank in gone if rank != _STORE_KEEPER]
    too = f"; {_counted('rank', 'ranks', others)} ended, perhaps because of it"
    if _STORE_KEEPER in gone:
        who = _named([_STORE_KEEPER], ranks, "ended")
    else:
        who = (
            "the store is gone, or does not answer: the process that keeps it, perhaps rank "
            f"{_STORE_KEEPER}, has ended or is stuck"
        )
    return who + (too if others else "")


def _gone(ranks: Iterable[int]) -> list[int]:
    """Those whose processes do not exist any more."""
    return [
        rank
        for rank in ranks
        if rank in _addresses and exists(_addresses[rank]) is False
    ]


def _by_notes(
    notes: PrefixStore, ranks: list[int], doing: str, noticed: set[int]
) -> str:
    """Who is missing by the notes in the store; empty if it is gone.

    A rank that is well and busy somewhere else gets time to come here: a rank that ended earlier
    would look gone to it.

    Args:
        noticed: gets those who left a note.
    """
    own = dist.get_rank()
    try:
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
    except RuntimeError:
        return ""


def _watch(
    notes: PrefixStore, ranks: list[int], noticed: set[int]
) -> tuple[list[int], str]:
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
    doings = {rank: notes.get(str(rank)).decode() for rank in ranks}
    return [], f"all of ranks {ranks} noticed{_at_other_places(doings)}"


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
