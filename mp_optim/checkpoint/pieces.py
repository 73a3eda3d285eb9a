"""The boxes of a tensor that a rank holds, each with the memory of its elements."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from mp_optim.checkpoint.flat import FlatShard, boxes
from mp_optim.checkpoint.partitioned import PartitionShard


class Place(NamedTuple):
    """A box of a tensor: index of its first element, and its shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@lru_cache(maxsize=1024)
def whole_place(shape: tuple[int, ...]) -> Place:
    """The box that is all of a tensor."""
    return Place((0,) * len(shape), tuple(shape))


def places_of(tensor: Tensor) -> tuple[Place, ...] | None:
    """The boxes that this rank holds of a tensor that says so itself; None for one that is simply
    whole.

    Of a tensor without elements every rank holds the one empty box, so that it is on record.

    Raises:
        TypeError: it is a ShardedTensor, which torch has given up for DTensor.
    """
    if isinstance(tensor, PartitionShard):
        return _partition_places(tensor)
    if isinstance(tensor, FlatShard):
        return _flat_places(tuple(tensor.shape), tensor.start, tensor.local.numel())
    if isinstance(tensor, ShardedTensor):
        raise TypeError("a ShardedTensor cannot be saved or loaded; use DTensor")
    if not hasattr(tensor, "__create_chunk_list__"):
        return None
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return ()
    if not tensor.numel():
        return (whole_place(tuple(tensor.shape)),)
    chunks = tensor.__create_chunk_list__()
    return tuple(
        Place(tuple(chunk.offsets), tuple(chunk.sizes))
        for chunk in chunks
        if 0 not in chunk.sizes
    )


@lru_cache(maxsize=1 << 16)
def _flat_places(shape: tuple[int, ...], start: int, count: int) -> tuple[Place, ...]:
    return tuple(Place(box.offsets, box.sizes) for box in boxes(shape, start, count))


def _partition_places(shard: PartitionShard) -> tuple[Place, ...]:
    if not shard.numel():
        return (whole_place(tuple(shard.shape)),)
    cuts = (shard.partition.cuts(*inside) for inside in _inside(shard))
    return tuple(Place(cut.offsets, cut.sizes) for some in cuts for cut in some)


def _inside(shard: PartitionShard) -> tuple[Place, ...]:
    """What the rank has of its part."""
    places = places_of(shard.held)
    return (whole_place(tuple(shard.held.shape)),) if places is None else places


def _partition_piece(shard: PartitionShard, place: Place) -> Tensor:
    for inside in _inside(shard):
        for cut in shard.partition.cuts(*inside):
            if (cut.offsets, cut.sizes) == place:
                dim = shard.partition.dim
                box = piece(shard.held, inside)
                return box.narrow(dim, cut.begin, cut.sizes[dim])
    return torch.empty(place.sizes, dtype=shard.dtype, device="cpu")


def piece(tensor: Tensor, place: Place) -> Tensor:
    """The live elements of one of the boxes of :func:`places_of`, or of the whole."""
    if isinstance(tensor, PartitionShard):
        return _partition_piece(tensor, place)
    if isinstance(tensor, FlatShard):
        if place.sizes == tensor.shape:
            return tensor.local.view(place.sizes)
        return next(
            view for box, view in tensor.box_views() if box.offsets == place.offsets
        )
    if not hasattr(tensor, "__get_tensor_shard__"):
        return tensor.detach()
    if not tensor.numel():
        return torch.empty(place.sizes, dtype=tensor.dtype, device="cpu")
    shard: Tensor = tensor.__get_tensor_shard__(
        MetadataIndex("", torch.Size(place.offsets))
    )
    return shard.detach()


def narrowed(value: Tensor, begin: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """A box of a tensor, as a view."""
    for dim, (first, size) in enumerate(zip(begin, sizes, strict=True)):
        value = value.narrow(dim, first, size)
    return value
