"""A rank's part of a tensor, as a checkpoint stores it: a flat range (:class:`FlatShard`), a
tensor-parallel part (:class:`PartitionShard`), or a DTensor's local part. A checkpoint saves each
kind as boxes: rectangular parts of the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mp_optim.core.partition import Box, Partition, box_views, boxes, whole_box
from mp_optim.core.tensor_layout import split_dims
from mp_optim.host.torch_types import is_dtensor, is_sharded_tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

# -- flat ranges ----------------------------------------------------------------------------------


class FlatShard(Tensor):
    """Elements ``[start, start + n)`` of a row-major flattened tensor of shape ``global_shape``.

    The ``shape`` of a FlatShard is that of the whole tensor, and its memory is ``local``.
    ``torch.distributed.checkpoint`` writes a FlatShard as a few boxes, and reads any saved layout
    into it without extra copies. The ranges of two ranks may be equal or disjoint, but must not
    overlap in part.

    Args:
        local: the elements, contiguous, shape (n,), on any device. Not copied. ``n`` may be 0.
        global_shape: shape of the whole tensor; () for a scalar.
        start: index of the first element.

    Raises:
        ValueError: ``local`` is not 1-D and contiguous, or the range is not inside the tensor.
    """

    local: Tensor
    start: int

    @staticmethod
    def __new__(cls, local: Tensor, global_shape: Sequence[int], start: int) -> FlatShard:
        if local.dim() != 1 or not local.is_contiguous():
            raise ValueError(
                f"local has shape {tuple(local.shape)} and strides {local.stride()}: a flat range "
                "is one contiguous dimension; pass local.reshape(-1)"
            )
        boxes(tuple(global_shape), start, local.numel())
        shard: FlatShard = Tensor._make_wrapper_subclass(
            cls, torch.Size(global_shape), dtype=local.dtype, device=local.device
        )
        shard.local, shard.start = local.detach(), start
        return shard

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of the whole tensor that consist of this shard's elements, in order."""
        return boxes(self.shape, self.start, self.local.numel())

    def full_tensor(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return the whole tensor, gathered from the ranks of a group. Collective over the group.

        Args:
            group: the ranks that have ranges of the tensor; by default all.

        Raises:
            ValueError: the ranks' ranges do not cover the tensor.
        """
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, (self.start, self.local.cpu()), group=group)
        full = torch.empty(self.numel(), dtype=self.dtype, device="cpu")
        covered = 0
        for start, local in sorted(parts, key=lambda part: (part[0], part[1].numel())):
            if start > covered:
                break
            full[start : start + local.numel()] = local
            covered = max(covered, start + local.numel())
        if covered < full.numel():
            raise ValueError(
                f"no rank of the group has element {covered} of this tensor of shape "
                f"{tuple(self.shape)}; pass the group of all ranks that share the tensor"
            )
        return full.view(self.shape).to(self.device)

    # -- called by torch.distributed.checkpoint ---------------------------------------------------

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box), properties=properties, size=self.shape
                ),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes if box.numel]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, view in box_views(self.local, self.boxes):
            if torch.Size(box.offsets) == index.offset:
                return view
        raise ValueError(
            f"{index.fqn}: elements [{self.start}, {self.start + self.local.numel()}) of a tensor "
            f"of shape {tuple(self.shape)} have no box at {index.offset}; request one of .boxes"
        )

    # -- called by torch --------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Copy a FlatShard, or create an empty tensor of the same range. Raise NotImplementedError
        for arithmetic; callers compute with ``local``."""
        if func not in _RANGE_KEEPING:
            raise NotImplementedError(
                f"{func} of a FlatShard is not supported; compute with its .local"
            )
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        first = next(arg for arg in tensors if isinstance(arg, FlatShard))
        own = first.shape, first.start, first.local.numel()
        if any(
            not isinstance(arg, FlatShard) or (arg.shape, arg.start, arg.local.numel()) != own
            for arg in tensors
        ):
            raise ValueError(
                f"{func}: the tensors are not the same range of one shape; compute with their "
                ".local"
            )
        result = func(
            *[arg.local if isinstance(arg, FlatShard) else arg for arg in args], **(kwargs or {})
        )
        if func is torch.ops.aten.copy_.default:
            return first
        if not isinstance(result, Tensor):
            return result
        return FlatShard(result.reshape(-1), first.shape, first.start)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        end = self.start + self.local.numel()
        return f"FlatShard([{self.start}, {end}) of {tuple(self.shape)}, {self.local!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FlatShard, (self.local, tuple(self.shape), self.start)


_aten = torch.ops.aten
_RANGE_KEEPING = {
    _aten.detach.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.copy_.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.is_pinned.default,
}


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


# -- tensor-parallel parts ------------------------------------------------------------------------


class PartitionShard(Tensor):
    """A part of a tensor that is split over ranks. The ``shape`` is that of the whole tensor, and
    the memory is that of ``held``.

    Args:
        held: this rank's part: a plain tensor, or a DTensor or FlatShard if the part is split
            again.
        partition: position of the part in the whole.
        is_stacked: True if the whole is a stack of all ranks' tensors along a new first dimension.
            False if the parts are cut along a dimension of the parameter.
    """

    held: Tensor
    partition: Partition
    is_stacked: bool

    @staticmethod
    def __new__(
        cls, held: Tensor, partition: Partition, is_stacked: bool = False
    ) -> PartitionShard:
        shard: PartitionShard = Tensor._make_wrapper_subclass(
            cls, torch.Size(partition.whole_shape(held.shape)), dtype=held.dtype, device=held.device
        )
        shard.held, shard.partition = held.detach(), partition
        shard.is_stacked = is_stacked
        return shard

    @property
    def local(self) -> Tensor:
        """This rank's part, in the form that the optimizer stores."""
        return self.held[0] if self.is_stacked else self.held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func} of a PartitionShard is not supported; compute with its .local"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartitionShard({self.partition} of {tuple(self.shape)}, {self.held!r})"


