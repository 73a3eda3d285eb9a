"""Errors that name the ranks that are missing from a collective.

A collective fails at once only on the ranks that communicate with a dead one; the others wait. So a
rank whose collective fails leaves a note in the store through which the processes met, and a rank
that waits reads the notes once a second. Then each rank waits a bounded time for the others' notes.
A rank without a note may have ended, hang, or compute: the message states that it did not report.

An error belongs to communication if a collective raised it, whatever its text is.

The store may outlive the process group (torchrun's agent keeps it), and the next group has the same
names. So notes belong to a life of the job: from ``init_process_group`` to
``destroy_process_group``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from mp_optim.host.calls import in_background
from mp_optim.process_groups import last_collectives

T = TypeVar("T")

_PATIENCE = 30.0
"""Seconds for which a rank whose collective failed waits for the notes of the others."""
_GRACE = 1.0
"""Seconds for others to read the last notes, before a process ends that may keep the store."""
_BETWEEN_READS = timedelta(seconds=1.0)
"""Time between two looks at the notes, while waiting."""
_STORE = 3.0
"""Seconds that an answer of the store may take."""

_joined: WeakSet[ProcessGroup] = WeakSet()
"""The group of all processes, if this process has entered its life."""
_once_at_exit = functools.cache(atexit.register)
_questions: list[futures.Future[bool]] = []
"""Whether there is a note: the last question to the store."""


class MissingRanksError(RuntimeError):
    """A collective failed; the message names the ranks that did not report."""


class _CollectiveError(RuntimeError):
    """A collective raised the error that is this one's cause."""


# -- notes ----------------------------------------------------------------------------------------


def announce() -> None:
    """Enter this life of the job. Not collective; cheap when repeated."""
    _once_at_exit(last_collectives.finish)
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world in _joined:  # a stand-in for a group has no store
        return
    store, own = _get_default_store(), f"mp_optim/life/{dist.get_rank()}"
    life = store.add("mp_optim/life", 0)
    if store.add(own, 0) == life:  # this rank took part in the last collective, so that is complete
        life += 1
    for name in ("mp_optim/life", own):
        store.set(name, str(life))
    _joined.add(world)


def shared_store(topic: str) -> PrefixStore:
    """Return the part of the store in which the ranks share a topic in this life of the job."""
    announce()
    store = _get_default_store()
    # Read at each use: a rank that was not in the last life learns from the others that it is over.
    return PrefixStore(f"mp_optim/{store.add('mp_optim/life', 0)}/{topic}", store)


def _notes(group: ProcessGroup) -> PrefixStore:
    """Return the notes of failure: of each rank, by its number, the action that failed; ``any`` if
    there is one; ``verdict`` for the ranks that are missing."""
    return shared_store(f"failed/{group.group_name}")


def _leave_note(notes: PrefixStore, doing: str) -> None:
    notes.set(str(dist.get_rank()), doing)
    notes.set("any", "failed")


# -- collectives ----------------------------------------------------------------------------------


def start_collective(
    collective: Callable[..., Any], *args: Any, group: ProcessGroup, **options: Any
) -> Any:
    """Start a collective of a group; returns work for :func:`wait_for`."""
    with _in_collective():
        return collective(*args, group=group, async_op=True, **options)


@contextlib.contextmanager
def _in_collective() -> Iterator[None]:
    """Mark RuntimeErrors that are raised inside as errors of a collective."""
    try:
        yield
    except _CollectiveError:
        raise
    except RuntimeError as error:
        raise _CollectiveError(str(error)) from error


def wait_for(work: Any, group: ProcessGroup, device: torch.device) -> None:
    """Wait for a collective, or until another rank has left a note that communication failed.

    On backends that block the host while they wait (gloo), this looks for notes once a second.
    Other backends watch over their communicators themselves.
    """
    with _in_collective():
        if not _uses_gloo(group, device):
            work.wait()
            return
        while True:
            try:
                work.wait(_BETWEEN_READS)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises if it failed, and not if it was completed since
                    return
            _raise_if_noticed(group)


def wait_for_all(works: Sequence[Any], group: ProcessGroup, device: torch.device) -> None:
    """Wait for several collectives as :func:`wait_for` does."""
    for work in works:
        wait_for(work, group, device)


def all_gather(group: ProcessGroup, doing: str, value: T) -> list[T]:
    """Return the objects of all ranks of a group, in order. Collective.

    Raises:
        MissingRanksError: naming the ranks that did not report.
    """
    values: list[Any] = [None] * group.size()
    call(group, doing, lambda: dist.all_gather_object(values, value, group=group))
    return values


