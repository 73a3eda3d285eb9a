"""Ranks exchange objects, compare descriptions, and raise the same error. The error names the ranks
that differ, in place of wrong numbers or a hang."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_group

from mp_optim.process_groups.missing_ranks import (
    all_gather,
    call,
    naming_missing_ranks,
    shared_store,
    start_collective,
    wait_for,
)

T = TypeVar("T")

_PATIENCE = 5.0
"""Seconds to wait for the description of another rank: enough time for every rank that still runs
to find the disagreement."""
_GRACE = 2.0
"""Most seconds that the rank that compares waits until the other ranks have read its answer."""

_companions: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The gloo group that :meth:`Ranks.of` created, by the group of all processes of the job."""
_lanes: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()
"""Process groups of background saves by lane (:meth:`Ranks.in_lane`), for each group in
``_companions``. Background saves of two lanes do not wait for each other."""
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ValueError,
        TypeError,
        RuntimeError,
        OSError,
        FileNotFoundError,
        PermissionError,
        NotImplementedError,
    )
}


# -- exchange, and errors on all ranks -------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """A process group for the collectives of checkpoints; one rank without ``torch.distributed``.

    Attributes:
        group: the process group; None for a single rank. For all processes of the job, a separate
            gloo group, so that the collectives of a background save and of the training do not mix.
        rank: number of this rank in the group.
        size: number of ranks.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None = None) -> Ranks:
        """Return the ranks of a process group.

        The first call for all processes is a collective, because this call creates a gloo group.

        Args:
            process_group: the group; None for all processes of the job.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls(None, 0, 1)
        group = process_group or dist.group.WORLD
        assert group is not None
        size = dist.get_world_size(group)
        if size == 1:
            return cls(None, 0, 1)
        if group is dist.group.WORLD:
            if group not in _companions:
                _companions[group] = _new_companion(group)
            group = _companions[group]
        return cls(group, dist.get_rank(group), size)

    def in_lane(self, lane: str, given: dist.ProcessGroup | None) -> Ranks:
        """Return these ranks with the process group of a lane. Collective.

        A lane has at most one background save at a time. Saves of several lanes do not wait for
        each other, because each lane has its own process group.

        Args:
            lane: name of the lane.
            given: the process group that the caller chose; this group is used for all lanes.
        """
        if self.group is None or given not in (None, dist.group.WORLD):
            return self
        groups = _lanes.setdefault(self.group, {})
        if lane not in groups:
            groups[lane] = _new_companion(self.group)
        return Ranks(groups[lane], self.rank, self.size)

    def members(self) -> set[int]:
        """Return the global ranks of this group."""
        if self.group is not None:
            return {*dist.get_process_group_ranks(self.group)}
        is_alone = not dist.is_available() or not dist.is_initialized()
        return {0 if is_alone else dist.get_rank()}

    def _call(self, collective: Callable[..., object], *args: Any, first_is: str) -> None:
        """Call a collective of this group.

        If the collective fails, forget the gloo group that this module created, so that the next
        call of :meth:`of` creates a new group. Raise an error that names the missing ranks.

        Args:
            collective: a function of ``torch.distributed``.
            first_is: name of the argument that takes the global number of the group's first rank.
        """
        assert self.group is not None
        first = {first_is: dist.get_global_rank(self.group, 0)}
        communicate = partial(collective, *args, **first, group=self.group)
        try:
            call(self.group, "saving or loading a checkpoint together", communicate)
        except RuntimeError:
            for group, companion in list(_companions.items()):
                if companion is self.group or self.group in _lanes.get(companion, {}).values():
                    del _companions[group]
            raise

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on the first rank; return an empty list on
        the other ranks. Collective."""
        if self.group is None:
            return [value]
        values: list[Any] | None = None if self.rank else [None] * self.size
        self._call(dist.gather_object, value, values, first_is="dst")
        return values or []

    def scatter(self, values: list[T]) -> T:
        """Return this rank's item of the first rank's list. Collective.

        Args:
            values: one item for each rank; read on the first rank only.
        """
        received: list[Any] = [None]
        given = None if self.rank else values
        self._call(dist.scatter_object_list, received, given, first_is="src")
        item: T = received[0]
        return item

    def broadcast(self, value: T | None) -> T:
        """Return the first rank's value on every rank. Collective."""
        received: list[Any] = [value]
        if self.group is not None:
            self._call(dist.broadcast_object_list, received, first_is="src")
        item: T = received[0]
        return item

    def union(self, names: set[str]) -> set[str]:
        """Return the union of all ranks' names. Collective."""
        if self.group is None:
            return names
        others = self.gather_differing(names, "\n".join(sorted(names)))
        return self.broadcast(names.union(*(other for other in others if other)))

    def gather_differing(self, value: T, text: str) -> list[T | None]:
        """Return the values of all ranks, in rank order, on the first rank; return an empty list on
        the other ranks. Collective.

        A value that equals the first rank's value is not sent: the list has None in its place.

        Args:
            value: this rank's value.
            text: description of the value; two values are equal if their descriptions are equal.
        """
        digest = hashlib.sha256(text.encode()).digest()
        return self.gather(None if digest == self.broadcast(digest) else value)

    def check_arguments(self, call: str, **arguments: object) -> None:
        """Compare the arguments with which the ranks save or load a checkpoint. Collective.

        Args:
            call: "save" or "load".
            arguments: arguments by name.

        Raises:
            ValueError: the arguments differ. Every rank raises the error, with the first argument
                that differs and its values.
        """
        lines = [f"{name}={value!r}" for name, value in {"the call": call, **arguments}.items()]
        described = self.gather(lines)
        how = self.broadcast(difference(described, range(self.size)) if described else None)
        if how is not None:
            raise ValueError(
                f"checkpoint.{call}: the ranks pass different arguments: {how}; pass the same "
                "arguments on every rank (nothing was written)"
            )

    def run_on_all(self, what: str, work: Callable[[], T]) -> T:
        """Run a function on all ranks, and return each rank's own result. Collective.

        Args:
            what: name of the action, for the error.
            work: the function.

        Raises:
            Exception: the function raised on some rank. That rank raises its own error. Every other
                rank raises an error of the same class that names the rank.
        """
        if self.group is None:
            return work()
        result, errors, own = _attempt(self.rank, work)
        reports = self.broadcast([report for report in self.gather(own) if report])
        _raise(what, errors, reports)
        return result  # type: ignore[return-value]

    def broadcast_result(self, what: str, work: Callable[[], T]) -> T:
        """Run a function on the first rank, and return its result on all ranks. Collective.

        Raises:
            Exception: the function raised; see :meth:`run_on_all`.
        """
        if self.group is None:
            return work()
        result, errors, own = (None, [], None) if self.rank else _attempt(0, work)
        value, report = self.broadcast((result, own))
        _raise(what, errors, [report] if report else [])
        item: T = value  # type: ignore[assignment]
        return item

    def run_on_first(self, what: str, work: Callable[[], T]) -> T | None:
        """Run a function on the first rank. Return its result there, and None on the other ranks.
        Collective.

        Raises:
            Exception: the function raised; see :meth:`run_on_all`.
        """
        kept: list[T] = []
        self.broadcast_result(what, lambda: kept.append(work()))
        return kept[0] if kept else None


