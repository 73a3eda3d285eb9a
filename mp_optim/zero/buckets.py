"""Flat buckets: the memory that parameters and gradients are views of, and the elements that each
rank owns.

Parameters are stored in buckets one after another, in row-major order. A bucket is cut into one
shard for each rank. Shards have equal sizes, or each shard has only whole parameters. Every
parameter and every shard starts at a multiple of :data:`SHARD_ALIGNMENT` elements.

A bucket is always new memory without autograd history, even for a single parameter. So a bucket
never shares memory with the model's former tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.core import check_shape
from mp_optim.core.quantized import is_quantized
from mp_optim.core.tensors import check_memory
from mp_optim.host.calls import in_own_modes
from mp_optim.host.torch_types import is_dtensor

SHARD_ALIGNMENT = 256
"""Alignment of parameters and shards, in elements: one block of the compact state formats, and at
least a cache line of any dtype. So the blocks of a shard are blocks of the whole parameter, and
vector loads are aligned."""


@dataclass(frozen=True, slots=True)
class ParamRange:
    """The position of one parameter in a bucket.

    Attributes:
        param: index of the parameter in the list that was planned.
        start: index of the parameter's first element in the bucket.
        numel: number of elements of the parameter.
    """

    param: int
    start: int
    numel: int

    @property
    def elements(self) -> slice:
        """The slice of the bucket that contains the parameter's elements."""
        return slice(self.start, self.start + self.numel)


@dataclass(frozen=True, slots=True)
class FlatBucketPlan:
    """Positions of parameters and shards in one bucket.

    Attributes:
        placed: positions of the parameters, in ascending order; they do not overlap.
        bounds: index of the first element of each rank's shard, and the end of the last shard.
    """

    placed: tuple[ParamRange, ...]
    bounds: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the bucket, with padding."""
        return self.bounds[-1]

    def owned(self, rank: int) -> tuple[int, int]:
        """Return [start, stop) of a rank's shard, in elements of the bucket."""
        return self.bounds[rank], self.bounds[rank + 1]

    def fragment(self, item: ParamRange, rank: int) -> tuple[int, int]:
        """Return [start, stop) of a rank's part of a parameter, in elements of the parameter; (0,
        0) if the rank has no part."""
        first, last = self.owned(rank)
        start, stop = max(first - item.start, 0), min(last - item.start, item.numel)
        return (start, stop) if start < stop else (0, 0)

    def is_whole(self, item: ParamRange) -> bool:
        """True if one rank's shard has all of a parameter."""
        ranks = range(len(self.bounds) - 1)
        return any(self.fragment(item, rank) == (0, item.numel) for rank in ranks)