def call(group: ProcessGroup, doing: str, communicate: Callable[[], T]) -> T:
    """Return the result of a call that only communicates, such as a collective of objects. Under
    gloo it is made in a thread of its own.

    NOTE: after a failure the thread stays where it is; a process that goes on must leave the group
    alone. Objects that are sent over an accelerator are sent by the calling thread, which knows the
    device.

    Raises:
        MissingRanksError: naming the ranks that did not report.
    """
    with naming_missing_ranks(group)(doing), _in_collective():
        if not _uses_gloo(group, torch.device("cpu")):
            return communicate()
        result = in_background(communicate)
        while not futures.wait([result], _BETWEEN_READS.total_seconds()).done:
            _raise_if_noticed(group)
        return result.result()


def _uses_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """Whether gloo, which blocks the host that waits, carries tensors of a device."""
    if all(known.type != device.type for known in group._device_types):
        return False
    return bool(group._get_backend(device).name() == "gloo")


def _raise_if_noticed(group: ProcessGroup) -> None:
    """Raise if a rank has left a note. A thread reads the store: the process that keeps it may be
    stopped, and would not answer."""
    if any(not question.done() for question in _questions):
        return

    def is_noticed() -> bool:
        try:
            return bool(_notes(group).check(["any"]))
        except RuntimeError:  # the rank that hosts the store has ended
            return True

    _questions[:] = [in_background(is_noticed)]
    if futures.wait(_questions, _STORE).done and _questions[0].result():
        raise _CollectiveError("another rank found that communication failed")


# -- naming ---------------------------------------------------------------------------------------


def naming_missing_ranks(group: ProcessGroup) -> Callable[[str], Any]:
    """Return a context for collectives of a group, in which an error of a collective becomes a
    MissingRanksError."""
    announce()

    @contextlib.contextmanager
    def guard(doing: str) -> Iterator[None]:
        _check_alive(group, doing)
        try:
            yield
        except MissingRanksError:
            raise
        except (KeyboardInterrupt, SystemExit):
            note = f"interrupted while {doing}"
            futures.wait([in_background(lambda: _leave_note(_notes(group), note))], _STORE)
            raise
        except (_CollectiveError, dist.DistError) as error:
            missing = _missing(group, doing)
            first_line = (str(error).splitlines() or [""])[0][:200]
            raise MissingRanksError(f"{doing} failed: {missing} ({first_line})") from error

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


def _missing(group: ProcessGroup, doing: str) -> str:
    """Leave a note, and return the ranks without one, in words. A thread reads the store: the
    process that keeps it may be gone, or stopped."""
    ranks = dist.get_process_group_ranks(group)
    answer = in_background(lambda: _by_notes(_notes(group), ranks, doing))
    with contextlib.suppress(
        RuntimeError, futures.TimeoutError
    ):  # the store is missing or does not answer
        return answer.result(_PATIENCE + _STORE)
    return (
        "the store is gone, or does not answer: the process that keeps it, perhaps rank 0, has "
        "ended or is stuck"
    )


def _by_notes(notes: PrefixStore, ranks: Sequence[int], doing: str) -> str:
    """Return in words which ranks leave no note in time.

    Raises:
        RuntimeError: the store is gone.
    """
    own, until, silent = dist.get_rank(), time.monotonic() + _PATIENCE, list(ranks)
    _leave_note(notes, doing)
    while not notes.check(["verdict"]):  # another rank may have waited longer
        silent = [rank for rank in silent if not notes.check([str(rank)])]
        if not silent or time.monotonic() > until:
            named = _counted("rank", "ranks", silent)
            named += f" of {list(ranks)} did not report within {_PATIENCE:g} s"
            named = named if silent else _all_noticed(notes, ranks)
            notes.set("verdict", f"{' '.join(map(str, silent))}:{named}")
            time.sleep(_GRACE)
            return named
        time.sleep(0.1)
    missing, verdict = notes.get("verdict").decode().split(":", 1)
    if str(own) in missing.split():
        return f"{verdict}; rank {own} is this one, which came too late"
    return verdict


def _all_noticed(notes: PrefixStore, ranks: Sequence[int]) -> str:
    ranks_doing: dict[str, list[int]] = {}
    for rank in ranks:
        ranks_doing.setdefault(notes.get(str(rank)).decode(), []).append(rank)
    if len(ranks_doing) == 1:
        return f"all of ranks {list(ranks)} noticed"
    where = "; ".join(
        f"{_counted('rank', 'each of ranks', some)} was {doing}"
        for doing, some in ranks_doing.items()
    )
    return (
        f"all of ranks {list(ranks)} noticed, at different places: {where}; did one of them call "
        "step(), backward() or zero_grad() more often than the others?"
    )


def _counted(one: str, several: str, ranks: Sequence[int]) -> str:
    return f"{one if len(ranks) == 1 else several} {', '.join(map(str, ranks))}"
