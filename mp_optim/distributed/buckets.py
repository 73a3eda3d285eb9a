"""Flat memory for parameters and gradients, into which the model's own parameters look.

The buffers are new memory, made without autograd and detached from it: nothing is flattened from
tensors that autograd knows, and a group of one parameter shares no memory with what the model had
before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.distributed.bucket_plan import (
    BucketPlan,
    ParamRange,
    plan_flat,
    plan_whole,
)
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.quantized import is_quantized


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
    owned_grads: Tensor
    entries: list[Entry] = field(default_factory=list)

    def local_grads(self) -> Tensor:
        """This rank's own gradients; zeros where none has arrived."""
        if self.grads is None:
            self.grads = torch.zeros(
                self.plan.numel, dtype=self.grad_dtype, device=self.params.device
            )
        return self.grads

    def local_grad(self, entry: Entry) -> Tensor:
        """The gradient of one parameter, in its shape."""
        place = entry.placed
        return self.local_grads()[place.start : place.start + place.numel].view(
            entry.data.shape
        )

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
        with torch.no_grad():
            entry.data.copy_(param.detach())
        param.data = entry.data
        entry.param = param


def check_shardable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse what cannot become a view of a flat buffer, naming the parameter and what to do.

    Raises:
        ValueError: a parameter is a DTensor, in 8 bits, has strides that are not row-major, or
            shares memory with another one.
    """
    spans: list[tuple[str, int, int, str]] = []
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
        if param.numel():
            spans.append(
                (
                    str(param.device),
                    param.data_ptr(),
                    param.data_ptr() + param.nbytes,
                    name,
                )
            )
    spans.sort()
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(
        spans
    ):
        if device == other_device and start < end:
            raise ValueError(
                f"{name} and {other} are two parameters that share memory, which separate places "
                "in a bucket would end; tie them by using one Parameter in both modules"
            )


def make_buckets(
    params: Sequence[Tensor],
    names: Sequence[str],
    *,
    rank: int,
    ranks: int,
    bucket_size: int | None,
    grads_in_fp32: bool,
    keep_grads: bool,
    whole: bool,
) -> list[Bucket]:
    """Buckets for parameters, which look into them afterwards; one set of buckets for each dtype
    and device.

    Args:
        params, names: trainable parameters, each once.
        rank, ranks: place in the data-parallel group, and its size.
        bucket_size: see :func:`~mp_optim.distributed.bucket_plan.plan_flat`.
        grads_in_fp32: keep and send gradients in FP32 rather than in the parameter's dtype.
        keep_grads: room for all of this rank's own gradients from the start.
        whole: every parameter in one shard.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, param in enumerate(params):
        kinds.setdefault((param.dtype, param.device), []).append(index)
    buckets = []
    for (dtype, _), members in kinds.items():
        sizes = [params[index].numel() for index in members]
        plans = (
            plan_whole(sizes, ranks) if whole else plan_flat(sizes, ranks, bucket_size)
        )
        grad_dtype = torch.float32 if grads_in_fp32 else dtype
        own_params = [params[index] for index in members]
        own_names = [names[index] for index in members]
        for plan in plans:
            buckets.append(
                _filled(plan, own_params, own_names, rank, grad_dtype, keep_grads)
            )
    return buckets


@in_own_modes
def _filled(
    plan: BucketPlan,
    params: Sequence[Tensor],
    names: Sequence[str],
    rank: int,
    grad_dtype: torch.dtype,
    keep_grads: bool,
) -> Bucket:
    like = params[plan.placed[0].param]
    grads = (
        torch.zeros(plan.numel, dtype=grad_dtype, device=like.device)
        if keep_grads
        else None
    )
    first, last = plan.owned(rank)
    owned = (
        torch.zeros(last - first, dtype=grad_dtype, device=like.device)
        if grads is None
        else grads[first:last]
    )
    bucket = Bucket(
        plan,
        rank,
        torch.zeros(plan.numel, dtype=like.dtype, device=like.device),
        grad_dtype,
        grads,
        owned,
    )
    for item in plan.placed:
        param = params[item.param]
        data = bucket.params[item.start : item.start + item.numel].view(param.shape)
        entry = Entry(names[item.param], param, item, *plan.fragment(item, rank), data)
        bucket.adopt(entry, param)
        bucket.entries.append(entry)
    return bucket
