"""Flat memory for parameters and gradients, into which the model's own parameters look.

The buffers are new memory, made without autograd and detached from it: nothing is flattened from
tensors that autograd knows, and a group of one parameter shares no memory with what the model had
before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.config import OptimizerConfig
from mp_optim.distributed.bucket_plan import (
    BucketPlan,
    ParamRange,
    plan_flat,
    plan_whole,
)
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.quantized import is_quantized
from mp_optim.slots import check_shape
from mp_optim.slots.shared_memory import check_memory


@dataclass(slots=True)
class Entry:
    """One parameter in a bucket.

    Attributes:
        name: its FQN. param: the model's tensor, which looks into the bucket.
        placed: where. start, stop: what this rank owns of it, in elements of the parameter.
        data: the view that is the parameter's data.
    """

    name: str
    param: Tensor
    placed: ParamRange
    start: int
    stop: int
    data: Tensor


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters of one dtype and device that are reduced and gathered together.

    Attributes:
        plan: where they lie.
        rank: whose shard is owned here.
        params: flat, ``plan.numel`` elements; the model's parameters look into it.
        grad_dtype: dtype in which gradients are kept and travel.
        grads: this rank's own gradients, flat; None while there are none to keep (ZeRO-2).
        owned_grads: the owned shard of the reduced gradients; part of ``grads`` unless those come
            and go.
        entries: the parameters.
    """

    plan: BucketPlan
    rank: int
    params: Tensor
    grad_dtype: torch.dtype
    grads: Tensor | None
    owned_grads: Tensor = field(init=False)
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        first, last = self.plan.owned(self.rank)
        if self.grads is None:
            self.owned_grads = self._zero_grads(last - first)
        else:
            self.owned_grads = self.grads[first:last]

    def _zero_grads(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.grad_dtype, device=self.params.device)

    def add(self, name: str, param: Tensor, placed: ParamRange) -> Entry:
        """Take in one more parameter, whose place is part of the plan."""
        data = self.params[placed.elements].view(param.shape)
        fragment = self.plan.fragment(placed, self.rank)
        self.entries.append(Entry(name, param, placed, *fragment, data))
        return self.entries[-1]

    def local_grads(self) -> Tensor:
        """This rank's own gradients; zeros where none has arrived."""
        if self.grads is None:
            self.grads = self._zero_grads(self.plan.numel)
        return self.grads

    def local_grad(self, entry: Entry) -> Tensor:
        """The gradient of one parameter, in its shape."""
        return self.local_grads()[entry.placed.elements].view(entry.data.shape)

    def owned_grad(self, entry: Entry) -> Tensor:
        """The owned elements of one parameter's reduced gradient, 1-D."""
        first = (
            entry.placed.start + entry.start - self.plan.owned(self.rank)[0]
            if entry.stop > entry.start
            else 0
        )
        return self.owned_grads[first : first + entry.stop - entry.start]

    def adopt(self, entry: Entry, param: Tensor) -> None:
        """Take a tensor's values, and make it look into the bucket.

        Raises:
            ValueError: it does not fit the place.
        """
        if (
            param.shape != entry.data.shape
            or param.dtype != entry.data.dtype
            or param.device != entry.data.device
        ):
            raise ValueError(
                f"{entry.name} was replaced by a tensor of {tuple(param.shape)}, {param.dtype}, "
                f"{param.device}; its place in the bucket is for {tuple(entry.data.shape)}, "
                f"{entry.data.dtype}, {entry.data.device}: build the optimizer again"
            )
        check_shape(entry.data, param, entry.name)
        with torch.no_grad():
            values = param.detach()
            if values.untyped_storage()._cdata == entry.data.untyped_storage()._cdata:
                values = values.clone()  # another view of the bucket: transposed, say
            entry.data.copy_(values)
        param.data = entry.data
        entry.param = param


def check_shardable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse what cannot become a view of a flat buffer, naming the parameter and what to do.

    Raises:
        ValueError: a parameter is a DTensor, in 8 bits, has strides that are not row-major, or
            shares memory with another one.
    """
    named = list(named)
    for name, param in named:
        if isinstance(param, DTensor):
            raise ValueError(
                f"{name} is a DTensor: FSDP2 shards it already; build the optimizer with "
                "use_distributed_optimizer=False"
            )
        if is_quantized(param):
            raise ValueError(
                f"{name} is a {type(param).__name__} of {param.dtype}: buffers hold 16 and 32 "
                "bits; "
                "keep it in bfloat16, or build the optimizer with use_distributed_optimizer=False"
            )
        if not param.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(param.shape)} and strides {param.stride()}: buffers hold "
                "parameters in row-major order and would change its memory format; do it yourself "
                "with param.data = param.data.contiguous() "
                "(model.to(memory_format=torch.contiguous_format)), or freeze the parameter"
            )
    check_memory(named)


def make_buckets(
    named: Sequence[tuple[str, Tensor]], config: OptimizerConfig, rank: int, ranks: int
) -> list[Bucket]:
    """Buckets for parameters, which look into them afterwards; one set of buckets for each dtype
    and device.

    Args:
        named: trainable parameters, each once.
        config: how gradients are kept, and where buckets end.
        rank, ranks: place in the data-parallel group, and its size.
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
        buckets += [_filled(plan, members, rank, config) for plan in plans]
    return buckets


@in_own_modes
def _filled(
    plan: BucketPlan,
    named: Sequence[tuple[str, Tensor]],
    rank: int,
    config: OptimizerConfig,
) -> Bucket:
    _, like = named[plan.placed[0].param]
    dtype = torch.float32 if config.grad_reduce_in_fp32 else like.dtype
    params = torch.zeros(plan.numel, dtype=like.dtype, device=like.device)
    grads = None
    if config.data_parallel_sharding_strategy != "optim_grads":
        grads = torch.zeros(plan.numel, dtype=dtype, device=like.device)
    bucket = Bucket(plan, rank, params, dtype, grads)
    for item in plan.placed:
        name, param = named[item.param]
        bucket.adopt(bucket.add(name, param, item), param)
    return bucket
