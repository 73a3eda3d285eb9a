"""The ranks that save or load together: what one finds, or fails at, all of them learn."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from mp_optim.ranks.missing_ranks import call, learn_addresses, naming_missing_ranks

T = TypeVar("T")

_companions: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    WeakKeyDictionary()
)
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
        """The ranks of a group, or of all processes. The first call for all processes is a
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

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    def members(self) -> set[int]:
        """Global ranks."""
        if self.group is not None:
            return {*dist.get_process_group_ranks(self.group)}
        is_alone = not dist.is_available() or not dist.is_initialized()
        return {0 if is_alone else dist.get_rank()}

    def _first(self) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, 0)

    def _call(
        self, collective: Callable[..., object], *args: Any, **ranks: Any
    ) -> None:
        """Talk to the others; a failure names who is missing, and the group of our own is made anew
        after it."""
        assert self.group is not None
        communicate = partial(collective, *args, **ranks, group=self.group)
        try:
            _together(
                self.group, "saving or loading a checkpoint together", communicate
            )
        except RuntimeError:
            for group, companion in list(_companions.items()):
                if companion is self.group:
                    del _companions[group]
            raise

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in order, on the first rank; an empty list on the others."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_first else None
        self._call(dist.gather_object, value, values, dst=self._first())
        return values or []

    def scatter(self, values: list[T]) -> T:
        """The first rank's list, one item for each rank."""
        if self.group is None:
            return values[0]
        received: list[Any] = [None]
        given = values if self.is_first else None
        self._call(dist.scatter_object_list, received, given, src=self._first())
        item: T = received[0]
        return item

    def broadcast(self, value: T | None) -> T:
        """The first rank's value."""
        received: list[Any] = [value]
        if self.group is not None:
            self._call(dist.broadcast_object_list, received, src=self._first())
        item: T = received[0]
        return item

    def union(self, names: set[str]) -> set[str]:
        """The names that any rank has."""
        if self.group is None:
            return names
        digest = hashlib.sha256("\n".join(sorted(names)).encode()).digest()
        others = self.gather(None if digest == self.broadcast(digest) else names)
        return self.broadcast(names.union(*(other for other in others if other)))

    def alike(self, what: str, arguments: Mapping[str, object]) -> None:
        """Everybody calls something with the same arguments.

        Raises:
            ValueError: on all ranks, naming the arguments, and what each rank has.
        """
        if self.group is None:
            return
        told = self.gather(dict(arguments))
        self.first(what, lambda: _check_alike(what, told))

    def agree(self, what: str, work: Callable[[], T]) -> list[T]:
        """Everybody works; the results, in order, on the first rank, an empty list on the others.

        Raises:
            Exception: the work's own where it failed; elsewhere one of the same kind that names the
                rank.
        """
        if self.group is None:
            return [work()]
        result, failure = _attempt(work)
        results = self.gather((None if failure else result, _told(self.rank, failure)))
        told = self.broadcast([message for _, message in results if message])
        self._raise(what, failure, told)
        return [value for value, _ in results]  # type: ignore[misc]

    def first(self, what: str, work: Callable[[], T]) -> T:
        """The first rank works, everybody gets the result.

        Raises:
            Exception: as :meth:`agree`.
        """
        if self.group is None:
            return work()
        result, failure = _attempt(work) if self.is_first else (None, None)
        value, told = self.broadcast((result, [_told(0, failure)] if failure else []))
        self._raise(what, failure, told)
        item: T = value  # type: ignore[assignment]
        return item

    def each(self, what: str, work: Callable[[], T]) -> T:
        """Everybody works, and keeps the own result.

        Raises:
            Exception: as :meth:`agree`.
        """
        kept: list[T] = []
        self.agree(what, lambda: kept.append(work()))
        return kept[0]

    def on_first(self, what: str, work: Callable[[], T]) -> T | None:
        """The first rank works and keeps the result; None elsewhere.

        Raises:
            Exception: as :meth:`agree`.
        """
        kept: list[T] = []
        self.first(what, lambda: kept.append(work()))
        return kept[0] if kept else None

    @staticmethod
    def _raise(what: str, own: BaseException | None, told: list[Any]) -> None:
        if own is not None:
            raise own
        if told:
            kind = _KINDS.get(told[0][0], RuntimeError)
            texts = "; ".join(f"rank {rank}: {text}" for _, rank, text in told)
            raise kind(f"{what}: {texts}")


def _check_alike(what: str, told: Sequence[Mapping[str, object]]) -> None:
    differing = []
    for name in dict.fromkeys(itertools.chain(*told)):
        values = [repr(of_rank.get(name)) for of_rank in told]
        ranks_of: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            ranks_of.setdefault(value, []).append(rank)
        if len(ranks_of) > 1:
            said = (
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for value, ranks in ranks_of.items()
            )
            differing.append(f"{name} is {' and '.join(said)}")
    if differing:
        raise ValueError(
            f"{what}: ranks call it differently: {'; '.join(differing)}. Call it with the same "
            "arguments on every rank; nothing was written"
        )


def job_timeout() -> timedelta:
    """How long a collective of this job may take: what ``init_process_group`` was given."""
    group = _get_default_group()
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def _together(group: dist.ProcessGroup, doing: str, communicate: Callable[[], T]) -> T:
    """Communicate; a failure names the ranks that are missing."""
    with naming_missing_ranks(group)(doing):
        return call(group, communicate)


def _new_companion(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks, with the timeout of the job. Collective.

    Where all processes have a gloo group already, they meet in it first: its connections tell at
    once of a rank that is gone, of which a group that is being made hears after the timeout only.
    """
    doing = "making a process group for checkpoints"
    if dist.get_backend(group) == "gloo":
        _together(group, doing, lambda: dist.barrier(group))
        learn_addresses(group)
    made: Any = _together(
        group, doing, lambda: dist.new_group(backend="gloo", timeout=job_timeout())
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # others wait: they have to hear of an interrupt too
        return None, error


def _told(rank: int, failure: BaseException | None) -> tuple[str, int, str] | None:
    kind = type(failure).__name__
    return None if failure is None else (kind, rank, f"{kind}: {failure}")
