"""Ranks that disagree, or are gone: an error that says which rank and what, instead of wrong
numbers or a hang."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from mp_optim.ranks.missing_ranks import (
    naming_missing_ranks,
    shared_store,
    wait_for,
)

_PATIENCE = 5.0
"""Seconds within which every rank that is still there has noticed a failure too."""
_GRACE = 2.0
"""Seconds for the others to read what was told."""


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
        lines: the description.
        device: where the numbers lie, if the groups communicate from there.
        doing: what to say of it if a rank is missing.
        what: ranks share whose descriptions these are. then: follows from a disagreement.

    Raises:
        ValueError: on every rank, naming those that differ and how.
        MissingRanksError: a rank does something else, or is gone.
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
    numbers: Tensor,
    groups: Sequence[ProcessGroup],
    device: torch.device,
    doing: str,
) -> Tensor:
    """Each number's largest value among the ranks of all these groups."""
    for group in groups:
        numbers = numbers.to(_served(group, device))
        with naming_missing_ranks(group)(doing):
            work = dist.all_reduce(
                numbers, op=dist.ReduceOp.MAX, group=group, async_op=True
            )
            wait_for(work, group, numbers.device)
    return numbers


def _served(group: ProcessGroup, device: torch.device) -> torch.device:
    """The device, or the group's own if it communicates from others only."""
    kinds = {known.type: known for known in group._device_types}
    return device if device.type in kinds else next(iter(kinds.values()))


def number_of(lines: Sequence[str]) -> int:
    """A number of 56 bits for a description."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def difference_told(lines: Sequence[str], ranks: Sequence[int]) -> str:
    """How ranks differ in what they say, told through the store: no collective, so that each may
    ask when it notices. The first of them compares, and lets the others know.

    Args:
        ranks: global numbers of those that notice, this one among them.
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
            others = len(ranks) - 1  # this process may keep the store
            _wait_until(lambda: store.add("read", 0) == others, _GRACE)
        elif _wait_until(lambda: store.check(["how"]), _PATIENCE + _GRACE):
            how = store.get("how").decode()
            store.add("read", 1)
        else:
            how = f"rank {first} did not say what it has"
    except RuntimeError:  # the store is gone, and the rank that kept it
        return "they cannot say how: the store is gone"
    return how or "they do not say how"


def _compared(store: Store, ranks: Sequence[int]) -> str:
    silent = list(ranks)

    def have_spoken() -> bool:
        silent[:] = [rank for rank in silent if not store.check([str(rank)])]
        return not silent

    _wait_until(have_spoken, _PATIENCE)
    told = [rank for rank in ranks if rank not in silent]
    said = [store.get(str(rank)).decode().splitlines() for rank in told]
    quiet = f"ranks {silent} did not say what they have" if silent else ""
    return "; ".join(filter(None, (difference(said, told), quiet)))


def _wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
