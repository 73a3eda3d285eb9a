"""Errors that name the ranks that are missing from a collective.

If a rank ends, a collective fails at once only on the ranks that communicate with it. The other
ranks wait. So a rank whose collective fails writes a note to the store of ``torch.distributed``,
and a rank that waits reads the notes once a second. Then each rank waits a bounded time for the
notes of the others. A rank without a note may have ended, may hang, or may still compute, so the
message says only that it did not report.

An error counts as a failure of communication if a collective raised it, whatever its text is.

The store may outlive the process group, because torchrun's agent keeps the store, and the next
group has the same name. So the keys of notes contain a generation: a number that counts the calls
of ``init_process_group``.
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
"""Seconds that a rank whose collective failed waits for the notes of the other ranks."""
_GRACE = 1.0
"""Seconds that a process stays alive after it wrote its last note, because it may host the store
that other ranks read."""
_BETWEEN_READS = timedelta(seconds=1.0)
"""Time between two reads of the notes while a rank waits for a collective."""
_STORE = 3.0
"""Seconds to wait for an answer of the store."""

_joined: WeakSet[ProcessGroup] = WeakSet()
"""The group of all processes, after :func:`announce` has found the group's generation."""
_once_at_exit = functools.cache(atexit.register)
_questions: list[futures.Future[bool]] = []
"""The last read of the store, whose result is True if any rank has written a note."""


class MissingRanksError(RuntimeError):
    """A collective failed. The message names the ranks that did not report."""


class _CollectiveError(RuntimeError):
    """A collective raised an error; that error is the ``__cause__``."""


# -- notes ----------------------------------------------------------------------------------------


def announce() -> None:
    """Find the generation of the present process group, and register
    :func:`last_collectives.finish`. Not collective; later calls return at once."""
    _once_at_exit(last_collectives.finish)
    world = dist.group.WORLD if dist.is_initialized() else None
    # World is None if a test passes a stand-in group. Such a group has no store for notes.
    if world is None or world in _joined:
        return
    store, own = _get_default_store(), f"mp_optim/life/{dist.get_rank()}"
    life = store.add("mp_optim/life", 0)
    # If this rank has joined this generation before, the present group is a new group, so count up.
    if store.add(own, 0) == life:
        life += 1
    for name in ("mp_optim/life", own):
        store.set(name, str(life))
    _joined.add(world)


def shared_store(topic: str) -> PrefixStore:
    """Return a view of the store with the keys of one topic, for the present generation."""
    announce()
    store = _get_default_store()
    # Read the generation at each use, because other ranks may have counted up since.
    return PrefixStore(f"mp_optim/{store.add('mp_optim/life', 0)}/{topic}", store)


def _notes(group: ProcessGroup) -> PrefixStore:
    """Return the notes about failed collectives of a group.

    The key of a note is the rank's number, and its value is the action that failed. Two more keys
    exist: ``any`` after the first note, and ``verdict`` with the ranks that are missing.
    """
    return shared_store(f"failed/{group.group_name}")


def _leave_note(notes: PrefixStore, doing: str) -> None:
    notes.set(str(dist.get_rank()), doing)
    notes.set("any", "failed")


# -- collectives ----------------------------------------------------------------------------------


def start_collective(
    collective: Callable[..., Any], *args: Any, group: ProcessGroup, **options: Any
) -> Any:
    """Start a collective of a group. Return the handle that :func:`wait_for` takes."""
    with _in_collective():
        return collective(*args, group=group, async_op=True, **options)


@contextlib.contextmanager
def _in_collective() -> Iterator[None]:
    """Turn each RuntimeError inside the block into a :class:`_CollectiveError`."""
    try:
        yield
    except _CollectiveError:
        raise
    except RuntimeError as error:
        raise _CollectiveError(str(error)) from error


