"""Sums of squares in FP64 in a fixed order, the same bits on any device and for any thread count.

The order: a tensor's elements, row-major, are cut into blocks of 1024, zero filled. Inside a block the
squares are added by halving (``x[:512] + x[512:]`` and so on). Block sums are added in adjacent pairs,
zero filled. So a block, or any aligned power-of-two run of blocks, can be summed by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK", "sum_of_squares"]

BLOCK = 1024
_PIECE = {"cpu": 128 * BLOCK}
_PIECE_ELSEWHERE = 16384 * BLOCK


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """FP64 sum of squares of each tensor, shape (n,), on the tensors' device.

    Args:
        tensors: any floating dtype, any strides, one device. Inf and nan propagate; an empty one gives 0.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    piece = _PIECE.get(device.type, _PIECE_ELSEWHERE)
    sums = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    small: dict[int, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor.numel() > piece:
            sums[index] = _sum_large(tensor.reshape(-1), piece)
        elif tensor.numel():
            small[_next_power(-(-tensor.numel() // BLOCK))].append(index)
    for blocks, indices in small.items():
        step = max(1, piece // (blocks * BLOCK))
        for start in range(0, len(indices), step):
            batch = indices[start : start + step]
            found = _sum_batch([tensors[i] for i in batch], blocks)
            sums[torch.tensor(batch, device=device)] = found
    return sums


def _next_power(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _sum_batch(tensors: Sequence[Tensor], blocks: int) -> Tensor:
    """Tensors of at most ``blocks`` (a power of two) blocks each."""
    padded = torch.zeros(len(tensors), blocks * BLOCK, dtype=torch.float64, device=tensors[0].device)
    for row, tensor in zip(padded, tensors, strict=True):
        row[: tensor.numel()].copy_(tensor.reshape(-1))
    return _add_pairs(_add_halves(padded.square_().view(len(tensors), blocks, BLOCK)))


def _add_halves(squares: Tensor) -> Tensor:
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    return squares.squeeze(-1)


def _add_pairs(sums: Tensor) -> Tensor:
    """Adjacent pairs along the last dimension, whose size is a power of two."""
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    return sums.squeeze(-1)


def _sum_large(flat: Tensor, piece: int) -> Tensor:
    parts = torch.cat([_sum_batch([part], piece // BLOCK) for part in flat.split(piece)])
    full = torch.zeros(_next_power(parts.numel()), dtype=torch.float64, device=flat.device)
    full[: parts.numel()] = parts
    return _add_pairs(full)
