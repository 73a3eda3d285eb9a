"""Reductions over the ranks that hold the parts of a parameter."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.ranks.missing_ranks import naming_missing_ranks, wait_for

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
