"""The model's parameters in flat buckets, and this rank's shard of each parameter: the plain tensor
that is stepped, and the layout in which the shard's state is exported and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES, moment_of
from mp_optim.core import (
    ParamGroups,
    Slot,
    all_params,
    group_settings,
    iter_slots,
    param_at,
    same_memory,
    slot_name,
)
from mp_optim.core.flat_shard import FlatShard
from mp_optim.core.param_attributes import (
    FlatRanges,
    ShardInfo,
    norm_attributes,
    partition_blocks,
    partition_dim,
    set_shard_info,
)
from mp_optim.core.slot_state import StateLayout, is_scale, local_state
from mp_optim.core.tensors import ParamWatcher
from mp_optim.zero.buckets import SHARD_ALIGNMENT, Entry
from mp_optim.zero.transport import make_transport

torch.serialization.add_safe_globals([FlatShard])


@dataclass(frozen=True, slots=True)
class ParamShard:
    """This rank's elements of one parameter.

    Attributes:
        name: FQN of the parameter.
        shape: shape of the parameter.
        start: index of this rank's first element in the flattened parameter (row-major).
        stop: index after this rank's last element.
        tensor: the elements, a view of the bucket, 1-D. For a rule that needs whole parameters, the
            tensor has the parameter's shape on the rank that steps the parameter, and no rows on
            other ranks.
        grad: reduced gradient of the elements, in the shape of ``tensor``; None if the parameter
            was frozen.
        shown_whole: True if every rank steps the whole parameter. State is then exported as plain
            tensors of the parameter's shape.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    tensor: Tensor
    grad: Tensor | None
    shown_whole: bool

    def expose(self, key: str, value: Any) -> Any:
        """Return a state tensor as a flat shard of the whole parameter's state. Scalars and scales
        of blocks are returned unchanged.

        Args:
            key: state key of the tensor.
            value: the tensor as it is stored.
        """
        if self.shown_whole or key == "step" or not isinstance(value, Tensor):
            return value
        own, is_elementwise = self.tensor, moment_of(key).elementwise
        if not is_elementwise or (value.numel(), value.dim()) != (own.numel(), own.dim()):
            return value
        return FlatShard(value.detach().reshape(-1), self.shape, self.start)

    def localize(self, key: str, value: Any) -> Any:
        """Return this rank's part of a saved state tensor.

        Args:
            key: state key of the tensor.
            value: the saved tensor: a shard with exactly this rank's elements, or the state of the
                whole parameter.

        Raises:
            ValueError: the value is a shard of other elements.
        """
        if isinstance(value, FlatShard):
            stop = value.start + value.local.numel()
            if (value.start, stop, value.shape) != (self.start, self.stop, self.shape):
                raise ValueError(
                    f"{self.name}.{key}: the saved shard has elements [{value.start}, {stop}) of "
                    f"{tuple(value.shape)}, but this rank owns [{self.start}, {self.stop}) of "
                    f"{tuple(self.shape)}; load state of another layout with "
                    "mp_optim.checkpoint.load()"
                )
            return value.local.view(self.tensor.shape)
        if key == "step" or not isinstance(value, Tensor) or not moment_of(key).elementwise:
            return value
        if is_scale(key):
            # A parameter has one scale for each element, or one for each block of elements.
            if value.dim() > 1:
                return value.reshape(*self.tensor.shape, 1)
            if value.shape != (-(-self.shape.numel() // SHARD_ALIGNMENT),):
                return value
            return value[self.start // SHARD_ALIGNMENT : -(-self.stop // SHARD_ALIGNMENT)]
        if value.shape == self.shape and value.shape != self.tensor.shape:
            return value.reshape(-1)[self.start : self.stop].view(self.tensor.shape)
        return value


def _layout_of(groups: ParamGroups, shards: Mapping[Slot, ParamShard], slot: Slot) -> StateLayout:
    """Return the layout that exports the state of this rank's elements as a part of the whole
    parameter's state.

    After a load, the layout increments the version counter of the model's parameter, which marks
    the parameter as written. The next step gathers the parts of other ranks.

    Args:
        groups: groups of the model's parameters.
        shards: this rank's shards by slot.
        slot: the slot.
    """
    param, shard, refusal = param_at(groups, slot), shards[slot], ""
    if shard.grad is None and param.numel():
        refusal = (
            f"state of {shard.name}: the parameter was frozen when the optimizer was built, so no "
            "rank keeps its state; build the optimizer while the parameter can be trained, and "
            "freeze it then, or load with convert=True, which drops its state"
        )
    return StateLayout(
        show=lambda state: {key: shard.expose(key, value) for key, value in state.items()},
        take=lambda state: local_state(
            {key: shard.localize(key, value) for key, value in state.items()}
        ),
        is_as_stored=shard.shown_whole,
        is_whole=shard.shown_whole,
        refusal=refusal,
        written=partial(increment_version, param),
    )


def in_forward_order(
    param_groups: ParamGroups, chunks: Sequence[nn.Module]
) -> list[tuple[int, Slot, Tensor]]:
    """Return the trained parameters in the order in which forward is expected to use them.

    Args:
        param_groups: groups of the model's parameters.
        chunks: modules that hold the parameters.

    Returns:
        For each parameter: position in the model, slot, and the parameter.
    """
    params = (param for chunk in chunks for param in chunk.parameters())
    places = {id(param): place for place, param in enumerate(params)}
    trained = [
        (places.get(id(param), 0), slot, param)
        for slot, param in iter_slots(param_groups)
        if param.requires_grad
    ]
    return sorted(trained, key=lambda item: item[:2])


class ShardedParams:
    """The model's parameters as views of flat buckets. The constructor moves the parameters into
    buckets. Later methods find parameters that other code replaced or moved.

    Args:
        param_groups: the optimizer's live groups of the model's parameters.
        config: see :class:`mp_optim.OptimizerConfig`.
        group: the ranks that share the buckets.
        chunks: modules that hold the parameters; see :class:`~mp_optim.DistributedOptimizer`.
        divisor: divisor of averaged gradients; see :class:`~mp_optim.DistributedOptimizer`.
        guard: takes the name of an action and returns a context for collectives. Errors in the
            context name the missing ranks.

    Attributes:
        buckets: buckets of the trained parameters.
        reducer: reduces gradients between the ranks.
        gatherer: gathers parameters from the ranks.
        shards: this rank's shards by slot, in slot order.
        tensors: for each bucket, this rank's tensors.
        steps_everything: True if every rank steps all parameters.
        frozen: slots that were trained when the buckets were made, and are frozen now.
        bytes: numbers of bytes that were reduced and gathered in the last step, by metric name.
        layout_of: returns the layout in which the state of a slot is exported.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        config: OptimizerConfig,
        group: ProcessGroup,
        chunks: Sequence[nn.Module],
        divisor: int | None,
        guard: Callable[[str], Any],
    ) -> None:
        self._param_groups, self._config, self._group = param_groups, config, group
        self.steps_everything = config.data_parallel_sharding_strategy == "no_shard"
        self.frozen: list[Slot] = []
        self.bytes = {"bytes_reduced": 0, "bytes_gathered": 0}
        self._entries: dict[Slot, tuple[int, Entry]] = {}
        trained = in_forward_order(param_groups, chunks)
        named = [(slot_name(param_groups, slot), param) for _, slot, param in trained]
        places = [place for place, *_ in trained]
        self.buckets, self.reducer, self.gatherer = make_transport(
            named, places, config, group, chunks, divisor or group.size(), guard
        )
        slot_of = {id(param): slot for _, slot, param in trained}
        for index, bucket in enumerate(self.buckets):
            for entry in bucket.entries:
                self._entries[slot_of[id(entry.param)]] = index, entry
        self.shards = {slot: self._shard(slot, param) for slot, param in iter_slots(param_groups)}
        self.layout_of = partial(_layout_of, param_groups, self.shards)
        self._index = {slot: index for index, slot in enumerate(self.shards)}
        self.tensors: list[list[Tensor]] = [[] for _ in self.buckets]
        for slot, (index, _) in self._entries.items():
            self.tensors[index].append(self.shards[slot].tensor)
        self._seen = ParamWatcher(all_params(param_groups))

    def _shard(self, slot: Slot, param: Tensor) -> ParamShard:
        """Return this rank's part of a parameter. The part's tensor is a leaf with its own version
        counter.

        The tensor is 1-D, except in two cases. If the rule needs whole parameters and this rank has
        the whole parameter, the tensor has the parameter's shape. An empty tensor has as many
        dimensions as the parameter.
        """
        name = slot_name(self._param_groups, slot)
        keeps_shape = self.steps_everything or self._config.use_layer_wise_distributed_optimizer
        start, tensor = 0, torch.empty(0, dtype=param.dtype, device=param.device)
        owned, ranges = None, None
        if slot in self._entries:  # The parameter is trainable and has elements on this rank.
            index, entry = self._entries[slot]
            bucket, stop = self.buckets[index], param.numel()
            # If Megatron's buffer has the whole parameter in one rank's shard, only that rank steps
            # the parameter.
            is_laid_out_whole = getattr(param, "is_managed_by_layer_wise_optimizer", False)
            in_one_part = is_laid_out_whole and bucket.plan.is_whole(entry.placed)
            keeps_shape = keeps_shape or in_one_part
            if not self.steps_everything:
                start, stop = entry.start, entry.stop
            first = entry.placed.start + start
            tensor = bucket.params.data[first : first + stop - start]
            if not keeps_shape:
                ranges = FlatRanges(bucket.plan.bounds, entry.placed.start, entry.placed.numel)
            owned = bucket.local_grad(entry) if self.steps_everything else bucket.owned_grad(entry)
        stop = start + tensor.numel()
        if keeps_shape or not param.numel():
            tensor = _shaped(tensor, param)
        tensor.requires_grad_(param.requires_grad)
        if owned is None and param.requires_grad:
            owned = tensor.detach().clone()
        grad = None if owned is None else owned.view(tensor.shape)
        cast(Any, tensor).main_grad = grad
        # If a rule communicates while it steps a parameter, all ranks must step the parameter on
        # the same kind of device.
        config, reads = self._config, RULES[self._config.optimizer].reads
        adds_up = reads == "sums" or config.muon_moment2_method is not None
        placed_alike = adds_up or (reads == "matrices" and not keeps_shape)
        info = ShardInfo(
            start,
            () if self.steps_everything else (self._group,),
            param.shape,
            param.numel() if placed_alike else None,
            partition_dim(param),
            partition_blocks(param),
            ranges,
        )
        set_shard_info(tensor, info)
        attributes = norm_attributes(param)
        # Leave out attributes of the parameter's dimensions, which a flat shard does not have.
        if tensor.shape != param.shape:
            for of_shape in ("partition_dim", "partition_stride", "partition_sizes"):
                attributes.pop(of_shape, None)
        for attribute, value in attributes.items():
            setattr(tensor, attribute, value)
        return ParamShard(name, param.shape, start, stop, tensor, grad, self.steps_everything)

    def groups(self) -> list[dict[str, Any]]:
        """Return the param groups with this rank's tensors in place of the parameters."""
        shards, groups = iter(self.shards.values()), []
        for group in self._param_groups:
            tensors = [next(shards).tensor for _ in group["params"]]
            names = group.get("param_names")
            params = list(zip(names, tensors, strict=True)) if names else tensors
            groups.append({**group_settings(group), "params": params})
        return groups

    # -- gradients --------------------------------------------------------------------------------

    def hand_out_grads(self) -> list[Slot]:
        """Set ``main_grad`` of this rank's tensors to the reduced gradients, or to None for
        parameters that are frozen now.

        Returns:
            The slots of parameters that are trained now.

        Raises:
            RuntimeError: a parameter is trained now and is in no bucket; the message has the
                parameter's name.
        """
        trained: list[Slot] = []
        self.frozen = []
        for slot, param in iter_slots(self._param_groups):
            shard = self.shards[slot]
            if param.requires_grad and shard.grad is None:
                raise RuntimeError(
                    f"{shard.name} was frozen when the optimizer was built, so it is in no bucket "
                    "and cannot be trained now; build the optimizer again to train this parameter"
                )
            cast(Any, shard.tensor).main_grad = shard.grad if param.requires_grad else None
            if param.requires_grad:
                trained.append(slot)
            elif shard.grad is not None:
                self.frozen.append(slot)
        return trained

    def owned_grad(self, slot: Slot) -> Tensor | None:
        """Return the reduced gradient of this rank's elements, even if every rank steps all
        elements. Return None for a parameter that is in no bucket."""
        if slot not in self._entries:
            return None
        index, entry = self._entries[slot]
        return self.buckets[index].owned_grad(entry)

    # -- parameters -------------------------------------------------------------------------------

    def follow(self, slot: Slot | None = None) -> bool:
        """Copy parameters that were replaced or moved into their buckets. Such a parameter counts
        as changed until :meth:`look`.

        Args:
            slot: skip the search if the parameter at this slot is unchanged; None to search always.

        Returns:
            True if any parameter was replaced or moved.
        """
        if slot is not None:
            param = param_at(self._param_groups, slot)
            if self._seen.is_same(self._index[slot], param):
                return False
        params, slots = all_params(self._param_groups), list(self.shards)
        changed = self._seen.changed(params)
        for index in changed:
            if slots[index] not in self._entries:
                continue
            (bucket, entry), param = self._entries[slots[index]], params[index]
            is_replaced = param is not entry.param
            if is_replaced or not same_memory(param, entry.data):
                self.buckets[bucket].adopt(entry, param)
            if is_replaced:
                self.reducer.watch(bucket, entry)
                self.gatherer.look()
        return bool(changed)

    def look(self) -> None:
        """Record the present parameters, with which later calls of :meth:`follow` compare."""
        self._seen.look(all_params(self._param_groups))

    def gather(self, *, waits: bool = False) -> int:
        """Start to gather the other ranks' parts of the parameters, after this rank's parts were
        written. Collective.

        Args:
            waits: True to wait until all parts are gathered.

        Returns:
            Number of bytes that are gathered.
        """
        gathered = 0
        if not self.steps_everything:
            self.gatherer.start()
            gathered = self.gatherer.bytes_gathered
            if waits:
                self.gatherer.finish()
        increment_version([entry.param for _, entry in self._entries.values()])
        self.look()
        return gathered


def _shaped(flat: Tensor, param: Tensor) -> Tensor:
    """Return a 1-D shard of a parameter in the shape that rules step.

    A shard with all elements gets the parameter's shape. An empty shard gets no rows and the other
    dimensions of the parameter, so that rules for matrices get a matrix. Any other shard stays 1-D.

    Args:
        flat: the shard's elements, 1-D.
        param: the whole parameter.
    """
    if flat.numel() == param.numel():
        return flat.view(param.shape)
    return flat if flat.numel() or not param.dim() else flat.view(0, *param.shape[1:])