def wait_for(work: Any, group: ProcessGroup, device: torch.device) -> None:
    """Wait until a collective is complete, or until another rank has written a note about a
    failure.

    gloo blocks the host while it waits, so this function reads the notes once a second. Other
    backends detect failures themselves.

    Args:
        work: result of :func:`start_collective`.
        group: process group of the collective.
        device: device of the collective's tensors.

    Raises:
        RuntimeError: the collective failed here or on another rank.
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
                    # wait() may have raised only for the timeout, so call wait() again: this call
                    # raises only if the collective failed.
                    work.wait()
                    return
            _raise_if_noticed(group)


def wait_for_all(works: Sequence[Any], group: ProcessGroup, device: torch.device) -> None:
    """Wait for several collectives of a group, one after the other, by :func:`wait_for`."""
    for work in works:
        wait_for(work, group, device)


def all_gather(group: ProcessGroup, doing: str, value: T) -> list[T]:
    """Return the objects of all ranks of a group, in rank order. Collective.

    Args:
        group: the process group.
        doing: name of the action, for the error.
        value: this rank's object.

    Raises:
        MissingRanksError: a rank did not take part; the message names the ranks that did not
            report.
    """
    values: list[Any] = [None] * group.size()
    call(group, doing, lambda: dist.all_gather_object(values, value, group=group))
    return values


def call(group: ProcessGroup, doing: str, communicate: Callable[[], T]) -> T:
    """Return the result of a function that only communicates, such as a collective of objects.

    With gloo, a separate thread calls the function, so that this thread can read the notes of other
    ranks. With other backends this thread calls the function, because objects are sent from the
    current device of the calling thread.

    NOTE: after a failure the separate thread may still be in the collective. A process that
    continues must not use the group again.

    Args:
        group: the process group.
        doing: name of the action, for the error.
        communicate: the function.

    Raises:
        MissingRanksError: a rank did not take part; the message names the ranks that did not
            report.
    """
    with naming_missing_ranks(group)(doing), _in_collective():
        if not _uses_gloo(group, torch.device("cpu")):
            return communicate()
        result = in_background(communicate)
        while not futures.wait([result], _BETWEEN_READS.total_seconds()).done:
            _raise_if_noticed(group)
        return result.result()


def _uses_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """True if gloo communicates tensors of this device in this group. gloo blocks the host while it
    waits."""
    if all(known.type != device.type for known in group._device_types):
        return False
    return bool(group._get_backend(device).name() == "gloo")


def _raise_if_noticed(group: ProcessGroup) -> None:
    """Raise if another rank has written a note, or if the store is gone. A separate thread reads
    the store, because the process that hosts the store may be stopped and would not answer."""
    if any(not question.done() for question in _questions):
        return

    def is_noticed() -> bool:
        try:
            return bool(_notes(group).check(["any"]))
        except RuntimeError:  # The rank that hosts the store has ended, so this is a failure.
            return True

    _questions[:] = [in_background(is_noticed)]
    if futures.wait(_questions, _STORE).done and _questions[0].result():
        raise _CollectiveError("another rank found that communication failed")


# -- naming ---------------------------------------------------------------------------------------


def naming_missing_ranks(group: ProcessGroup) -> Callable[[str], Any]:
    """Return a context manager for collectives of a group. The context manager takes the name of
    the action, and turns the error of a collective into a MissingRanksError."""
    announce()

    @contextlib.contextmanager
    def guard(doing: str) -> Iterator[None]:
        try:
            dist.get_process_group_ranks(group)
        except KeyError:
            raise RuntimeError(
                f"{doing}: the process group of {group.size()} ranks was destroyed; build the "
                "optimizer again over the present process group, and load the last checkpoint"
            ) from None
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
            raise MissingRanksError(
                f"{doing} failed: {missing} ({first_line}); start all ranks again from the last "
                "checkpoint"
            ) from error

    return guard


def _missing(group: ProcessGroup, doing: str) -> str:
    """Write a note, and return a phrase with the ranks that wrote no note. A separate thread reads
    the store, because the process that hosts the store may have ended or be stopped."""
    ranks = dist.get_process_group_ranks(group)
    answer = in_background(lambda: _by_notes(_notes(group), ranks, doing))
    # The store may be gone, or may not answer in time. Return the phrase below then.
    with contextlib.suppress(RuntimeError, futures.TimeoutError):
        return answer.result(_PATIENCE + _STORE)
    return (
        "the store is gone, or does not answer: the process that keeps the store, perhaps rank "
        "0, has ended or is stuck"
    )


def _by_notes(notes: PrefixStore, ranks: Sequence[int], doing: str) -> str:
    """Return a phrase with the ranks that wrote no note within :data:`_PATIENCE` seconds.

    Raises:
        RuntimeError: the store is gone.
    """
    own, until, silent = dist.get_rank(), time.monotonic() + _PATIENCE, list(ranks)
    _leave_note(notes, doing)
    # Another rank that began to wait earlier may have written the missing ranks to the store
    # already. Return its phrase then, so that all ranks report the same ranks.
    while not notes.check(["verdict"]):
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
        return f"{verdict}; rank {own} is this process, which came too late"
    return verdict


def _all_noticed(notes: PrefixStore, ranks: Sequence[int]) -> str:
    ranks_doing: dict[str, list[int]] = {}
    for rank in ranks:
        ranks_doing.setdefault(notes.get(str(rank)).decode(), []).append(rank)
    if len(ranks_doing) == 1:
        return f"all of ranks {list(ranks)} reported the failure"
    where = "; ".join(
        f"{_counted('rank', 'each of ranks', some)} was {doing}"
        for doing, some in ranks_doing.items()
    )
    return (
        f"all of ranks {list(ranks)} reported the failure, at different places: {where}; call "
        "step(), backward() and zero_grad() equally often on all ranks"
    )


def _counted(one: str, several: str, ranks: Sequence[int]) -> str:
    return f"{one if len(ranks) == 1 else several} {', '.join(map(str, ranks))}"
