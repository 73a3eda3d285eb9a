"""Ranks exchange objects, compare descriptions and fail alike: an error on every rank that names
the ranks that differ, instead of wrong numbers or a hang."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from torch.distributed.distributed_c10d import Store, _get_default_group

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
"""Seconds within which every rank that is still there has noticed a failure too."""
_GRACE = 2.0
"""Seconds for the others to read the answer."""

_companions: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_lanes: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()
"""For a companion group, further groups of the same ranks. A background save has one for itself."""
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
    """A process group as checkpoints use it. Without ``torch.distributed`` there is one rank.

    Attributes:
        group: for all processes a gloo group of our own, so that a save in the background meets no
            collective of the training; for some, the group that was named; None for a single rank.
        rank: place in the group.
        size: number of ranks.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None = None) -> Ranks:
        """Return the ranks of a group, or of all processes. The first call for all processes is a
        collective."""
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
        """Return these ranks with a group that only saves of a lane use. Collective.

        Args:
            lane: its name.
            given: the group that the caller named, which is used itself.
        """
        if self.group is None or given not in (None, dist.group.WORLD):
            return self
        groups = _lanes.setdefault(self.group, {})
        if lane not in groups:
            groups[lane] = _new_companion(self.group)
        return Ranks(groups[lane], self.rank, self.size)

    def members(self) -> set[int]:
        """Return the global ranks."""
        if self.group is not None:
            return {*dist.get_process_group_ranks(self.group)}
        is_alone = not dist.is_available() or not dist.is_initialized()
        return {0 if is_alone else dist.get_rank()}

    def _call(self, collective: Callable[..., object], *args: Any, first_is: str) -> None:
        """Call a collective whose argument ``first_is`` is the first rank. A failure names the
        missing ranks, and the companion group is made again after it."""
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
        """Return the values of all ranks, in order, on the first rank; an empty list on the
        others."""
        if self.group is None:
            return [value]
        values: list[Any] | None = None if self.rank else [None] * self.size
        self._call(dist.gather_object, value, values, first_is="dst")
        return values or []

    def scatter(self, values: list[T]) -> T:
        """Return this rank's item of the first rank's list, which has one for each rank."""
        received: list[Any] = [None]
        given = None if self.rank else values
        self._call(dist.scatter_object_list, received, given, first_is="src")
        item: T = received[0]
        return item

    def broadcast(self, value: T | None) -> T:
        """Return the first rank's value."""
        received: list[Any] = [value]
        if self.group is not None:
            self._call(dist.broadcast_object_list, received, first_is="src")
        item: T = received[0]
        return item

    def union(self, names: set[str]) -> set[str]:
        """Return the names that any rank has."""
        if self.group is None:
            return names
        others = self.gather_differing(names, "\n".join(sorted(names)))
        return self.broadcast(names.union(*(other for other in others if other)))

    def gather_differing(self, value: T, text: str) -> list[T | None]:
        """Return the values of all ranks, in order, on the first rank; an empty list on the others.

        Args:
            text: equal on two ranks if their values are. A value that equals the first rank's is
                not sent; None stands for it.
        """
        digest = hashlib.sha256(text.encode()).digest()
        return self.gather(None if digest == self.broadcast(digest) else value)

    def check_arguments(self, what: str, arguments: Mapping[str, object]) -> None:
        """Compare the arguments with which the ranks call something.

        Raises:
            ValueError: on all ranks, naming the first argument that differs, and its values.
        """
        lines = [f"{name}={value!r}" for name, value in arguments.items()]
        described = self.gather(lines)

        def compare() -> None:
            if how := difference(described, range(self.size)):
                raise ValueError(
                    f"{what}: ranks call it differently: {how}. Call it with the same arguments on "
                    "every rank; nothing was written"
                )

        self.run_on_first(what, compare)

    def gather_results(self, what: str, work: Callable[[], T]) -> list[T]:
        """Run work on all ranks, and return the results, in order, on the first rank; an empty list
        on the others.

        Raises:
            Exception: the work's own where it failed; elsewhere one of the same kind that names the
                rank.
        """
        if self.group is None:
            return [work()]
        result, errors, own = _attempt(self.rank, work)
        results = self.gather((result, own))
        reports = self.broadcast([report for _, report in results if report])
        _raise(what, errors, reports)
        return [value for value, _ in results]  # type: ignore[misc]

    def broadcast_result(self, what: str, work: Callable[[], T]) -> T:
        """Run work on the first rank, and return its result on all.

        Raises:
            Exception: as :meth:`gather_results`.
        """
        if self.group is None:
            return work()
        result, errors, own = (None, [], None) if self.rank else _attempt(0, work)
        value, report = self.broadcast((result, own))
        _raise(what, errors, [report] if report else [])
        item: T = value  # type: ignore[assignment]
        return item

    def run_on_all(self, what: str, work: Callable[[], T]) -> T:
        """Run work on all ranks, and return each rank's own result.

        Raises:
            Exception: as :meth:`gather_results`.
        """
        kept: list[T] = []
        self.gather_results(what, lambda: kept.append(work()))
        return kept[0]

    def run_on_first(self, what: str, work: Callable[[], T]) -> T | None:
        """Run work on the first rank and return its result there; None on the others.

        Raises:
            Exception: as :meth:`gather_results`.
        """
        kept: list[T] = []
        self.broadcast_result(what, lambda: kept.append(work()))
        return kept[0] if kept else None


