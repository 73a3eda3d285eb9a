"""Reading what Megatron's distributed optimizer wrote as ``dp_reshardable``: tensors as long as the
buckets of its DistributedDataParallel. They are loaded where the model is cut into the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor, nn

from mp_optim.checkpoint.flat import FlatShard
from mp_optim.distributed.optimizer import DistributedOptimizer
from mp_optim.megatron.whole_params import name_of
from mp_optim.precision import MegatronOptimizer
from mp_optim.slots import Slot
from mp_optim.slots.state_keys import MASTER

BUCKETS = "dp_reshardable"
"""Megatron's name of the form, and its default."""


class BucketPlace(NamedTuple):
    """Where Megatron's buffers have a parameter.

    Attributes:
        key: of the bucket's tensors. numel: their length, without padding at the end.
        start: of the parameter in them.
    """

    key: str
    numel: int
    start: int


def requested_part(
    part: MegatronOptimizer, chunks: Sequence[nn.Module], index: int, is_chained: bool
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """What is asked for of a part: its settings, and the tensors by running index in it.

    Raises:
        ValueError: there are no buckets here, Megatron keeps Muon's matrices otherwise, or a
            parameter is in none.
    """
    if part.config.optimizer == "muon":
        raise ValueError(
            f"the checkpoint has Megatron's {BUCKETS!r}, which is not read with optimizer='muon'; "
            "save it again with --dist-ckpt-optim-fully-reshardable"
        )
    if not isinstance(part, DistributedOptimizer) or not chunks:
        raise ValueError(
            f"the checkpoint has Megatron's {BUCKETS!r}, which is read with "
            "use_distributed_optimizer=True and the model in Megatron's DistributedDataParallel "
            "as it was saved; to load it otherwise, save it again with "
            "--dist-ckpt-optim-fully-reshardable"
        )
    ranks = part.process_groups.grad_stats
    domain = (
        f"optimizer.distributed.dp_group_idx_{0 if ranks is None else ranks.rank()}"
    )
    is_expert = any(group.get("is_expert_parallel") for group in part.param_groups)
    places = dict(_places(chunks, domain, expert=is_expert))
    tensors: dict[int, dict[str, Any]] = {}
    for number, slot in enumerate(part.slots()):
        name, param = name_of(part, slot)
        if id(param) not in places:
            raise ValueError(
                f"{name} is in no buffer of the model's DistributedDataParallel"
            )
        tensors[number] = dict(_of_slot(part, slot, places[id(param)]))
    settings = _settings(part, domain)
    if is_chained:
        add_prefix_for_sharding(settings, f"chained_{index}.")
        add_prefix_for_sharding(tensors, f"chained_{index}.")
    return settings, tensors


def _settings(part: DistributedOptimizer, domain: str) -> dict[str, Any]:
    assert part.process_groups.dp is not None  # its constructor asks for it
    copy = (0, 0, part.process_groups.dp.rank())
    keys = ["optimizer", *(["grad_scaler"] if part.grad_scaler is not None else [])]
    return {
        key: ShardedObject(f"{domain}.{key}", None, (1,), (0,), replica_id=copy)
        for key in keys
    }


def _places(
    chunks: Sequence[Any], domain: str, *, expert: bool
) -> Iterator[tuple[int, BucketPlace]]:
    """By a parameter's id."""
    attribute = "expert_parallel_buffers" if expert else "buffers"
    buffers = chain.from_iterable(getattr(chunk, attribute) for chunk in chunks)
    for number, buffer in enumerate(buffers):
        dtypes = buffer.param_dtype, buffer.grad_dtype
        for param, (start, _, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            key = f"{domain}.gbuf_idx_{number}.dtype_{dtypes}.bucket_idx_{bucket_id}"
            yield (
                id(param),
                BucketPlace(key, bucket.numel_unpadded, start - bucket.offset),
            )


def _of_slot(
    part: MegatronOptimizer, slot: Slot, place: BucketPlace
) -> Iterator[tuple[str, Any]]:
    """A tensor for each key, of the elements that this rank has; none if it has no elements."""
    for key, value in part.full_slot_state(slot).items():
        if key == "step":
            continue
        start, count = 0, value.numel()
        if isinstance(value, FlatShard):
            start, count = value.start, value.local.numel()
        if count:
            megatron_key = "param" if key == MASTER else key
            yield megatron_key, _range(place, megatron_key, start, count)


def _range(place: BucketPlace, key: str, start: int, count: int) -> Any:
    data = torch.zeros(count, dtype=torch.float32, device="cpu")
    return ShardedTensor(
        f"{place.key}.{key}",
        data,
        data.dtype,
        tuple(data.shape),
        (place.numel,),
        (place.start + start,),
        axis_fragmentations=None,
        replica_id=(0, 0, 0),
    )


def as_shard(live: Any, elements: Tensor | None) -> Any:
    """Loaded elements in the form in which a stack shows what it has of a parameter.

    Args:
        live: the stack's own tensor. elements: flat; None if this rank has none.
    """
    local = live.local if isinstance(live, FlatShard) else live
    value = local.detach().float() if elements is None else elements.to(local.device)
    if isinstance(live, FlatShard):
        return FlatShard(value.reshape(-1), live.shape, live.start)
    return value.view(live.shape)
