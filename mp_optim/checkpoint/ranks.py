"""The ranks that save or load together: what one finds, or fails at, all of them learn."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from mp_optim.ranks.missing_ranks import call

T = TypeVar("T")

SAMPLES = 64
"""Elements of a parameter that are compared, evenly spaced: enough to distinguish parts of a whole
and experts from copies."""

_companions: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_lanes: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()
"""Of a companion, groups of the same ranks, of which a save in the background has one to itself."""
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
        """Global ranks."""
        if self.group is not None:
            return {*dist.get_process_group_ranks(self.group)}
        is_alone = not dist.is_available() or not dist.is_initialized()
        return {0 if is_alone else dist.get_rank()}

    def _call(self, collective: Callable[..., object], *args: Any, first_is: str) -> None:
        """Call a collective, whose argument of this name is the first rank. A failure names who is
        missing, and the group of our own is made anew after it."""
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
        """The values of all ranks, in order, on the first; an empty list on the others."""
        if self.group is None:
            return [value]
        values: list[Any] | None = None if self.rank else [None] * self.size
        self._call(dist.gather_object, value, values, first_is="dst")
        return values or []

    def scatter(self, values: list[T]) -> T:
        """The first rank's list, one item for each rank of a group."""
        received: list[Any] = [None]
        given = None if self.rank else values
        self._call(dist.scatter_object_list, received, given, first_is="src")
        item: T = received[0]
        return item

    def broadcast(self, value: T | None) -> T:
        """The first rank's value."""
        received: list[Any] = [value]
        if self.group is not None:
            self._call(dist.broadcast_object_list, received, first_is="src")
        item: T = received[0]
        return item

    def union(self, names: set[str]) -> set[str]:
        """The names that any rank has."""
        if self.group is None:
            return names
        digest = hashlib.sha256("\n".join(sorted(names)).encode()).digest()
        others = self.gather(None if digest == self.broadcast(digest) else names)
        return self.broadcast(names.union(*(other for other in others if other)))

    def check_arguments(self, what: str, arguments: Mapping[str, object]) -> None:
        """Compare the arguments with which the ranks call something.

        Raises:
            ValueError: on all ranks, naming the arguments that differ, and what each rank has.
        """
        if self.group is not None:
            arguments_of = self.gather(dict(arguments))
            self.run_on_first(what, lambda: _check_same(what, arguments_of))

    def gather_results(self, what: str, work: Callable[[], T]) -> list[T]:
        """All ranks work; the results, in order, on the first rank, an empty list on the others.

        Raises:
            Exception: the work's own where it failed; elsewhere one of the same kind that names the
                rank.
        """
        if self.group is None:
            return [work()]
        result, error, own = _attempt(self.rank, work)
        results = self.gather((result, own))
        reports = self.broadcast([report for _, report in results if report])
        _raise(what, error, reports)
        return [value for value, _ in results]  # type: ignore[misc]

    def broadcast_result(self, what: str, work: Callable[[], T]) -> T:
        """The first rank works, all get the result.

        Raises:
            Exception: as :meth:`gather_results`.
        """
        if self.group is None:
            return work()
        result, error, own = (None, None, None) if self.rank else _attempt(0, work)
        value, report = self.broadcast((result, own))
        _raise(what, error, [report] if report else [])
        item: T = value  # type: ignore[assignment]
        return item

    def run_on_all(self, what: str, work: Callable[[], T]) -> T:
        """All ranks work, and each keeps its own result.

        Raises:
            Exception: as :meth:`gather_results`.
        """
        kept: list[T] = []
        self.gather_results(what, lambda: kept.append(work()))
        return kept[0]

    def run_on_first(self, what: str, work: Callable[[], T]) -> T | None:
        """The first rank works and keeps the result; None elsewhere.

        Raises:
            Exception: as :meth:`gather_results`.
        """
        kept: list[T] = []
        self.broadcast_result(what, lambda: kept.append(work()))
        return kept[0] if kept else None


def _check_same(what: str, arguments_of: Sequence[Mapping[str, object]]) -> None:
    differing = []
    for name in dict.fromkeys(itertools.chain(*arguments_of)):
        ranks_of: dict[str, list[int]] = {}
        for rank, arguments in enumerate(arguments_of):
            ranks_of.setdefault(repr(arguments.get(name)), []).append(rank)
        if len(ranks_of) > 1:
            values = (
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for value, ranks in ranks_of.items()
            )
            differing.append(f"{name} is {' and '.join(values)}")
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


