"""A flat range of a tensor, in a form that ``torch.distributed.checkpoint`` saves and loads as
boxes of the tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)


class Box(NamedTuple):
    """A rectangular part of a tensor that is contiguous in row-major order.

    Attributes:
        offsets: index of its first element in the tensor.
        sizes: its shape.
        start: place of its first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, count: int) -> list[Box]:
    """Elements ``[start, start + count)`` of a row-major tensor as boxes, in order: disjoint,
    nothing else covered.

    There are at most ``2 * len(shape) - 1`` of them. An empty range has none, unless the tensor
    itself is empty: that is one box of no elements, so that the tensor is on record.

    Raises:
        ValueError: the range is not inside the tensor.
    """
    if not 0 <= start <= start + count <= math.prod(shape):
        raise ValueError(
            f"elements [{start}, {start + count}) are not inside a tensor of shape {tuple(shape)}, "
            f"which has {math.prod(shape)}"
        )
    if math.prod(shape) == 0:
        return [Box((0,) * len(shape), tuple(shape), 0)]
    return _boxes(tuple(shape), (), start, start + count, 0) if count else []


def _boxes(
    shape: tuple[int, ...], outer: tuple[int, ...], begin: int, end: int, base: int
) -> list[Box]:
    """The boxes of ``[begin, end)``, counted from the subtensor at ``outer``, which starts at
    ``base``."""
    ones = (1,) * len(outer)
    if not shape:
        return [Box(outer, ones, base)]
    rows, inner = shape[0], math.prod(shape[1:])
    if begin == 0 and end == rows * inner:
        return [Box(outer + (0,) * len(shape), ones + shape, base)]
    first, last = -(-begin // inner), end // inner  # whole rows: [first, last)
    if first > last:  # inside one row
        return _boxes(
            shape[1:],
            (*outer, last),
            begin - last * inner,
            end - last * inner,
            base + last * inner,
        )
    boxes = []
    if begin < first * inner:
        row = first - 1
        boxes += _boxes(
            shape[1:], (*outer, row), begin - row * inner, inner, base + row * inner
        )
    if first < last:
        boxes.append(
            Box(
                (*outer, first) + (0,) * (len(shape) - 1),
                (*ones, last - first, *shape[1:]),
                base + first * inner,
            )
        )
    if last * inner < end:
        boxes += _boxes(
            shape[1:], (*outer, last), 0, end - last * inner, base + last * inner
        )
    return boxes


class FlatShard(Tensor):
    """Elements ``[start, start + n)`` of the row-major flattened tensor of shape ``global_shape``.

    Its ``shape`` is the whole tensor's; its memory is ``local``. ``torch.distributed.checkpoint``
    writes it as a few boxes and reads any saved layout into it; nothing is copied but the elements.
    Two ranks may hold the same range, not ranges that overlap in part.

    Args:
        local: contiguous, shape (n,), on any device. Kept, not copied. ``n`` may be 0.
        global_shape: the whole tensor's shape; () for a scalar.
        start: place of the first element.

    Raises:
        ValueError: ``local`` is not 1-D and contiguous, or the range is not inside the tensor.
    """

    local: Tensor
    start: int

    @staticmethod
    def __new__(
        cls, local: Tensor, global_shape: Sequence[int], start: int
    ) -> FlatShard:
        if local.dim() != 1 or not local.is_contiguous():
            raise ValueError(
                f"local has shape {tuple(local.shape)} and strides {local.stride()}: a flat range "
                "is one contiguous dimension"
            )
        boxes(global_shape, start, local.numel())
        shard: FlatShard = Tensor._make_wrapper_subclass(
            cls, torch.Size(global_shape), dtype=local.dtype, device=local.device
        )
        shard.local, shard.start = local.detach(), start
        return shard

    def with_local(self, local: Tensor) -> FlatShard:
        """The same range of another tensor of this shape."""
        if local.numel() != self.local.numel():
            raise ValueError(
                f"{local.numel()} elements for a range of {self.local.numel()}"
            )
        return FlatShard(local.reshape(-1), self.shape, self.start)

    def _range(self) -> tuple[torch.Size, int, int]:
        return self.shape, self.start, self.local.numel()

    def box_views(self) -> list[tuple[Box, Tensor]]:
        """The boxes, each with a view of its elements in ``local``."""
        return [
            (box, self.local[box.start - self.start :][: box.numel].view(box.sizes))
            for box in boxes(self.shape, self.start, self.local.numel())
        ]

    def full_tensor(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """The whole tensor, put together from the ranks of a group; every rank of it has to call
        this.

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
                f"no rank of the group holds element {covered} of this tensor of shape "
                f"{tuple(self.shape)}"
            )
        return full.view(self.shape).to(self.device)

    # -- what torch.distributed.checkpoint asks ---------------------------------------------------

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box), properties=properties, size=self.shape
                ),
            )
            for box in boxes(self.shape, self.start, self.local.numel())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            _chunk(box)
            for box in boxes(self.shape, self.start, self.local.numel())
            if box.numel
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, view in self.box_views():
            if torch.Size(box.offsets) == index.offset:
                return view
        raise ValueError(
            f"{index.fqn}: elements [{self.start}, {self.start + self.local.numel()}) of a tensor "
            f"of shape {tuple(self.shape)} have no box at {index.offset}"
        )

    # -- what torch asks --------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Copies and empty tensors of the same range; arithmetic is done on ``local``."""
        if func not in _RANGE_KEEPING:
            raise NotImplementedError(f"{func} of a FlatShard: compute with its .local")
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        first = next(arg for arg in tensors if isinstance(arg, FlatShard))
        if any(
            not isinstance(arg, FlatShard) or arg._range() != first._range()
            for arg in tensors
        ):
            raise ValueError(
                f"{func}: the tensors are not the same range of one shape; compute with their "
                ".local"
            )
        result = func(
            *[arg.local if isinstance(arg, FlatShard) else arg for arg in args],
            **(kwargs or {}),
        )
        if func is torch.ops.aten.copy_.default:
            return first
        return first.with_local(result) if isinstance(result, Tensor) else result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        end = self.start + self.local.numel()
        return (
            f"FlatShard([{self.start}, {end}) of {tuple(self.shape)}, {self.local!r})"
        )

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
    return ChunkStorageMetadata(
        offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)
    )
