"""Adding up gradients so that every rank gets its shard of the sum, in an order of additions that ranks alone decide.

Two ways. *Exchange*: each rank sends every other its shard, and the owner adds in FP32 in the order of ranks, rounding
once: the same bits on any backend, and the only way on gloo. *Collective*: the backend's reduce-scatter (NCCL), which
needs no memory to receive and adds in an order of its own, though always the same for the same bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.missing_ranks import wait_for

__all__ = ["Reduction", "all_gather", "broadcast", "start_reduction", "uses_exchange"]

_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Reduction(Protocol):
    """A reduction under way."""

    def wait(self) -> None:
        """Return when the owned shard is complete (on an accelerator: for work queued from now on)."""


def uses_exchange(group: ProcessGroup, device: torch.device, fp32_accumulation: bool) -> bool:
    """Whether gradients on a device are exchanged and added here, rather than by the backend."""
    return fp32_accumulation or group._get_backend(device).name() != "nccl"


def start_reduction(grads: Tensor, owned: Tensor, group: ProcessGroup, *, divisor: int, exchange: bool,
                    add: bool) -> Reduction:
    """Start to reduce a bucket.

    Args:
        grads: this rank's gradients, flat; not to be touched before the end.
        owned: where this rank's shard of the result goes; may be its part of ``grads``.
        divisor: what the sum is divided by: 1 for a sum.
        exchange: which way.
        add: add to what is in ``owned`` instead of replacing it.
    """
    if exchange or group.size() == 1:
        return _Exchange(grads, owned, group, divisor, add)
    return _Collective(grads, owned, group, divisor, add)


@dataclass(slots=True)
class _Exchange:
    grads: Tensor
    owned: Tensor
    group: ProcessGroup
    divisor: int
    add: bool
    received: Tensor | None = None
    work: Any = None

    def __post_init__(self) -> None:
        if self.group.size() > 1:
            self.received = torch.empty_like(self.grads)
            self.work = dist.all_to_all_single(_bytes(self.received), _bytes(self.grads), group=self.group,
                                               async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            wait_for(self.work, self.group, self.grads.device)
        rows = (self.grads if self.received is None else self.received).view(self.group.size(), -1)
        total = rows[0].to(torch.float32, copy=True)
        for row in rows[1:]:
            total += row
        _finish(total, self.owned, self.divisor, self.add)


@dataclass(slots=True)
class _Collective:
    grads: Tensor
    owned: Tensor
    group: ProcessGroup
    divisor: int
    add: bool
    result: Tensor | None = None
    work: Any = None

    def __post_init__(self) -> None:
        self.result = torch.empty_like(self.owned) if self.add else self.owned
        average = self.divisor == self.group.size()
        if not average and self.divisor != 1:  # before the sum: 16-bit floats may not hold it
            self.grads.div_(self.divisor)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self.work = _reduce_scatter(self.result, self.grads, op=op, group=self.group, async_op=True)

    def wait(self) -> None:
        wait_for(self.work, self.group, self.grads.device)
        if self.add and self.result is not None:
            self.owned += self.result


def _finish(total: Tensor, owned: Tensor, divisor: int, add: bool) -> None:
    if divisor != 1:
        total /= divisor
    if add:
        total += owned
    owned.copy_(total)


def all_gather(flat: Tensor, owned: Tensor, group: ProcessGroup) -> Any:
    """Start to fill a flat buffer with all ranks' shards; ``owned`` is this rank's part of it.

    Returns:
        Work to wait for, or None if there is nothing to wait for.
    """
    if group.size() == 1:
        return None
    return _gather_into(_bytes(flat), _bytes(owned), group=group, async_op=True)


def broadcast(flat: Tensor, group: ProcessGroup) -> None:
    """Give every rank the first one's values."""
    if group.size() > 1:
        work = dist.broadcast(_bytes(flat), src=dist.get_global_rank(group, 0), group=group, async_op=True)
        wait_for(work, group, flat.device)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: backends differ in the dtypes they move."""
    return tensor.view(torch.uint8)
