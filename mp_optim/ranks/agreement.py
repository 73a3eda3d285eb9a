"""Whom to agree with: the few process groups the stack reduces scalars over."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from mp_optim.ranks.missing_ranks import (
    naming_missing_ranks,
    shared_store,
    start_collective,
    wait_for,
)


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups by what they are for; None means this process alone.

    Attributes:
        grad_stats: ranks that hold different dense parameters of one model copy (tensor x pipeline
            parallel).
        expert_grad_stats: the same for expert parameters (expert x tensor x pipeline parallel).
        tp: tensor-parallel ranks of dense parameters, to count duplicated parameters once.
        expert_tp: the same for expert parameters.
        dp: ranks that hold copies of dense parameters; a distributed optimizer reduces over them.
            With ``use_distributed_optimizer`` by default all ranks.
        expert_dp: the same for expert parameters; by default as dp.
        ep: ranks that hold different experts of one layer, which each counts from 0.
        pp: the stages of a pipeline, which each count their layers from 0. With several, building
            an optimizer is a collective of theirs.
    """

    grad_stats: ProcessGroup | None = None
    expert_grad_stats: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    expert_tp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    expert_dp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    pp: ProcessGroup | None = None

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> ProcessGroups:
        """From a mesh whose dimensions are named ``dp``, ``tp``, ``pp`` and ``ep`` (any subset).
        Collective.

        Ranks along ``ep`` hold different experts and copies of the dense parameters, so the latter
        are data-parallel over it too.

        Raises:
            ValueError: the mesh has no names, or an unknown one.
        """
        names = mesh.mesh_dim_names
        known = {"dp", "dp_shard", "dp_replicate", "tp", "pp", "ep"}
        if not names or set(names) - known:
            raise ValueError(
                f"mesh_dim_names={names!r}: name every dimension, out of {sorted(known)}"
            )

        def over(*wanted: str) -> ProcessGroup | None:
            present = tuple(name for name in names if name in wanted)
            if not present:
                return None
            part = mesh[present]
            return part.get_group() if len(present) == 1 else part._flatten().get_group()

        copies = ("dp", "dp_shard", "dp_replicate")
        expert_dp = over(*copies)
        if expert_dp is None and "ep" in names:  # no two ranks hold the same expert
            expert_dp = dist.new_subgroups(1)[0]  # type: ignore[no-untyped-call]
        return cls(
            grad_stats=over("tp", "pp"),
            expert_grad_stats=over("tp", "pp", "ep"),
            tp=over("tp"),
            expert_tp=over("tp"),
            dp=over(*copies, "ep"),
            expert_dp=expert_dp,
            ep=over("ep"),
            pp=over("pp"),
        )

    @classmethod
    def from_attributes(cls, groups: Any) -> ProcessGroups:
        """From any object with Megatron's attribute names (``mp``, ``tp``, ``expt_tp``,
        ``tp_ep_pp``, ...).

        Raises:
            ValueError: one has several ranks for what there is none of here, naming it.
        """
        for name in ("gtp_remat", "expt_gtp_remat"):
            group = getattr(groups, name, None)
            if group is not None and group.size() > 1:
                raise ValueError(
                    f"{name} has {group.size()} ranks: generalised tensor parallelism is not in "
                    "this version; leave out --tensor-parallel-num-weight-shards and its expert "
                    "counterpart"
                )

        def first(*names: str) -> ProcessGroup | None:
            return next(
                (g for name in names if (g := getattr(groups, name, None)) is not None), None
            )

        return cls(
            grad_stats=first("mp"),
            expert_grad_stats=first("expt_tp_pp", "tp_ep_pp"),
            tp=first("tp"),
            expert_tp=first("expt_tp"),
            dp=first("dp_cp", "dp"),
            expert_dp=first("expt_dp"),
            ep=first("ep"),
            pp=first("pp"),
        )


# -- agreement: an error that says which rank differs in what, instead of wrong numbers or a hang --

_PATIENCE = 5.0
"""Seconds within which every rank that is still there has noticed a failure too."""
_GRACE = 2.0
"""Seconds for the others to read the answer."""


def difference(described: Sequence[Sequence[str]], ranks: Sequence[int]) -> str | None:
    """How ranks' descriptions differ, line by line, from that of most of them; None if they do not.

    Args:
        described: the lines of each rank.
        ranks: their global numbers.
    """
    by_rank = list(map(tuple, described))
    common = max(by_rank, key=by_rank.count)  # of those that are equally frequent, the first
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
        lines: the description.
        device: where the numbers are, if the groups communicate from there.
        doing: what an error calls it if a rank is missing.
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
    numbers: Tensor, groups: Sequence[ProcessGroup], device: torch.device, doing: str
) -> Tensor:
    """Each number's largest value among the ranks of all these groups."""
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
    """How ranks' descriptions differ. They exchange them through the store: no collective, so that
    each may ask when it notices. The first of them compares, and writes the answer.

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
    _wait_until(lambda: store.check([str(rank) for rank in ranks]), _PATIENCE)
    spoken = [rank for rank in ranks if store.check([str(rank)])]
    lines = [store.get(str(rank)).decode().splitlines() for rank in spoken]
    silent = [rank for rank in ranks if rank not in spoken]
    quiet = f"ranks {silent} did not say what they have" if silent else ""
    return "; ".join(filter(None, (difference(lines, spoken), quiet)))


def _wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