def as_partition(value: Any, partition: Partition | None, shape: torch.Size | None = None) -> Any:
    """Return a state tensor as this rank's :class:`PartitionShard` of a whole tensor. Scalars are
    returned unchanged, and so are all values if the parameter is not split.

    State that has the split dimension of the parameter is split along this dimension, too. Other
    dimensions of the state may have size 1, as in the factors of Adafactor. State without the split
    dimension belongs to this rank alone. A checkpoint saves such state as one entry of a stack over
    ranks, so a load needs the same number of ranks.

    Args:
        value: the state tensor.
        partition: the split of the parameter; None if the parameter is not split.
        shape: shape of this rank's part of the parameter; by default the tensor's shape.
    """
    if partition is None or not isinstance(value, Tensor) or not value.dim():
        return value
    shape = value.shape if shape is None else shape
    alike = value.dim() == len(shape) and all(map(_is_1_or_same, value.shape, shape))
    if alike and value.shape[partition.dim] == shape[partition.dim]:
        return PartitionShard(value, partition)
    layer = Partition(0, (1,), partition.rank, partition.size)
    return PartitionShard(value[None], layer, is_stacked=True)


def part_like(saved: Sequence[int], dtype: torch.dtype, partition: Partition, param: Tensor) -> Any:
    """Allocate memory for this rank's part of saved state. This is the inverse of
    :func:`as_partition`.

    Args:
        saved: shape in the checkpoint.
        dtype: dtype of the memory.
        partition: the split of the parameter.
        param: this rank's part of the parameter.

    Returns:
        A PartitionShard, or a plain tensor for state that is not split.
    """
    dim, whole = partition.dim, partition.whole_shape(param.shape)
    alike = len(saved) == len(whole) and all(map(_is_1_or_same, saved, whole))
    if alike and saved[dim] == whole[dim]:
        cut = tuple(map(min, saved, param.shape))
        return PartitionShard(torch.empty(cut, dtype=dtype, device="cpu"), partition)
    ranks, *own = saved or (0,)
    if (
        ranks == partition.size
        and len(own) == param.dim()
        and all(map(_is_1_or_same, own, param.shape))
    ):
        layer = Partition(0, (1,), partition.rank, partition.size)
        part = torch.empty(1, *own, dtype=dtype, device="cpu")
        return PartitionShard(part, layer, is_stacked=True)
    return torch.empty(tuple(saved), dtype=dtype, device="cpu")


def _is_1_or_same(length: int, full: int) -> bool:
    return length in (1, full)


# -- boxes of a tensor ----------------------------------------------------------------------------


