"""Reductions over the ranks that hold the parts of a parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.ranks.missing_ranks import naming_missing_ranks, wait_for
from mp_optim.update.sums import index_on

Groups = tuple[ProcessGroup, ...]


def reduce_over(
    groups: Groups,
    value: Tensor,
    doing: str,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce a value in place over the ranks of one group after the other.

    Args:
        doing: what to say of it if a rank is missing.
    """
    for group in groups:
        with naming_missing_ranks(group)(doing):
            work = dist.all_reduce(value, op=op, group=group, async_op=True)
            wait_for(work, group, value.device)


def reduce_rows(rows: Tensor, shard_groups: Sequence[Groups], doing: str) -> None:
    """Add up the rows of split parameters in place: one reduction for all that are split alike.

    Args:
        rows: one for each parameter.
        doing: what to say of it if a rank is missing.
    """
    split: dict[Groups, list[int]] = defaultdict(list)
    for index, groups in enumerate(shard_groups):
        if groups:
            split[groups].append(index)
    for groups, indices in split.items():
        where = index_on(rows.device, indices)
        part = rows[where]
        reduce_over(groups, part, doing)
        rows[where] = part
