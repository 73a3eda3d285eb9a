"""What a rank owns of each parameter: a plain tensor to step, and the form in which its state is
shown and loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from mp_optim.checkpoint.flat import FlatShard
from mp_optim.config.rules import is_elementwise
from mp_optim.distributed.bucket_plan import ALIGNMENT
from mp_optim.distributed.buckets import Bucket, Entry
from mp_optim.slots.param_attributes import (
    FlatRanges,
    ShardInfo,
    norm_attributes,
    partition_blocks,
    partition_dim,
    set_main_grad,
    set_norm_attributes,
    set_shard_info,
)
from mp_optim.slots.slot_state import LayeredState, SlotState, State
from mp_optim.slots.state_keys import is_scale

torch.serialization.add_safe_globals([FlatShard])


@dataclass(frozen=True, slots=True)
class ParamShard:
    """The owned elements of one parameter.

    Attributes:
        name: FQN of the parameter. shape: its shape.
        start, stop: owned elements, [start, stop) of the row-major flattened parameter.
        tensor: these elements, a view of the bucket: 1-D, or where parameters stay whole, of the
            parameter's shape if all of it is stepped here, and of no rows if nothing is.
        grad: where their reduced gradient is; None if the parameter was frozen.
        shown_whole: every rank steps all of the parameter, so state is shown as plain tensors of
            its shape.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    tensor: Tensor
    grad: Tensor | None
    shown_whole: bool

    def expose(self, key: str, value: Any) -> Any:
        """A state tensor as a part of the whole parameter's; scalars and scales of blocks
        unchanged."""
        if (
            not isinstance(value, Tensor)
            or not is_elementwise(key)
            or value.numel() != self.tensor.numel()
            or value.dim() != self.tensor.dim()
        ):
            return value
        if self.shown_whole or key == "step":
            return value
        return FlatShard(value.detach().reshape(-1), self.shape, self.start)

    def localize(self, key: str, value: Any) -> Any:
        """The owned part of a saved state tensor: of a shard of just these elements, or of the
        whole parameter.

        Raises:
            ValueError: it is a shard of other elements.
        """
        if isinstance(value, FlatShard):
            return self._same_elements(key, value)
        if key == "step" or not isinstance(value, Tensor) or not is_elementwise(key):
            return value
        if is_scale(key):
            return self._local_scale(value)
        if value.shape == self.shape and value.shape != self.tensor.shape:
            return value.reshape(-1)[self.start : self.stop].view(self.tensor.shape)
        return value

    def _same_elements(self, key: str, saved: FlatShard) -> Tensor:
        saved_stop = saved.start + saved.local.numel()
        if (saved.start, saved_stop, saved.shape) != (
            self.start,
            self.stop,
            self.shape,
        ):
            raise ValueError(
                f"{self.name}.{key}: saved elements [{saved.start}, {saved_stop}) of "
                f"{tuple(saved.shape)}, this rank owns [{self.start}, {self.stop}) of "
                f"{tuple(self.shape)}; load other layouts with mp_optim.checkpoint"
            )
        return saved.local.view(self.tensor.shape)

    def _local_scale(self, scale: Tensor) -> Tensor:
        """Of a scale for each element, or for each block of the whole parameter, the owned part."""
        if scale.dim() > 1:
            return scale.reshape(*self.tensor.shape, 1)
        if scale.shape != (-(-self.shape.numel() // ALIGNMENT),):
            return scale
        return scale[self.start // ALIGNMENT : -(-self.stop // ALIGNMENT)]

    def localize_state(self, state: State) -> State:
        """:meth:`localize` for a slot's whole state; never modifies its argument."""
        return {key: self.localize(key, value) for key, value in state.items()}


class ShardState(LayeredState):
    """The state of what this rank owns, shown as a part of the whole parameter's.

    Args:
        param: the model's parameter.
    """

    def __init__(self, below: SlotState, shard: ParamShard, param: Tensor) -> None:
        super().__init__(below)
        self._shard, self._param = shard, param

    def tensors(self) -> State:
        is_whole = self._shard.shown_whole
        return self._shown(self.below.tensors() if is_whole else self.without_blocks())

    def full_precision(self) -> State:
        return self._shown(self.below.full_precision())

    def _shown(self, state: State) -> State:
        return {key: self._shard.expose(key, value) for key, value in state.items()}

    def takes_any(self) -> bool:
        return self._shard.shown_whole and self.below.takes_any()

    def fit(self, saved: State, convert: bool) -> State:
        if saved and self._shard.grad is None and self._param.numel():
            if convert:
                return {}
            raise ValueError(
                f"state of {self._shard.name}: it was frozen when the optimizer was built, so it "
                "is in no bucket, and no rank keeps its state; build the optimizer while it can be "
                "trained, and freeze it then, or load with convert=True, which drops its state"
            )
        return self.below.fit(self._shard.localize_state(saved), convert)

    def check(self, state: State) -> None:
        self.below.check(self._shard.localize_state(state))

    def load(self, state: State) -> None:
        self.below.load(self._shard.localize_state(state))

    def check_weights(
        self, saved: State, checksum: int | None, weights: Tensor | None = None
    ) -> None:
        if self._shard.shown_whole:  # a checksum is of the whole parameter
            self.below.check_weights(saved, checksum, weights)

    def expect_weights(self, saved: State, checksum: int | None) -> None:
        if self._shard.shown_whole:
            self.below.expect_weights(saved, checksum)

    @torch.no_grad()
    def write_model(self) -> bool:
        """Of a parameter that ranks share out, what this rank owns; the rest comes with the next
        step."""
        if is_written := self.below.write_model():
            increment_version(self._param)
        return is_written


def make_shard(
    name: str,
    param: Tensor,
    located: tuple[Bucket, Entry] | None,
    *,
    shard_groups: tuple[ProcessGroup, ...],
    everything: bool,
    keeps_shape: bool,
    placed_alike: bool,
) -> ParamShard:
    """What this rank steps of a parameter, as a leaf tensor with a version counter of its own.

    Args:
        located: where the parameter is; None if it is in no bucket (frozen, or without elements).
        shard_groups: over which its norms are added up.
        everything: all of it is stepped here, whichever rank owns its gradients.
        keeps_shape: the tensor has the parameter's shape if it is all of it, and as many dimensions
            if it is nothing.
        placed_alike: use the full size for offload placement, so that all ranks choose alike.
    """
    start, tensor = 0, torch.empty(0, dtype=param.dtype, device=param.device)
    if located is not None:
        bucket, entry = located
        start, stop = (0, param.numel()) if everything else (entry.start, entry.stop)
        first = entry.placed.start + start
        tensor = bucket.params.data[first : first + stop - start]
    stop = start + tensor.numel()
    if (
        keeps_shape or not param.numel()
    ):  # what reads matrices finds one, if an empty one
        tensor = _shaped(tensor, param)
    tensor.requires_grad_(param.requires_grad)
    info = ShardInfo(
        start,
        shard_groups,
        param.shape,
        param.numel() if placed_alike else None,
        partition_dim(param),
        partition_blocks(param),
        None if keeps_shape or located is None else _ranges(*located),
    )
    set_shard_info(tensor, info)
    attributes = norm_attributes(param)
    if tensor.shape != param.shape:  # a flat part has not the parameter's dimensions
        for of_shape in ("partition_dim", "partition_stride", "partition_sizes"):
            attributes.pop(of_shape, None)
    set_norm_attributes(tensor, attributes)
    grad = None
    if located is not None:
        owned = bucket.local_grad(entry) if everything else bucket.owned_grad(entry)
        grad = owned.view(tensor.shape)
    elif param.requires_grad:
        grad = tensor.detach().clone()
    set_main_grad(tensor, grad)
    return ParamShard(name, param.shape, start, stop, tensor, grad, everything)


def _ranges(bucket: Bucket, entry: Entry) -> FlatRanges:
    """What all ranks own of a parameter."""
    return FlatRanges(bucket.plan.bounds, entry.placed.start, entry.placed.numel)


def _shaped(flat: Tensor, param: Tensor) -> Tensor:
    """A flat tensor in the parameter's shape if it is all of it; of no rows if it is nothing."""
    if flat.numel() == param.numel():
        return flat.view(param.shape)
    if not flat.numel() and param.dim():
        return flat.view(0, *param.shape[1:])
    return flat
