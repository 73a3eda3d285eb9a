"""ShardedParams: the model's parameters in flat buckets, and what this rank owns of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.distributed.buckets import Bucket, Entry
from mp_optim.distributed.param_shards import ParamShard, make_shard
from mp_optim.distributed.transport import make_transport
from mp_optim.slots import (
    ParamGroups,
    Slot,
    all_params,
    group_settings,
    iter_slots,
    same_memory,
    slot_name,
)
from mp_optim.slots.param_attributes import is_laid_out_whole, set_main_grad
from mp_optim.slots.seen_params import SeenParams


def in_forward_order(
    param_groups: ParamGroups, chunks: Sequence[nn.Module]
) -> list[tuple[int, Slot, Tensor]]:
    """Trained parameters in the order in which forward is expected to use them, with their places
    in the model."""
    params = (param for chunk in chunks for param in chunk.parameters())
    places = {id(param): place for place, param in enumerate(params)}
    trained = [
        (places.get(id(param), 0), slot, param)
        for slot, param in iter_slots(param_groups)
        if param.requires_grad
    ]
    return sorted(trained, key=lambda item: item[:2])


class ShardedParams:
    """Moves the parameters into buckets, on construction; later keeps the two in agreement.

    Args:
        param_groups: the optimizer's live groups of the model's parameters.
        group: the ranks that share out the buckets.
        chunks, divisor: see :class:`~mp_optim.DistributedOptimizer`.
        guard: names the ranks that are missing.

    Attributes:
        transport: what moves gradients and parameters between the ranks.
        shards: what this rank owns, in slot order.
        steps_everything: every rank steps all parameters, rather than what it owns.
        frozen: slots that were trained when the buckets were made, and are not now.
        bytes: that were reduced and gathered in the last step.
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
        self._param_groups = param_groups
        self.steps_everything = config.data_parallel_sharding_strategy == "no_shard"
        self.frozen: list[Slot] = []
        self.bytes = {"bytes_reduced": 0, "bytes_gathered": 0}
        self._entries: dict[Slot, tuple[int, Entry]] = {}
        trained = in_forward_order(param_groups, chunks)
        named = [(slot_name(param_groups, slot), param) for _, slot, param in trained]
        places = [place for place, *_ in trained]
        self.transport = make_transport(
            named, places, config, group, chunks, divisor or group.size(), guard
        )
        slot_of = {id(param): slot for _, slot, param in trained}
        for index, bucket in enumerate(self.transport.buckets):
            for entry in bucket.entries:
                self._entries[slot_of[id(entry.param)]] = index, entry
        self.shards = {
            slot: self._shard(slot, param, config, group)
            for slot, param in iter_slots(param_groups)
        }
        self._index = {slot: index for index, slot in enumerate(self.shards)}
        self._tensors: list[list[Tensor]] = [[] for _ in self.transport.buckets]
        for slot, (index, _) in self._entries.items():
            self._tensors[index].append(self.shards[slot].tensor)
        self._seen = SeenParams(self._params())

    def _shard(
        self, slot: Slot, param: Tensor, config: OptimizerConfig, group: ProcessGroup
    ) -> ParamShard:
        located = None
        if slot in self._entries:
            index, entry = self._entries[slot]
            located = self.transport.buckets[index], entry
        everything = self.steps_everything
        keeps_shape = (
            everything
            or config.use_layer_wise_distributed_optimizer
            or (located is not None and _is_whole(param, *located))
        )
        reads = RULES[config.optimizer].reads
        return make_shard(
            slot_name(self._param_groups, slot),
            param,
            located,
            shard_groups=() if everything else (group,),
            everything=everything,
            keeps_shape=keeps_shape,
            # ranks meet in the communication of such a rule
            placed_alike=reads == "sums" or (reads == "matrices" and not keeps_shape),
        )

    def groups(self) -> list[dict[str, Any]]:
        """The param groups, with what this rank owns in place of the parameters."""
        shards, groups = iter(self.shards.values()), []
        for group in self._param_groups:
            tensors = [next(shards).tensor for _ in group["params"]]
            names = group.get("param_names")
            params = list(zip(names, tensors, strict=True)) if names else tensors
            groups.append({**group_settings(group), "params": params})
        return groups

    def _params(self) -> list[Tensor]:
        return all_params(self._param_groups)

    # -- gradients --------------------------------------------------------------------------------

    def hand_out_grads(self) -> list[Slot]:
        """Let the owned tensors have the reduced gradients where the parameter is trained now;
        returns the slots.

        Raises:
            RuntimeError: a parameter is trained that is in no bucket, naming it.
        """
        trained: list[Slot] = []
        self.frozen = []
        for slot, param in iter_slots(self._param_groups):
            shard = self.shards[slot]
            if param.requires_grad and shard.grad is None:
                raise RuntimeError(
                    f"{shard.name} was frozen when the optimizer was built and "
                    "is in no bucket; build the optimizer again to train it"
                )
            set_main_grad(shard.tensor, shard.grad if param.requires_grad else None)
            if param.requires_grad:
                trained.append(slot)
            elif shard.grad is not None:
                self.frozen.append(slot)
        return trained

    def owned_grad(self, slot: Slot) -> Tensor | None:
        """The reduced gradient of the elements that this rank owns, also where it steps all; None
        of a parameter that is in no bucket."""
        if slot not in self._entries:
            return None
        index, entry = self._entries[slot]
        return self.transport.buckets[index].owned_grad(entry)

    def tensors_in(self, bucket: int) -> list[Tensor]:
        """The owned tensors of a bucket's parameters, always the same ones."""
        return self._tensors[bucket]

    # -- parameters -------------------------------------------------------------------------------

    def is_followed(self, slot: Slot) -> bool:
        """Whether a slot's parameter is as it was last seen."""
        param = self._param_groups[slot.group]["params"][slot.position]
        return self._seen.is_same(self._index[slot], param)

    def follow(self) -> bool:
        """Take parameters that were replaced, moved or written into their buckets; returns whether
        there were any. Until :meth:`look` they count as changed."""
        params, slots = self._params(), list(self.shards)
        changed = self._seen.changed(params)
        for index in changed:
            if slots[index] in self._entries:
                self._follow_param(slots[index], params[index])
        return bool(changed)

    def _follow_param(self, slot: Slot, param: Tensor) -> None:
        index, entry = self._entries[slot]
        if param is not entry.param or not same_memory(param, entry.data):
            is_replaced = param is not entry.param
            self.transport.buckets[index].adopt(entry, param)
            if is_replaced:
                self.transport.reducer.watch(index, entry)
                self.transport.gatherer.look()
        increment_version(self.shards[slot].tensor)

    def look(self) -> None:
        """Take the parameters as they are now as seen."""
        self._seen.look(self._params())

    def share(self) -> None:
        """Bring the other ranks' parts of the parameters here, and wait: what ranks own was written
        by something else than a step."""
        if not self.steps_everything:
            self.transport.gatherer.start()
            self.transport.gatherer.finish()
        self._written()

    def _written(self) -> None:
        increment_version([entry.param for _, entry in self._entries.values()])
        self.look()

    def gather(self, is_stepped: bool) -> None:
        """After a step: bring the other ranks' parts of the parameters here.

        Args:
            is_stepped: whether anything was written.
        """
        reducer, gatherer = self.transport.reducer, self.transport.gatherer
        gathered = reducer.bytes_gathered
        if is_stepped:
            if not self.steps_everything:
                gatherer.start()
                gathered += gatherer.bytes_gathered
            self._written()
        self.bytes = {
            "bytes_reduced": reducer.bytes_reduced,
            "bytes_gathered": gathered,
        }


def _is_whole(param: Tensor, bucket: Bucket, entry: Entry) -> bool:
    """Whether Megatron has kept a parameter in the part of one rank, which steps it alone."""
    return is_laid_out_whole(param) and bucket.plan.is_whole(entry.placed)