def _new_companion(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks, with the timeout of the job. Collective.

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
) -> tuple[T | None, BaseException | None, tuple[str, int, str] | None]:
    """The result; or the error, and what other ranks need to raise the same: its kind, the rank,
    and a text."""
    try:
        return work(), None, None
    except BaseException as error:  # others wait: they have to learn of an interrupt too
        kind = type(error).__name__
        return None, error, (kind, rank, f"{kind}: {error}")


def _raise(what: str, own: BaseException | None, reports: list[Any]) -> None:
    if own is not None:
        raise own
    if reports:
        kind = _KINDS.get(reports[0][0], RuntimeError)
        texts = "; ".join(f"rank {rank}: {text}" for _, rank, text in reports)
        raise kind(f"{what}: {texts}")


# -- parameters that several ranks hold under one name --------------------------------------------
#
# They are written once, so they must be the same. While they are, a rank sends one digest of all of
# them; single parameters are compared only to name what differs.


def check_replicas(params: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raise, on every rank, if ranks hold different values under one name. Collective.

    Args:
        params: parameters by name, of which only plain tensors are compared: a DTensor says itself
            what it is.

    Raises:
        ValueError: naming the parameter and the ranks.
    """
    if ranks.size == 1:
        return
    plain = {
        name: param
        for name, param in params.items()
        if type(param) in (Tensor, torch.nn.Parameter) and param.device.type != "meta"
    }
    names = hashlib.sha256("\n".join(plain).encode()).digest()
    reports = ranks.gather((names, _digest(list(plain.values()))))
    backwards = reversed(list(enumerate(reports)))
    kinds = {kind: rank for rank, (kind, _) in backwards}  # the first rank of each
    if ranks.broadcast(len(set(reports)) < 2):
        return
    speakers = ranks.broadcast(set(kinds.values()))
    spoken = ranks.gather(tuple(plain) if ranks.rank in speakers else ())
    names_of = {kind: spoken[rank] for kind, rank in kinds.items()}
    compared = ranks.broadcast(to_compare(reports, names_of))
    own = {name: _digest([param]) for name, param in plain.items() if name in compared}
    digests = ranks.gather(own)
    ranks.run_on_first("comparing the ranks' parameters", lambda: _compare(digests))


def to_compare(
    reports: Sequence[tuple[bytes, bytes]], names: Mapping[bytes, Sequence[str]]
) -> set[str]:
    """Names of parameters that ranks may hold different values of.

    Args:
        reports: of every rank, digests of the names of what it holds whole, and of the values.
        names: the parameters behind each digest of names.
    """
    values: dict[bytes, set[bytes]] = {}
    for kind, value in reports:
        values.setdefault(kind, set()).add(value)
    seen: set[str] = set()
    compared: set[str] = set()
    for kind, held in names.items():
        compared |= set(held) if len(values[kind]) > 1 else seen.intersection(held)
        seen |= set(held)
    return compared


def _digest(params: Collection[Tensor]) -> bytes:
    """Of samples of the values, one after the other; one copy for each device and dtype."""
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        flat = param.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        samples.setdefault((param.device, param.dtype), []).append(flat[::step][:SAMPLES])
    digest = hashlib.sha256()
    for (_, dtype), pieces in samples.items():
        content = torch.cat(pieces).view(torch.uint8).cpu()
        digest.update(str(dtype).encode() + bytes(content.tolist()))
    return digest.digest()[:16]


def _compare(digests_of_ranks: Sequence[Mapping[str, bytes]]) -> None:
    first: dict[str, tuple[int, bytes]] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for name, digest in digests.items():
            other, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"{name}: ranks {other} and {rank} hold different values under this name, of "
                    "which one would be lost. If they are parts of one tensor, set Megatron's "
                    "tensor_model_parallel, partition_dim and partition_stride on it, and "
                    "process_groups.tp (of experts: expert_tp); if they are experts or layers that "
                    "every rank counts from 0, set process_groups.ep or pp, for names like "
                    "Megatron's; else say with global_names= what each is called in the whole "
                    "model. All of these are arguments of get_megatron_optimizer (without an "
                    "optimizer, of ModelParallel.of, for model_parallel=)"
                )
