"""A rank's part of a tensor that tensor parallelism cuts, in a form that says so: saved as boxes of
the whole, and read from any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mp_optim.slots.partition import Partition
from mp_optim.slots.slot_state import LayeredState, SlotState, State


class PartitionShard(Tensor):
    """A part of a tensor. Its ``shape`` is the whole's; nothing is copied.

    Args:
        held: what the rank has: a plain tensor of the part's shape, or a DTensor or FlatShard of
            it, of which it has only a part in turn.
        partition: which part of the whole.
        is_stacked: ``held`` is stacked on what the other ranks have, in a first dimension of its
            own, rather than cut out of anything.
    """

    held: Tensor
    partition: Partition
    is_stacked: bool

    @staticmethod
    def __new__(
        cls, held: Tensor, partition: Partition, is_stacked: bool = False
    ) -> PartitionShard:
        shard: PartitionShard = Tensor._make_wrapper_subclass(
            cls,
            torch.Size(partition.whole_shape(held.shape)),
            dtype=held.dtype,
            device=held.device,
        )
        shard.held, shard.partition = held.detach(), partition
        shard.is_stacked = is_stacked
        return shard

    @property
    def local(self) -> Tensor:
        """What the rank has, as it was before it was said which part that is."""
        return self.held[0] if self.is_stacked else self.held

    def with_held(self, held: Tensor) -> PartitionShard:
        """The same part of another tensor of this shape."""
        return PartitionShard(held, self.partition, self.is_stacked)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        raise NotImplementedError(
            f"{func} of a PartitionShard: compute with its .local"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartitionShard({self.partition} of {tuple(self.shape)}, {self.held!r})"


def as_partition(
    value: Any, partition: Partition | None, shape: torch.Size | None = None
) -> Any:
    """A tensor as the part of the whole that it is; scalars, and everything if nothing is cut,
    unchanged.

    What is not of the parameter's shape is cut as the parameter is if it has that dimension
    (Adafactor's means over the other one), and else this rank's own: it can be read by the same
    rank of as many.

    Args:
        shape: of the rank's part of the parameter; by default the tensor's.
    """
    if partition is None or not isinstance(value, Tensor) or not value.dim():
        return value
    shape = value.shape if shape is None else shape
    alike = value.dim() == len(shape) and all(
        length in (1, full) for length, full in zip(value.shape, shape, strict=True)
    )
    if alike and value.shape[partition.dim] == shape[partition.dim]:
        return PartitionShard(value, partition)
    layer = Partition(0, (1,), partition.rank, partition.size)
    return PartitionShard(value[None], layer, is_stacked=True)


class PartitionState(LayeredState):
    """The state of a parameter that is cut, shown as parts of the whole's.

    Args:
        shape: of the rank's part of the parameter.
    """

    def __init__(
        self, below: SlotState, partition: Partition, shape: torch.Size
    ) -> None:
        super().__init__(below)
        self._partition, self._shape = partition, shape

    def tensors(self) -> State:
        return self._shown(self.without_blocks())

    def full_precision(self) -> State:
        return self._shown(self.below.full_precision())

    def _shown(self, state: State) -> State:
        return {
            key: as_partition(value, self._partition, self._shape)
            for key, value in state.items()
        }
