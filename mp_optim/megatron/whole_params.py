"""State of which data-parallel ranks have parts, put together on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.checkpoint.flat import FlatShard
from mp_optim.distributed.optimizer import DistributedOptimizer
from mp_optim.precision import MegatronOptimizer
from mp_optim.slots import Slot, param_at
from mp_optim.slots.slot_state import State

Range = tuple[int, int]
"""First element of a flattened parameter that a rank has, and how many it has."""
ChooseRank = Callable[[Sequence[Range]], int]
"""Which rank of the group gets a parameter's state, by what each has."""


@dataclass(frozen=True)
class WholeState:
    """A slot's state over all of its parameter on this model-parallel rank.

    Attributes:
        state: FP32 tensors on their own memory, and ``step``. Only ``step`` if another
            data-parallel rank has been given the rest.
        only_here: no other data-parallel rank has it.
    """

    slot: Slot
    state: State
    only_here: bool = False


def where_most_is(ranges: Sequence[Range]) -> int:
    """The rank that has most of a parameter: most parameters lie on one rank whole."""
    counts = [count for _, count in ranges]
    return counts.index(max(counts))


def whole_states(
    part: MegatronOptimizer, choose: ChooseRank = where_most_is
) -> Iterator[WholeState]:
    """The state of every slot of a part that has any; copies, so that the next step does not write
    what is still being saved. Collective over its data-parallel ranks if it is distributed."""
    if not isinstance(part, DistributedOptimizer):
        yield from (WholeState(slot, _read(part, slot)) for slot in part.slots())
        return
    group = part.process_groups.dp
    assert group is not None  # its constructor asks for it
    ranges: list[Any] = [None] * group.size()
    dist.all_gather_object(
        ranges, [_range(part, slot) for slot in part.slots()], group=group
    )
    for slot, *of_ranks in zip(part.slots(), *ranges, strict=True):
        state = _read(part, slot)
        if any(of_rank is None for of_rank in of_ranks):
            yield WholeState(slot, state)  # every rank steps all of it
        else:
            yield _put_together(slot, state, of_ranks, choose(of_ranks), group)


def _range(part: MegatronOptimizer, slot: Slot) -> Range | None:
    """What this rank has of a slot; None if all of it."""
    state = part.slot_state(slot)
    shard = next(
        (value for value in state.values() if isinstance(value, FlatShard)), None
    )
    if shard is not None:
        return shard.start, shard.local.numel()
    return None


def _read(part: MegatronOptimizer, slot: Slot) -> State:
    """A slot's state in FP32, not the live tensors where those lie on the host: what saves in the
    background copies from accelerators only."""
    return {key: _copied(value) for key, value in part.full_slot_state(slot).items()}


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    return value.detach().clone()


def _put_together(
    slot: Slot, state: State, ranges: Sequence[Range], rank: int, group: ProcessGroup
) -> WholeState:
    shards = {
        key: value for key, value in state.items() if isinstance(value, FlatShard)
    }
    rest = {key: value for key, value in state.items() if key not in shards}
    is_here, holders = group.rank() == rank, [count for _, count in ranges if count]
    if len(holders) > 1 or (holders and not ranges[rank][1]):
        gathered = _gather(list(shards.values()), ranges, rank, group)
    else:
        gathered = (
            [shard.local.view(shard.shape) for shard in shards.values()]
            if is_here
            else []
        )
    whole = dict(zip(shards, gathered, strict=True)) if is_here else {}
    return WholeState(slot, {**rest, **whole}, only_here=True)


def _gather(
    shards: Sequence[FlatShard], ranges: Sequence[Range], rank: int, group: ProcessGroup
) -> list[Tensor]:
    """The whole tensors of some shards of one range, on one rank; nothing on the others."""
    device = _device(group)
    largest = max(count for _, count in ranges)
    sent = torch.zeros(len(shards), largest, dtype=torch.float32, device=device)
    for row, shard in zip(sent, shards, strict=True):
        row[: shard.local.numel()].copy_(shard.local)
    is_here = group.rank() == rank
    received = [torch.empty_like(sent) for _ in ranges] if is_here else None
    dist.gather(sent, received, dist.get_global_rank(group, rank), group=group)
    if received is None:
        return []
    return [_joined(shard, row, received, ranges) for row, shard in enumerate(shards)]


def _joined(
    shard: FlatShard, row: int, received: Sequence[Tensor], ranges: Sequence[Range]
) -> Tensor:
    whole = torch.empty(shard.shape.numel(), dtype=torch.float32, device=shard.device)
    for (start, count), of_rank in zip(ranges, received, strict=True):
        whole[start : start + count].copy_(of_rank[row, :count])
    return whole.view(shard.shape)


def _device(group: ProcessGroup) -> torch.device:
    """Where a group's collectives take tensors from."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def name_of(part: MegatronOptimizer, slot: Slot) -> tuple[str, Tensor]:
    """A slot's name and parameter."""
    return part.slot_name(slot), param_at(part.param_groups, slot)
