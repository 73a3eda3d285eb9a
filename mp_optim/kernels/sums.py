"""Sums of squares in FP64 in a fixed order, with the same bits on any device and number of threads.

A tensor's row-major elements are divided into blocks of 1024, padded with zeros. A block has 8 rows
of 128 squares. The rows are added one after another, then the 128 sums by halving (``x[:64] +
x[64:]`` and so on). Sums of blocks are added in adjacent pairs, padded with zeros. So a run of 2^k
blocks that starts at a multiple of 2^k blocks can be summed separately. The sums of a parameter's
shards are all-reduced over the ranks with these shards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.core import CachedTensorList
from mp_optim.kernels.chunking import piece_elements
from mp_optim.process_groups.missing_ranks import naming_missing_ranks, start_collective, wait_for

SUM_BLOCK = 1024
_ROW = 128


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor: FP64, shape (n,), on the tensors' device.

    Args:
        tensors: tensors on one device, of any floating dtype and strides. Inf and NaN propagate;
            the sum of an empty tensor is 0.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    piece = piece_elements(device)
    sums = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    small: dict[int, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor.numel() > piece:
            of_parts = []
            for start in range(0, tensor.numel(), piece):
                part = _row_major(tensor, start, min(start + piece, tensor.numel()))
                of_parts.append(_sum_batch([part], piece // SUM_BLOCK))
            sums[index] = sum_in_pairs(torch.cat(of_parts))
        elif tensor.numel():
            small[_next_power(-(-tensor.numel() // SUM_BLOCK))].append(index)
    for blocks, indices in small.items():
        step = max(1, piece // (blocks * SUM_BLOCK))
        for start in range(0, len(indices), step):
            together = indices[start : start + step]
            some = _sum_batch([tensors[index] for index in together], blocks)
            sums[torch.tensor(together, device=device)] = some
    return sums


def combine_pieces(owners: Sequence[int], pieces: Tensor, count: int) -> Tensor:
    """Return sums of ``count`` tensors from sums of their aligned pieces.

    Args:
        owners: index of each piece's tensor. The pieces of a tensor are in order; a tensor without
            pieces has sum 0.
        pieces: FP64, shape (len(owners), k): for each piece, k sums that are added separately.
        count: number of tensors.

    Returns:
        FP64, shape (count, k).
    """
    sums = torch.zeros(count, pieces.shape[-1], dtype=torch.float64, device=pieces.device)
    cut: dict[int, list[int]] = defaultdict(list)
    for position, owner in enumerate(owners):
        cut[owner].append(position)
    whole = {owner: where[0] for owner, where in cut.items() if len(where) == 1}
    sums[_index(whole.keys(), sums)] = pieces[_index(whole.values(), sums)]
    for owner, where in cut.items():
        if len(where) > 1:
            sums[owner] = sum_in_pairs(pieces[_index(where, sums)].T)
    return sums


def _index(values: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long, device=like.device)


def root(values: Tensor) -> Tensor:
    """Return correctly rounded square roots of FP64 values, on the values' device.

    torch's FP64 square root is correctly rounded on a GPU, but on a CPU one result in 150 is off by
    a unit in the last place. So Python computes the roots on a CPU.
    """
    if values.device.type != "cpu":
        return values.sqrt()
    return torch.tensor(
        [math.sqrt(value) for value in values.flatten().tolist()], dtype=torch.float64, device="cpu"
    ).view_as(values)


@lru_cache(maxsize=64)
def index_on(device: torch.device, indices: tuple[int, ...]) -> Tensor:
    """Return int64 indices on a device, cached because a copy to a GPU synchronizes."""
    return torch.tensor(indices, dtype=torch.long, device=device)


def _next_power(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _sum_batch(tensors: Sequence[Tensor], blocks: int) -> Tensor:
    """Return sums of squares of tensors with at most ``blocks`` blocks each. ``blocks`` is a power
    of two."""
    padded = torch.zeros(
        len(tensors), blocks * SUM_BLOCK, dtype=torch.float64, device=tensors[0].device
    )
    for row, tensor in zip(padded.unbind(), tensors, strict=True):
        row[: tensor.numel()].copy_(tensor.reshape(-1))
    first, *others = padded.square_().view(len(tensors), blocks, SUM_BLOCK // _ROW, _ROW).unbind(-2)
    total = first.clone()
    for row in others:
        total += row
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return sum_in_pairs(total.squeeze(-1))


def sum_in_pairs(values: Tensor) -> Tensor:
    """Add the values of the last dimension in adjacent pairs, padded with zeros."""
    count = values.shape[-1]
    sums = torch.nn.functional.pad(values, (0, _next_power(count) - count))
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    return sums.squeeze(-1)


def by_dtype(tensors: CachedTensorList, sum_alike: Callable[[CachedTensorList], Tensor]) -> Tensor:
    """Group tensors by dtype, and return the sum of each tensor: FP64, shape (n,).

    Args:
        tensors: tensors on one device.
        sum_alike: function that returns the sums of k tensors of one dtype: FP64, shape (k,).
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    sums = torch.empty(len(tensors), dtype=torch.float64, device=device)
    for dtype in tensors.dtypes:
        indices = tuple(index for index, tensor in enumerate(tensors) if tensor.dtype == dtype)
        alike = CachedTensorList(tensors[index] for index in indices)
        sums.index_copy_(0, index_on(device, indices), sum_alike(alike))
    return sums


def _row_major(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements from ``start`` to ``stop``, in row-major order, 1-D.

    Of a strided tensor, only slices along dimension 0 that have these elements are copied.
    """
    while tensor.shape[0] == 1 and tensor.dim() > 1:
        tensor = tensor[0]
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    row = tensor[0].numel()
    first = start // row
    return tensor[first : -(-stop // row)].reshape(-1)[start - first * row : stop - first * row]


Groups = tuple[ProcessGroup, ...]


def reduce_over(
    groups: Sequence[ProcessGroup],
    value: Tensor,
    doing: str,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """All-reduce a value in place over each of several process groups, in order.

    Args:
        groups: process groups.
        value: tensor to reduce.
        doing: description of the reduction, for the error if a rank is missing.
        op: reduction, by default the sum.
    """
    for group in groups:
        with naming_missing_ranks(group)(doing):
            work = start_collective(dist.all_reduce, value, op=op, group=group)
            wait_for(work, group, value.device)


def reduce_rows(rows: Tensor, shard_groups: Sequence[Groups], doing: str) -> None:
    """Sum rows in place over the ranks with other shards of the same parameter.

    All rows with the same process groups are reduced together.

    Args:
        rows: one row for each parameter, of any shape.
        shard_groups: for each row, the process groups over which the parameter is sharded.
        doing: description of the reduction, for the error if a rank is missing.
    """
    alike: dict[Groups, list[int]] = defaultdict(list)
    for index, groups in enumerate(shard_groups):
        alike[groups].append(index)
    for groups, indices in alike.items():
        if groups and len(indices) == len(shard_groups):
            reduce_over(groups, rows, doing)
        elif groups:
            where = index_on(rows.device, tuple(indices))
            part = rows[where]
            reduce_over(groups, part, doing)
            rows[where] = part
