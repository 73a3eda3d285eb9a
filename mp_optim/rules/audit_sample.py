"""The sample of an audited step: the blocks drawn, their copies, the elements that differ."""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.config.state_forms import BLOCK, PACKED, blocks_of, packed_bytes
from mp_optim.core.slot_state import is_scale
from mp_optim.host.transfer import Transfer, fetch
from mp_optim.kernels.chunking import part_of_state
from mp_optim.kernels.codecs import is_packed, mix

CELL = 32
"""Blocks that are sampled together."""
CELLS = 8
"""The least cells that are sampled of a launch, unless it is none: they share its fixed cost."""
GOLDEN, MASK = 0x9E3779B9, 0xFFFFFFFF

Tensors = Mapping[str, Tensor]
Fetched = Callable[[], Tensors]
"""Waits for tensors that are copied to the host, and returns them."""


# -- which elements -------------------------------------------------------------------------------


class Run(NamedTuple):
    """Neighbours in one tensor of a launch: from a multiple of 256 on, whole blocks or all that are
    left. ``blocks``: so many, the last one perhaps in part."""

    owner: int
    start: int
    numel: int
    blocks: int

    @property
    def room(self) -> int:
        """Elements of its blocks."""
        return self.blocks * BLOCK


def draw(sizes: Sequence[int], ends: Sequence[int], rate: float, seed: int) -> list[Run]:
    """A sample of tensors: each element is in it with the probability ``rate``.

    Blocks are counted through all tensors, and cut into cells. Of a large launch one cell in
    ``1 / rate`` is drawn, from a random one on; of one of which that would be few, in some steps
    alone, and then as many as of a large one.

    Args:
        sizes: elements of each. ends: blocks of each and of all before it.
        seed: 32 bits.
    """
    total = ends[-1] if ends else 0
    cells = -(-total // CELL)
    chance = min(1.0, max(cells * rate / CELLS, rate))
    if not total or _uniform(seed, 0) >= chance:
        return []
    stride = chance / rate
    return [
        run
        for number in range(math.ceil(cells / stride))
        if (cell := int((number + _uniform(seed, 1)) * stride)) < cells
        for run in _runs(cell * CELL, min(total, (cell + 1) * CELL), sizes, ends)
    ]


def _uniform(seed: int, index: int) -> float:
    """A number from 0 to below 1, by the counter."""
    return mix((seed + index * GOLDEN) & MASK) / 2.0**32


def _runs(first: int, end: int, sizes: Sequence[int], ends: Sequence[int]) -> Iterator[Run]:
    """Blocks as parts of the tensors that they are in."""
    while first < end:
        owner = bisect_right(ends, first)
        start = (first - (ends[owner - 1] if owner else 0)) * BLOCK
        stop = min(end, ends[owner])
        yield Run(owner, start, min((stop - first) * BLOCK, sizes[owner] - start), stop - first)
        first = stop


# -- their bits -----------------------------------------------------------------------------------


def gather(
    columns: Mapping[str, Sequence[Tensor | None]], runs: Sequence[Run]
) -> dict[str, Tensor]:
    """Copies of some runs of tensors that are alike, 1-D, one after the other in whole blocks,
    filled up with zeros. A column of None is left out."""
    gathered = {}
    for key, column in columns.items():
        tensors = [tensor for run in runs if (tensor := column[run.owner]) is not None]
        if tensors:
            copy = _copied if tensors[0].is_cpu else _queued
            gathered[key] = copy(key, tensors, runs)
    return gathered


def _queued(key: str, tensors: Sequence[Tensor], runs: Sequence[Run]) -> Tensor:
    pieces = []
    for run, tensor in zip(runs, tensors, strict=True):
        pieces.append(part_of_state(key, tensor, run.start, run.numel))
        if missing := _stored(key, tensor.dtype, run.room) - pieces[-1].numel():
            pieces.append(pieces[-1].new_zeros(missing))
    return torch.cat(pieces)


def _copied(key: str, tensors: Sequence[Tensor], runs: Sequence[Run]) -> Tensor:
    """The same at once, at a quarter of the cost: a sample has hundreds of pieces, and views of
    them would take longer than all else."""
    dtype = tensors[0].dtype
    block, width = _stored(key, dtype, BLOCK), dtype.itemsize
    is_full = all(run.numel == run.room for run in runs)
    make = torch.empty if is_full else torch.zeros
    copy = make(block * sum(run.blocks for run in runs), dtype=dtype, device="cpu")
    to = copy.data_ptr()
    for (_, start, numel, blocks), tensor in zip(runs, tensors, strict=True):
        size = block * blocks
        count = size if numel == blocks * BLOCK else _stored(key, dtype, numel)
        ctypes.memmove(to, tensor.data_ptr() + start // BLOCK * block * width, count * width)
        to += size * width
    return copy


def _stored(key: str, dtype: torch.dtype, numel: int) -> int:
    """What a tensor has for so many elements."""
    if is_scale(key):
        return blocks_of(numel)
    return packed_bytes(numel) if is_packed(key, dtype) else numel


def element_index(key: str, dtype: torch.dtype, index: int) -> int:
    """Which element a number in a tensor is of, or the first one."""
    if is_scale(key):
        return index * BLOCK
    if is_packed(key, dtype):
        return index // (PACKED // 2) * PACKED + index % (PACKED // 2)
    return index


def brought(tensors: dict[str, Tensor], transfer: Transfer | None) -> Fetched:
    """Start to copy tensors to the host, in one piece; nothing waits for it. No transfer: they are
    there."""
    if transfer is None:
        return lambda: tensors
    order = sorted(tensors, key=lambda key: -tensors[key].itemsize)  # so that each is aligned
    together = torch.cat([tensors[key].view(torch.uint8) for key in order])
    come = fetch(transfer, together)

    def value() -> Tensors:
        parts = torch.split(come(), [tensors[key].nbytes for key in order])
        return {key: part.view(tensors[key].dtype) for key, part in zip(order, parts, strict=True)}

    return cache(value)


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(found: Tensor, expected: Tensor) -> list[int]:
    """Where bits differ. Two NaNs count as the same bits (docs/numerics.md)."""
    # torch.equal would have other threads help, and wait for them
    if not _memcmp(found.data_ptr(), expected.data_ptr(), found.nbytes):
        return []
    of_bits = BITS_OF_SIZE[found.itemsize]
    differ = found.view(of_bits) != expected.view(of_bits)
    if found.is_floating_point():
        differ &= ~(found.isnan() & expected.isnan())
    indices: list[int] = differ.nonzero().view(-1).tolist()
    return indices
