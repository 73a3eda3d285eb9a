"""Memory that products of matrices are written to, used again by the next batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Rooms:
    """Buffers by name, each as large as the largest that was asked for.

    Args:
        device, dtype: of all of them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._rooms: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A buffer, with anything in it; what was taken by this name before is given up."""
        size = math.prod(shape)
        room = self._rooms.get(name)
        if room is None or room.numel() < size:
            self._rooms.pop(name, None)
            room = torch.empty(size, dtype=self.dtype, device=self.device)
            self._rooms[name] = room
        return room[:size].view(shape)

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """A buffer of a tensor's shape."""
        return self.take(name, *tensor.shape)


def side_by_side(stacks: Sequence[Tensor]) -> Tensor:
    """Contiguous matrices and stacks of them, of one shape of matrices, as one stack (all of them,
    rows, columns): a view if they lie one after the other, else a copy."""
    first, end = stacks[0], stacks[0].data_ptr()
    rows, columns = first.shape[-2:]
    adjacent = True
    for stack in stacks:
        adjacent = adjacent and stack.data_ptr() == end
        end += stack.numel() * stack.element_size()
    storage = first.untyped_storage()
    if not adjacent or end > storage.data_ptr() + storage.nbytes():
        return torch.cat([each.view(-1, rows, columns) for each in stacks])
    size = sum(each.numel() for each in stacks)
    shape = (size // (rows * columns), rows, columns)
    return first.as_strided(shape, (rows * columns, columns, 1))


def beside_each_other(
    shapes: Sequence[torch.Size], rooms: Rooms, name: str
) -> list[Tensor]:
    """Memory for tensors of these shapes, in which matrices of one shape follow each other, each
    such run from a multiple of 64 bytes on."""
    width = 64 // rooms.dtype.itemsize
    starts, end = [0] * len(shapes), 0
    by_matrix: dict[torch.Size, list[int]] = {}
    for index, shape in enumerate(shapes):
        by_matrix.setdefault(shape[-2:], []).append(index)
    for indices in by_matrix.values():
        end = -(-end // width) * width
        for index in indices:
            starts[index] = end
            end += shapes[index].numel()
    room = rooms.take(name, end)
    return [
        room[start : start + shape.numel()].view(shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]
