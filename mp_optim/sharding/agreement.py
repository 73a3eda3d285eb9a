"""Ranks that disagree, or are gone: an error that says which rank and what, instead of wrong numbers or a hang."""

from __future__ import annotations

import hashlib
import itertools
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ["check_agreement", "check_number", "difference", "difference_told", "naming_missing_ranks"]

_PATIENCE = 5.0
"""Seconds within which every rank that is still there has noticed a failure too."""


def difference(described: Sequence[Sequence[str]], ranks: Sequence[int]) -> str | None:
    """How ranks differ in what they say, line by line, from what most of them say; None if they do not.

    Args:
        described: the lines of each rank.
        ranks: their global numbers.
    """
    counts = Counter(map(tuple, described))
    common = max(counts, key=lambda lines: (counts[lines], -[tuple(d) for d in described].index(lines)))
    reference = ranks[[tuple(lines) for lines in described].index(common)]
    found = []
    for rank, lines in zip(ranks, described, strict=True):
        if tuple(lines) == common:
            continue
        longest = max(len(lines), len(common))
        padded = [[*side, *["nothing"] * (longest - len(side))] for side in (lines, common)]
        here, there = next((a, b) for a, b in zip(*padded, strict=True) if a != b)
        found.append(f"rank {rank} has {here!r} where rank {reference} has {there!r}")
    return "; ".join(found) or None


def check_agreement(group: ProcessGroup, lines: Sequence[str], what: str) -> None:
    """Compare a description between the ranks of a group. Collective.

    Raises:
        ValueError: on every rank, naming those that differ and how.
    """
    digests: list[str] = [""] * group.size()
    dist.all_gather_object(digests, hashlib.sha256("\n".join(lines).encode()).hexdigest(), group=group)
    if len(set(digests)) == 1:
        return
    described: list[Sequence[str]] = [()] * group.size()
    dist.all_gather_object(described, list(lines), group=group)
    raise ValueError(f"the ranks that share {what} disagree: "
                     f"{difference(described, dist.get_process_group_ranks(group))}")


def check_number(group: ProcessGroup, text: Callable[[], Sequence[str]], device: torch.device, what: str) -> None:
    """The same, for every step: one reduction of two numbers while ranks agree."""
    number = zlib.crc32("\n".join(text()).encode())
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    most, least = extremes.tolist()
    if most != -least:
        check_agreement(group, text(), what)


def _at_other_places(doings: dict[int, str]) -> str:
    """Who was doing what, if that differs."""
    if len(set(doings.values())) == 1:
        return ""
    where = "; ".join(f"{_numbered([rank for rank in doings if doings[rank] == doing])} was {doing}"
                      for doing in dict.fromkeys(doings.values()))
    return (f", at different places: {where}; did one of them call step(), backward() or zero_grad() more often than "
            "the others?")


def _numbered(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'each of ranks'} {', '.join(map(str, ranks))}"


_told: Counter[tuple[int, ...]] = Counter()
"""How often these ranks told each other how they differ."""


def difference_told(lines: Sequence[str], ranks: Sequence[int]) -> str:
    """How ranks differ in what they say, told through the store: no collective, so that each may ask when it notices.

    Args:
        ranks: global numbers of those that notice, this one among them.
    """
    _told[tuple(ranks)] += 1
    topic = f"mp_optim/difference/{'-'.join(map(str, ranks))}/{_told[tuple(ranks)]}"
    store, keys = _get_default_store(), {rank: f"{topic}/{rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], "\n".join(lines))
    deadline = time.monotonic() + _PATIENCE
    silent = list(ranks)
    while silent and time.monotonic() < deadline:
        silent = [rank for rank in silent if not store.check([keys[rank]])]
        time.sleep(0.05 if silent else 0.0)
    told = [rank for rank in ranks if rank not in silent]
    how = difference([store.get(keys[rank]).decode().splitlines() for rank in told], told)
    quiet = f"ranks {silent} did not say what they have" if silent else ""
    return "; ".join(filter(None, (how, quiet))) or "they do not say how"


def naming_missing_ranks(group: ProcessGroup) -> Callable[[str], Any]:
    """A context for communication within a group; a failure in it says which ranks did not get there.

    Every rank that fails leaves a note in the store through which the ranks found each other, with what it was doing;
    those that leave none are the ones that are missing. If none is, the notes say who was at another place.
    """

    failures = itertools.count()

    @contextmanager
    def guard(doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not _is_communication(error):
                raise
            who = _who_is_missing(group, next(failures), doing)
            raise RuntimeError(f"{doing} failed: {who} ({_first_line(error)})") from error

    return guard


def _is_communication(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, dist.DistError) or any(sign in text for sign in (
        "gloo", "Connection", "Timed out", "timed out", "NCCL", "monitoredBarrier"))


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _who_is_missing(group: ProcessGroup, failure: int, doing: str) -> str:
    ranks = dist.get_process_group_ranks(group)

    def note(rank: int) -> str:
        return f"mp_optim/failed/{group.group_name}/{failure}/{rank}"

    try:
        store = _get_default_store()
        store.set(note(dist.get_rank()), doing)
        deadline = time.monotonic() + _PATIENCE
        missing = ranks
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.check([note(rank)])]
            time.sleep(0.05 if missing else 0.0)
        doings = {rank: store.get(note(rank)).decode() for rank in ranks if rank not in missing}
    except RuntimeError:
        return "the store is gone too, so rank 0, if it keeps it, has ended"
    if not missing:
        return f"all of ranks {ranks} noticed{_at_other_places(doings)}"
    word = "rank" if len(missing) == 1 else "ranks"
    return f"{word} {', '.join(map(str, missing))} of {ranks} did not take part (ended, stuck or doing something else)"
