"""Launches the kernels that sum squares: first chunk by chunk, then in the order of
``update/sums.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from mp_optim.slots import CachedTensorList
from mp_optim.update.backends.launch_kinds import (
    FLOATS,
    Kind,
    check_fit,
    current_device,
)
from mp_optim.update.backends.triton.kernels import sums
from mp_optim.update.backends.triton.launcher import OPTIONS, TYPES
from mp_optim.update.backends.triton.tables import RUN, Plan, Tables
from mp_optim.update.sums import sum_of_squares

SUM_CHUNK = 16384
"""Elements a program sums."""


def sum_alike(tables: Tables, tensors: CachedTensorList) -> Tensor:
    """Sums of squares of tensors of one dtype."""
    if tensors[0].dtype not in FLOATS:
        return sum_of_squares(tensors)
    if not tensors.contiguous:
        tensors = CachedTensorList(tensor.contiguous() for tensor in tensors)
    device = tensors[0].device
    check_fit(Kind(tensors[0].dtype), {"grad": tensors})
    column = tables.column(tensors, device)
    total = None
    for plan, aligned in tables.plans(tensors, SUM_CHUNK, device, column.odd):
        squares = torch.empty(plan.programs, 1, dtype=torch.float64, device=device)
        if plan.programs:
            with current_device(device):
                sums.chunk_sums[(plan.programs,)](
                    plan.owners,
                    plan.firsts,
                    plan.sizes,
                    column.values,
                    squares,
                    TYPE=TYPES[tensors[0].dtype],
                    ALIGNED=aligned,
                    CHUNK=SUM_CHUNK,
                    **OPTIONS,
                )
        total = joined(total, added(plan, squares))
    assert total is not None
    return total[:, 0]


def joined(first: Tensor | None, second: Tensor) -> Tensor:
    """Sums of two plans: a tensor without programs in one of them has 0.0 there, which changes no
    bit."""
    return second if first is None else first + second


def added(plan: Plan, values: Tensor, launches: bool = True) -> Tensor:
    """From sums of chunks, shape (programs, columns), to sums of tensors; those are not written
    without ``launches``."""
    for each in plan.rounds:
        results = values.new_empty(each.programs, values.shape[1])
        if launches:
            with current_device(values.device):
                sums.run_sums[(each.programs,)](
                    each.owners,
                    each.firsts,
                    each.starts,
                    each.counts,
                    values,
                    results,
                    COLUMNS=values.shape[1],
                    RUN=RUN,
                    **OPTIONS,
                )
        values = results
    return values