def job_timeout() -> timedelta:
    """Return the timeout of this job's collectives, from ``init_process_group``."""
    group = _get_default_group()
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def _new_companion(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks, with the timeout of the job. Collective.

    Where all processes have a gloo group already, they meet in it first: its connections break at
    once if a rank is gone, which a group that is being made notices after the timeout only.
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
    """Return the result; or a list of the error, and its kind, the rank, and a text, with which
    other ranks raise the same.

    NOTE: an error refers to its frames, and so to their local variables. A frame that kept the
    error in one would be a cycle, which holds the optimizer until the garbage collector runs. So
    the error is in a list, and :func:`_raise` takes it from there.
    """
    try:
        return work(), [], None
    except BaseException as error:  # other ranks wait, so an interrupt must reach them, too
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

    Raises:
        Exception: on every rank, the error of this rank, or of the first rank whose choice failed.
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
    """Describe how ranks' descriptions differ, line by line, from the most frequent one; None if
    all are equal.

    Args:
        described: the lines of each rank.
        ranks: their global numbers.
    """
    by_rank = list(map(tuple, described))
    common = max(by_rank, key=by_rank.count)  # among equally frequent values, the first
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
    """Compare a description between the ranks of all these groups: one reduction of two numbers
    over each while they agree. Collective.

    Args:
        groups: the process groups.
        lines: the description.
        device: device of the numbers, if the groups communicate from there.
        doing: words for an error if a rank is missing.
        what: words for the thing that the ranks share.
        then: words for the consequence of a disagreement.

    Raises:
        ValueError: on every rank, naming the ranks that differ, and the difference.
        MissingRanksError: a rank calls something else, or is gone.
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
    """Return each number's largest value among the ranks of all these groups."""
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
    """Describe how ranks' descriptions differ. They exchange them through the store, without a
    collective, so that each rank may call it when it notices. The first rank compares, and writes
    the answer.

    Args:
        lines: the description of this rank.
        ranks: global numbers of the ranks that notice, including this one.
    """
    own, first = dist.get_rank(), ranks[0]
    topic = f"difference/{'-'.join(map(str, ranks))}"
    try:
        times = shared_store(topic).add(str(own), 1)
        store = shared_store(f"{topic}/{times}")
        store.set(str(own), "\n".join(lines))
        if own == first:
            how = _compared(store, ranks)
            store.set("how", how)
            others = len(ranks) - 1  # this process may host the store
            _wait_until(lambda: store.add("read", 0) == others, _GRACE)
        elif _wait_until(lambda: store.check(["how"]), _PATIENCE + _GRACE):
            how = store.get("how").decode()
            store.add("read", 1)
        else:
            how = f"rank {first} did not report"
    except RuntimeError:  # the rank that hosts the store has ended
        return "the difference is unknown, because the store is gone"
    return how or "the difference is unknown"


def _compared(store: Store, ranks: Sequence[int]) -> str:
    _wait_until(lambda: store.check([str(rank) for rank in ranks]), _PATIENCE)
    spoken = [rank for rank in ranks if store.check([str(rank)])]
    lines = [store.get(str(rank)).decode().splitlines() for rank in spoken]
    silent = [rank for rank in ranks if rank not in spoken]
    quiet = f"ranks {silent} did not report" if silent else ""
    return "; ".join(filter(None, (difference(lines, spoken), quiet)))


def _wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
