"""Block formats on disk: state in few bits has one scale for each run of 256 row-major elements of
the whole tensor.

A layout that cuts the tensor cuts blocks, so it cannot keep such state as it is; but it can read
it, with the scale of each element it owns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.checkpoint.flat import FlatShard
from mp_optim.checkpoint.partitioned import PartitionShard
from mp_optim.slots.tensor_layout import is_split

BLOCK = 256
"""Elements that share a scale."""


def is_cut(tensor: Tensor) -> bool:
    """Whether a rank holds only a part of a tensor, in a layout that is not its own blocks'."""
    if isinstance(tensor, PartitionShard):
        return True
    if isinstance(tensor, FlatShard):
        return tensor.local.numel() != tensor.numel()
    return is_split(tensor)


def scales_of_elements(tensor: Tensor, scale: Tensor) -> Tensor:
    """The scale of each element of a rank's part of a tensor, FP32, in the part's shape and a last
    dimension of 1 (by which it is told from the scales of blocks).

    Args:
        tensor: a DTensor, a FlatShard or a PartitionShard.
        scale: the whole tensor's scales, shape (ceil(numel / 256),).
    """
    return scale[_flat_index(tensor).to(scale.device) // BLOCK][..., None]


def _flat_index(tensor: Tensor) -> Tensor:
    """Row-major index in the whole tensor of each element of a rank's part."""
    if isinstance(tensor, PartitionShard):
        inside = _flat_index(tensor.held)
        return tensor.partition.whole_index(inside, tensor.held.shape)
    if isinstance(tensor, FlatShard):
        return torch.arange(
            tensor.start, tensor.start + tensor.local.numel(), device="cpu"
        )
    if not isinstance(tensor, DTensor):
        return torch.arange(tensor.numel(), device="cpu").view(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    shape, offset = chunk.sizes, chunk.offsets
    index, stride = torch.zeros(tuple(shape), dtype=torch.int64, device="cpu"), 1
    for dim in reversed(range(len(shape))):
        steps = (
            torch.arange(offset[dim], offset[dim] + shape[dim], device="cpu") * stride
        )
        index += steps.view(-1, *(1,) * (len(shape) - dim - 1))
        stride *= tensor.shape[dim]
    return index