def aligned(numel: int) -> int:
    """Return ``numel`` rounded up to a multiple of :data:`SHARD_ALIGNMENT`."""
    return -(-numel // SHARD_ALIGNMENT) * SHARD_ALIGNMENT


def plan_flat(
    sizes: Sequence[int], ranks: int, bucket_size: int | None = None
) -> list[FlatBucketPlan]:
    """Return plans of buckets whose shards may start and end anywhere in a parameter.

    The last parameter comes first, because backward produces gradients in this order.

    Args:
        sizes: number of elements of each parameter. A parameter without elements is in no bucket.
        ranks: number of ranks that share the buckets.
        bucket_size: number of elements at which a bucket is closed; None makes one bucket.
    """
    buckets: list[FlatBucketPlan] = []
    placed: list[ParamRange] = []
    filled = 0
    present = [index for index in reversed(range(len(sizes))) if sizes[index]]
    for index in present:
        placed.append(ParamRange(index, filled, sizes[index]))
        filled += aligned(sizes[index])
        if index == present[-1] or (bucket_size is not None and filled >= bucket_size):
            shard = aligned(-(-filled // ranks))
            bounds = range(0, shard * ranks + 1, shard)
            buckets.append(FlatBucketPlan(tuple(placed), tuple(bounds)))
            placed, filled = [], 0
    return buckets


def plan_whole(sizes: Sequence[int], ranks: int) -> list[FlatBucketPlan]:
    """Return a plan of one bucket in which each parameter is in a single shard, for rules that need
    whole matrices.

    The largest remaining parameter goes to the rank with the fewest elements (Graham's LPT rule:
    the fullest shard is at most 4/3 of the best possible). Shards differ in size. So a large
    embedding in one shard needs no padding in the shards of other ranks.

    Args:
        sizes: number of elements of each parameter. A parameter without elements is in no shard.
        ranks: number of ranks that share the bucket.
    """
    loads, members = [0] * ranks, [[0] * 0 for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        if sizes[index]:
            rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
            loads[rank] += aligned(sizes[index])
            members[rank].append(index)
    placed = []
    bounds = (0, *itertools.accumulate(loads))
    for start, indices in zip(bounds, members, strict=False):
        for index in sorted(indices, reverse=True):
            placed.append(ParamRange(index, start, sizes[index]))
            start += aligned(sizes[index])
    return [FlatBucketPlan(tuple(placed), bounds)] if placed else []


@dataclass(slots=True)
class Entry:
    """One parameter of a bucket, and the elements of the parameter that this rank owns.

    Attributes:
        name: FQN of the parameter.
        param: the model's tensor, a view of the bucket.
        placed: position of the parameter in the bucket.
        start: index of the first element that this rank owns, in the flattened parameter.
        stop: index after the last element that this rank owns.
        data: the view of the bucket that is the parameter's ``data``.
    """

    name: str
    param: Tensor
    placed: ParamRange
    start: int
    stop: int
    data: Tensor


@dataclass(slots=True, eq=False)
class FlatBucket:
    """Parameters of one dtype and device that are reduced and gathered together, kept for the
    optimizer's life.

    Attributes:
        plan: positions of parameters and shards.
        rank: number of this rank, which owns one shard.
        params: values of all parameters, 1-D, ``plan.numel`` elements. The model's parameters are
            views of this tensor.
        grad_dtype: dtype in which gradients are kept and communicated.
        grads: this rank's own gradients, 1-D, ``plan.numel`` elements; None while ZeRO-2 keeps no
            gradients.
        owned_grads: reduced gradients of this rank's shard. A view of ``grads``, except with
            ZeRO-2, which allocates ``grads`` again in each backward pass.
        entries: the parameters.
    """

    plan: FlatBucketPlan
    rank: int
    params: Tensor
    grad_dtype: torch.dtype
    grads: Tensor | None
    owned_grads: Tensor = field(init=False)
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        first, last = self.plan.owned(self.rank)
        if self.grads is None:
            self.owned_grads = self.params.new_zeros(last - first, dtype=self.grad_dtype)
        else:
            self.owned_grads = self.grads[first:last]

    def add(self, name: str, param: Tensor, placed: ParamRange) -> Entry:
        """Add a parameter to the bucket, and return the parameter's entry.

        Args:
            name: FQN of the parameter.
            param: the model's tensor.
            placed: position of the parameter in the plan of the bucket.
        """
        data = self.params[placed.elements].view(param.shape)
        fragment = self.plan.fragment(placed, self.rank)
        self.entries.append(Entry(name, param, placed, *fragment, data))
        return self.entries[-1]

    def local_grads(self) -> Tensor:
        """Return this rank's own gradients, 1-D, before the reduction. Gradients that have not
        arrived are zero."""
        if self.grads is None:
            self.grads = self.params.new_zeros(self.plan.numel, dtype=self.grad_dtype)
        return self.grads

    def local_grad(self, entry: Entry) -> Tensor:
        """Return this rank's own gradient of one parameter before the reduction, in the parameter's
        shape."""
        return self.local_grads()[entry.placed.elements].view(entry.data.shape)

    def owned_grad(self, entry: Entry) -> Tensor:
        """Return this rank's elements of one parameter's reduced gradient, 1-D."""
        count = entry.stop - entry.start
        first = entry.placed.start + entry.start - self.plan.owned(self.rank)[0] if count else 0
        return self.owned_grads[first : first + count]

    def adopt(self, entry: Entry, param: Tensor) -> None:
        """Copy a tensor's values into the bucket, and make the tensor a view of the bucket.

        Args:
            entry: the parameter that the tensor belongs to.
            param: the model's tensor.

        Raises:
            ValueError: shape, dtype or device of the tensor differ from the parameter's.
        """
        wanted = entry.data.shape, entry.data.dtype, entry.data.device
        if (param.shape, param.dtype, param.device) != wanted:
            raise ValueError(
                f"{entry.name} was replaced by a tensor of {tuple(param.shape)}, {param.dtype}, "
                f"{param.device}, but its bucket has {tuple(entry.data.shape)}, "
                f"{entry.data.dtype}, {entry.data.device}; build the optimizer again"
            )
        check_shape(entry.data, param, entry.name)
        with torch.no_grad():
            values = param.detach()
            if values.untyped_storage()._cdata == entry.data.untyped_storage()._cdata:
                # The tensor is another view of the bucket, such as a transposed one, so copy before
                # the write.
                values = values.clone()
            entry.data.copy_(values)
        param.data = entry.data
        entry.param = param


def check_shardable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if a parameter cannot be a view of a flat bucket. The message has the
    parameter's name and the cure.

    Args:
        named: names and parameters.

    Raises:
        ValueError: a parameter is a DTensor, is in 8 bits, is not contiguous, or shares memory with
            another parameter.
    """
    named = list(named)
    for name, param in named:
        if is_dtensor(param):
            raise ValueError(
                f"{name} is a DTensor, which FSDP2 shards already; build the optimizer with "
                "use_distributed_optimizer=False"
            )
        if is_quantized(param):
            raise ValueError(
                f"{name} is a {type(param).__name__} of {param.dtype}: flat buckets store only "
                "16-bit and 32-bit parameters; keep the parameter in bfloat16, or build the "
                "optimizer with use_distributed_optimizer=False"
            )
        if not param.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(param.shape)} and strides {param.stride()}: flat "
                "buckets store parameters in row-major order, which would change the memory "
                "format; convert the parameter with param.data = param.data.contiguous() "
                "(model.to(memory_format=torch.contiguous_format)), or freeze the parameter"
            )
    check_memory(named)


@in_own_modes
def make_buckets(
    named: Sequence[tuple[str, Tensor]], config: OptimizerConfig, rank: int, ranks: int
) -> list[FlatBucket]:
    """Return buckets for parameters, which become views of the buckets. A bucket has parameters of
    one dtype and device.

    Args:
        named: trainable parameters with their names, each parameter once.
        config: storage of gradients, and sizes of buckets.
        rank: number of this rank in the data-parallel group.
        ranks: size of that group.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    for name, param in named:
        kinds.setdefault((param.dtype, param.device), []).append((name, param))
    buckets = []
    for members in kinds.values():
        sizes = [param.numel() for _, param in members]
        if config.use_layer_wise_distributed_optimizer:
            plans = plan_whole(sizes, ranks)
        else:
            bucket_size = config.bucket_size or max(40_000_000, 1_000_000 * ranks)
            plans = plan_flat(sizes, ranks, bucket_size)
        for plan in plans:
            like = members[plan.placed[0].param][1]
            dtype = torch.float32 if config.grad_reduce_in_fp32 else like.dtype
            params = torch.zeros(plan.numel, dtype=like.dtype, device=like.device)
            grads = None
            if config.data_parallel_sharding_strategy != "optim_grads":
                grads = params.new_zeros(plan.numel, dtype=dtype)
            bucket = FlatBucket(plan, rank, params, dtype, grads)
            for item in plan.placed:
                name, param = members[item.param]
                bucket.adopt(bucket.add(name, param, item), param)
            buckets.append(bucket)
    return buckets
