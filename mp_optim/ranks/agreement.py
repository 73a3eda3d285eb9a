"""Ranks that disagree, or are gone: an error that says which rank and what, instead of wrong
numbers or a hang."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

from mp_optim.ranks.missing_ranks import call, wait_for

_PATIENCE = 5.0
"""Seconds within which every rank that is still there has noticed a failure too."""


def difference(described: Sequence[Sequence[str]], ranks: Sequence[int]) -> str | None:
    """How ranks differ in what they say, line by line, from what most of them say; None if they do
    not.

    Args:
        described: the lines of each rank.
        ranks: their global numbers.
    """
    said = list(map(tuple, described))
    common = max(said, key=said.count)  # of those said equally often, the first
    reference = ranks[said.index(common)]
    differences = []
    for rank, lines in zip(ranks, said, strict=True):
        if lines == common:
            continue
        pairs = zip_longest(lines, common, fillvalue="nothing")
        here, there = next((a, b) for a, b in pairs if a != b)
        differences.append(
            f"rank {rank} has {here!r} where rank {reference} has {there!r}"
        )
    return "; ".join(differences) or None


def check_agreement(group: ProcessGroup, lines: Sequence[str], what: str) -> None:
    """Compare a description between the ranks of a group. Collective.

    Raises:
        ValueError: on every rank, naming those that differ and how.
    """
    digests: list[str] = [""] * group.size()
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    call(group, lambda: dist.all_gather_object(digests, digest, group=group))
    if len(set(digests)) == 1:
        return
    described: list[Sequence[str]] = [()] * group.size()
    call(group, lambda: dist.all_gather_object(described, list(lines), group=group))
    raise ValueError(
        f"the ranks that share {what} disagree: "
        f"{difference(described, dist.get_process_group_ranks(group))}"
    )


def check_number(
    group: ProcessGroup,
    text: Callable[[], Sequence[str]],
    device: torch.device,
    what: str,
) -> None:
    """The same, for every step: one reduction of two numbers while ranks agree."""
    number = zlib.crc32("\n".join(text()).encode())
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    wait_for(
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group, async_op=True),
        group,
        device,
    )
    most, least = extremes.tolist()
    if most != -least:
        check_agreement(group, text(), what)


_told: Counter[tuple[int, ...]] = Counter()
"""How often these ranks told each other how they differ."""


def difference_told(lines: Sequence[str], ranks: Sequence[int]) -> str:
    """How ranks differ in what they say, told through the store: no collective, so that each may
    ask when it notices.

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
    how = difference(
        [store.get(keys[rank]).decode().splitlines() for rank in told], told
    )
    quiet = f"ranks {silent} did not say what they have" if silent else ""
    return "; ".join(filter(None, (how, quiet))) or "they do not say how"