def job_timeout() -> timedelta:
    """Return the timeout of collectives that this job passed to ``init_process_group``."""
    group = _get_default_group()
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def _new_companion(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks, with the timeout of the job. Collective.

    If ``group`` is a gloo group, its ranks first meet in a barrier. If a rank has ended, the
    barrier fails at once, but ``new_group`` fails only after the timeout.
    """
    doing = "making a process group for checkpoints"
    if dist.get_backend(group) == "gloo":
        call(group, doing, lambda: dist.barrier(group))
    made: Any = call(group, doing, lambda: dist.new_group(backend="gloo", timeout=job_timeout()))
    assert isinstance(made, dist.ProcessGroup)
    return made


def _attempt(
    rank: int, work: Callable[[], T]
) -> tuple[T | None, list[BaseException], tuple[str, int, str] | None]:
    """Run a function. Return its result, a list with its error (empty without an error), and a
    report for the other ranks: class, rank and text of the error.

    NOTE: an error refers to its frames, and so to their local variables. If a frame kept the error
    in a variable, the reference cycle would keep the optimizer alive until the garbage collector
    runs. So the error is in a list, and :func:`_raise` removes it from that list.
    """
    try:
        return work(), [], None
    # An interrupt must reach the other ranks, too, because they wait for this rank's report.
    except BaseException as error:
        kind = type(error).__name__
        return None, [error], (kind, rank, f"{kind}: {error}")


def _raise(what: str, own: list[BaseException], reports: list[Any]) -> None:
    if own:
        raise own.pop()
    if reports:
        kind = _KINDS.get(reports[0][0], RuntimeError)
        texts = "; ".join(f"rank {rank}: {text}" for _, rank, text in reports)
        raise kind(f"{what}: {texts}")


def agree_on_largest(
    groups: Iterable[ProcessGroup], doing: str, choose: Callable[[], float]
) -> float:
    """Return the largest of the values that the ranks of all these groups choose. Collective.

    Args:
        groups: the process groups.
        doing: name of the action, for the error.
        choose: returns this rank's value.

    Raises:
        Exception: ``choose`` raised on some rank. That rank raises its own error; every other rank
            raises an error of the same class that names the first such rank.
    """
    value, errors, report = _attempt(dist.get_rank() if dist.is_initialized() else 0, choose)
    for group in groups:
        choices = all_gather(group, doing, (value, report))
        value = max((number for number, _ in choices if number is not None), default=None)
        report = next((failed for _, failed in choices if failed), None)
    _raise(doing, errors, [report] if report else [])
    assert value is not None
    return value


# -- comparison -----------------------------------------------------------------------------------


def difference(described: Sequence[Sequence[str]], ranks: Sequence[int]) -> str | None:
    """Return a sentence about the ranks whose descriptions differ from the most frequent
    description, with the first line that differs. Return None if all descriptions are equal.

    Args:
        described: the lines of each rank.
        ranks: global number of each rank.
    """
    by_rank = list(map(tuple, described))
    # If several descriptions are equally frequent, as with two ranks, max() returns the first of
    # them.
    common = max(by_rank, key=by_rank.count)
    reference = ranks[by_rank.index(common)]
    differences = []
    for rank, lines in zip(ranks, by_rank, strict=True):
        if lines == common:
            continue
        pairs = zip_longest(lines, common, fillvalue="nothing")
        here, there = next((a, b) for a, b in pairs if a != b)
        differences.append(f"rank {rank} has {here!r} where rank {reference} has {there!r}")
    return "; ".join(differences) or None


def check_agreement(
    groups: Sequence[ProcessGroup],
    lines: Sequence[str],
    device: torch.device,
    doing: str,
    what: str,
    then: str = "",
) -> None:
    """Compare a description between the ranks of all these groups. Collective: one reduction of two
    numbers over each group, unless the ranks disagree.

    Args:
        groups: the process groups.
        lines: the description.
        device: device of the reduced numbers, if the groups communicate from this device.
        doing: name of the action, for the error about a missing rank.
        what: name of the objects that the ranks share, for the error about a disagreement.
        then: end of that error, with the consequence.

    Raises:
        ValueError: the descriptions differ. Every rank raises the error, with the ranks and the
            difference.
        MissingRanksError: a rank called another collective, or has ended.
    """
    number = number_of(lines)
    extremes = torch.tensor([number, -number], dtype=torch.int64, device="cpu")
    most, least = _largest(extremes, groups, device, doing).tolist()
    if most == -least:
        return
    here = torch.zeros(dist.get_world_size(), dtype=torch.int64, device="cpu")
    here[dist.get_rank()] = 1
    others = _largest(here, groups, device, doing)
    ranks = others.nonzero().flatten().tolist()
    how = difference_told(lines, ranks)
    raise ValueError(f"the ranks that share {what} disagree: {how}{then}")


def _largest(
    numbers: Tensor, groups: Sequence[ProcessGroup], device: torch.device, doing: str
) -> Tensor:
    """Return the largest value of each number among the ranks of all these groups. Collective."""
    for group in groups:
        served = {known.type: known for known in group._device_types}
        numbers = numbers.to(device if device.type in served else next(iter(served.values())))
        with naming_missing_ranks(group)(doing):
            largest = dist.ReduceOp.MAX
            work = start_collective(dist.all_reduce, numbers, op=largest, group=group)
            wait_for(work, group, numbers.device)
    return numbers


def number_of(lines: Sequence[str]) -> int:
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def difference_told(lines: Sequence[str], ranks: Sequence[int]) -> str:
    """Return a sentence about the difference between the descriptions of some ranks.

    The ranks exchange the descriptions through the store of ``torch.distributed``, without a
    collective, so each rank may call this function at another time. The first of the ranks compares
    them and writes the answer to the store.

    Args:
        lines: the description of this rank.
        ranks: global numbers of the ranks that compare, with this rank.
    """
    own, first = dist.get_rank(), ranks[0]
    topic = f"difference/{'-'.join(map(str, ranks))}"
    try:
        times = shared_store(topic).add(str(own), 1)
        store = shared_store(f"{topic}/{times}")
        store.set(str(own), "\n".join(lines))
        if own == first:
            _wait_until(lambda: store.check([str(rank) for rank in ranks]), _PATIENCE)
            spoken = [rank for rank in ranks if store.check([str(rank)])]
            described = [store.get(str(rank)).decode().splitlines() for rank in spoken]
            silent = [rank for rank in ranks if rank not in spoken]
            quiet = f"ranks {silent} did not report" if silent else ""
            how = "; ".join(filter(None, (difference(described, spoken), quiet)))
            store.set("how", how)
            # If this process hosts the store, it must not end before the other ranks have read the
            # answer.
            others = len(ranks) - 1
            _wait_until(lambda: store.add("read", 0) == others, _GRACE)
        elif _wait_until(lambda: store.check(["how"]), _PATIENCE + _GRACE):
            how = store.get("how").decode()
            store.add("read", 1)
        else:
            how = f"rank {first} did not report"
    except RuntimeError:  # The rank that hosts the store has ended, so no rank can compare.
        return "the difference is unknown, because the store is gone"
    return how or "the difference is unknown"


def _wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