def boxes_of(tensor: Tensor) -> tuple[Box, ...] | None:
    """Return the boxes of a sharded tensor that this rank has; None for a tensor that is not
    sharded.

    A tensor without elements has one empty box on every rank, so that a checkpoint records the
    tensor.

    Args:
        tensor: any tensor.

    Raises:
        TypeError: the tensor is a ShardedTensor, which torch has replaced by DTensor.
    """
    if isinstance(tensor, FlatShard):
        return tensor.boxes
    if is_sharded_tensor(tensor):
        raise TypeError(
            f"ShardedTensor of shape {tuple(tensor.shape)}: torch has replaced this class; shard "
            "the tensor as a DTensor (torch.distributed.tensor.distribute_tensor)"
        )
    if not isinstance(tensor, PartitionShard) and not hasattr(tensor, "__create_chunk_list__"):
        return None
    if is_dtensor(tensor) and tensor.device_mesh.get_coordinate() is None:
        return ()
    if not tensor.numel():
        return (whole_box(tuple(tensor.shape)),)
    if isinstance(tensor, PartitionShard):
        cuts = (tensor.partition.cuts(inside) for inside in held_boxes(tensor.held))
        return tuple(box for some in cuts for _, box in some)
    chunks = tensor.__create_chunk_list__()
    return tuple(
        Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks if 0 not in chunk.sizes
    )


def held_boxes(tensor: Tensor) -> tuple[Box, ...]:
    """Return the boxes of any tensor that this rank has; one box if the tensor is not sharded."""
    parts = boxes_of(tensor)
    return (whole_box(tuple(tensor.shape)),) if parts is None else parts


def piece(tensor: Tensor, box: Box) -> Tensor:
    """Return this rank's elements of one box, detached from autograd. The result is a view, so a
    load may write to the tensor through the view.

    Args:
        tensor: any tensor.
        box: a box that :func:`held_boxes` returned.
    """
    if isinstance(tensor, PartitionShard):
        dim = tensor.partition.dim
        for inside in held_boxes(tensor.held):
            for begin, cut in tensor.partition.cuts(inside):
                if cut == box:
                    return piece(tensor.held, inside).narrow(dim, begin, cut.sizes[dim])
    elif not hasattr(tensor, "__get_tensor_shard__"):
        return tensor.detach()
    if not tensor.numel():
        return torch.empty(box.sizes, dtype=tensor.dtype, device="cpu")
    from torch.distributed.checkpoint.metadata import MetadataIndex

    shard: Tensor = tensor.__get_tensor_shard__(MetadataIndex("", torch.Size(box.offsets)))
    return shard.detach()


# -- scales of blocks -----------------------------------------------------------------------------
#
# Quantized state has one scale for each run of 256 row-major elements of the whole tensor. A layout
# that splits the tensor splits blocks, so this layout cannot store saved blocks. But a load can
# read the values of saved blocks, with one scale per local element.


def is_cut(tensor: Tensor) -> bool:
    """True if this rank has only a part of a tensor. Saved scales do not fit a part, because each
    scale is for a block of the whole tensor."""
    if isinstance(tensor, PartitionShard):
        return True
    if isinstance(tensor, FlatShard):
        return tensor.local.numel() != tensor.numel()
    return bool(split_dims(tensor))


def flat_index(tensor: Tensor) -> Tensor:
    """Return the row-major index in the whole tensor of each element of a rank's part: int64, on
    the CPU, in the shape of the part."""
    if isinstance(tensor, PartitionShard):
        inside = flat_index(tensor.held)
        return tensor.partition.whole_index(inside, tensor.held.shape)
    if isinstance(tensor, FlatShard):
        return torch.arange(tensor.start, tensor.start + tensor.local.numel(), device="cpu")
    if not is_dtensor(tensor):
        return torch.arange(tensor.numel(), device="cpu").view(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    shape, offset = chunk.sizes, chunk.offsets
    index, stride = torch.zeros(tuple(shape), dtype=torch.int64, device="cpu"), 1
    for dim in reversed(range(len(shape))):
        steps = torch.arange(offset[dim], offset[dim] + shape[dim], device="cpu") * stride
        index += steps.view(-1, *(1,) * (len(shape) - dim - 1))
        stride *= tensor.shape[dim]
    return index
