"""Reductions and gathers of flat tensors among the ranks of a group.

Gradients are added in one of two ways. In each way the order of additions depends only on the
ranks:

- Exchange: each rank sends every other rank the shard that the other rank owns. The owner adds in
  FP32 in the order of ranks, and rounds once. The bits are the same on any backend. gloo supports
  only exchanges.
- Collective: the backend's reduce-scatter (NCCL) needs no extra memory. The backend chooses the
  order of additions, and the order is always the same for a bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.kernels.chunking import piece_elements
from mp_optim.process_groups.missing_ranks import start_collective, wait_for, wait_for_all

_gather_into: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def uses_exchange(group: ProcessGroup, device: torch.device, fp32_accumulation: bool) -> bool:
    """True if ranks exchange gradients and add the gradients in this process; False if the backend
    reduces gradients.

    Args:
        group: the ranks that reduce.
        device: device of the gradients.
        fp32_accumulation: True to add in FP32, which only the exchange does.
    """
    return fp32_accumulation or group._get_backend(device).name() != "nccl"


def start_reduction(
    grads: Tensor,
    owned: Tensor,
    group: ProcessGroup,
    bounds: Sequence[int],
    *,
    divisor: int,
    exchange: bool,
    add: bool,
) -> Reduction:
    """Start to reduce a bucket.

    Args:
        grads: this rank's gradients, 1-D. No other code may use them until the reduction ends.
        owned: memory for this rank's shard of the result; may be a view of ``grads``.
        group: the ranks that reduce.
        bounds: index of the first element of each rank's shard in ``grads``, and the end of the
            last shard.
        divisor: divisor of the sum; 1 for a sum.
        exchange: True for an exchange, False for the backend's reduction.
        add: True to add to ``owned`` instead of replacing it.
    """
    kind = _Exchange if exchange or group.size() == 1 else Reduction
    return kind(grads, owned, group, bounds, divisor, add)


class Flag:
    """A reduction in progress of one bool, which is True if any rank passes True. Collective.

    Args:
        group: the ranks.
        raised: the value of this rank.
    """

    def __init__(self, group: ProcessGroup, raised: bool) -> None:
        kinds = {device.type: device for device in group._device_types}
        self._device, self._group = kinds.get("cpu", next(iter(kinds.values()))), group
        self._flag = torch.full((1,), raised, dtype=torch.int32, device=self._device)
        largest = dist.ReduceOp.MAX
        self._work = start_collective(dist.all_reduce, self._flag, op=largest, group=group)

    def wait(self) -> bool:
        """Wait for all ranks. Return True if any rank passed True."""
        wait_for(self._work, self._group, self._device)
        return bool(self._flag.item())


def _are_even(bounds: Sequence[int]) -> bool:
    return len({last - first for first, last in itertools.pairwise(bounds)}) == 1


_PADDING = 1.25
"""An exchange is done in one round if the largest shard has at most this multiple of the mean
number of elements of a shard."""


@dataclass
class Reduction:
    """A reduction of a bucket in progress, by the backend. :func:`start_reduction` describes the
    arguments. Equal shards need one reduce-scatter. Shards of different sizes need one reduction
    for each rank.

    Attributes:
        works: handles of the backend's collectives.
        result: memory to which the collectives write this rank's shard.
    """

    grads: Tensor
    owned: Tensor
    group: ProcessGroup
    bounds: Sequence[int]
    divisor: int
    add: bool
    works: list[Any] = field(init=False, default_factory=list)
    result: Tensor = field(init=False)

    def __post_init__(self) -> None:
        op = dist.ReduceOp.SUM
        if self.divisor == self.group.size():
            op = dist.ReduceOp.AVG
        elif self.divisor != 1:  # Divide before the sum, which may overflow in 16 bits.
            divide_(self.grads, self.divisor)
        if _are_even(self.bounds):
            self.result = torch.empty_like(self.owned) if self.add else self.owned
            self.works.append(
                start_collective(_reduce_scatter, self.result, self.grads, op=op, group=self.group)
            )
            return
        for rank, (first, last) in enumerate(itertools.pairwise(self.bounds)):
            if rank == self.group.rank():
                self.result = self.grads[first:last]
            if last > first:
                to, part = dist.get_global_rank(self.group, rank), self.grads[first:last]
                self.works.append(start_collective(dist.reduce, part, to, op, group=self.group))

    def wait(self) -> None:
        """Wait until this rank's shard is complete. On an accelerator, the host does not wait; only
        kernels that are queued later wait."""
        wait_for_all(self.works, self.group, self.grads.device)
        if self.add:
            self.owned += self.result
        elif self.result.data_ptr() != self.owned.data_ptr():
            self.owned.copy_(self.result)


@dataclass
class _Exchange(Reduction):
    """A reduction of a bucket in progress, by an all-to-all: each rank sends every other rank the
    shard that the other rank owns.

    A large shard is exchanged in several rounds. The owner of a shard receives one copy from every
    rank, so one round would need the memory of several whole buckets.

    Attributes:
        received: copies of this rank's shard that the present round receives.
        sent: parts of the shards that the present round sends.
        fullest: number of elements of the largest shard.
        piece: number of elements of a shard that are exchanged in one round.
    """

    received: Tensor | None = field(init=False, default=None)
    sent: Tensor | None = field(init=False, default=None)
    fullest: int = field(init=False)
    piece: int = field(init=False)

    def __post_init__(self) -> None:
        ranks, numel = self.group.size(), self.bounds[-1]
        self.fullest = max(last - first for first, last in itertools.pairwise(self.bounds))
        is_even = self.fullest * ranks <= _PADDING * numel
        self.piece = max(1, self.fullest if is_even else -(-numel // (2 * ranks)))
        if ranks > 1:
            self._start(0)

    def _start(self, start: int) -> None:
        """Start a round: exchange ``piece`` elements of every shard.

        Args:
            start: index of the first of these elements in its shard.
        """
        ranks, width = self.group.size(), self.grads.element_size()
        parts = [
            (min(first + start, last), min(first + start + self.piece, last))
            for first, last in itertools.pairwise(self.bounds)
        ]
        self.sent = self.grads
        if self.piece < self.fullest:
            self.sent = torch.cat([self.grads[a:b] for a, b in parts])
        counts = [b - a for a, b in parts]
        count, even = counts[self.group.rank()], len(set(counts)) == 1
        self.received = self.grads.new_empty(count * ranks)
        work = start_collective(
            dist.all_to_all_single,
            _bytes(self.received),
            _bytes(self.sent),
            None if even else [count * width] * ranks,
            None if even else [of_rank * width for of_rank in counts],
            group=self.group,
        )
        self.works = [work]

    def wait(self) -> None:
        for start in range(0, max(1, self.fullest), self.piece):
            if start:
                self._start(start)
            wait_for_all(self.works, self.group, self.grads.device)
            received = self.grads if self.received is None else self.received
            ranks = self.group.size()
            rows = received.view(ranks, received.numel() // ranks)
            total = rows[0].to(torch.float32, copy=True)
            # Add in the order of ranks, so that the bits do not depend on the backend.
            for row in rows[1:]:
                total += row
            self.received = self.sent = None
            finish_sum(total, self.owned[start : start + len(total)], self.divisor, self.add)


def divide_(grads: Tensor, divisor: int) -> None:
    """Divide gradients in place, and round each quotient once to the dtype of the gradients. A
    divisor that a 16-bit dtype cannot represent (257 would be 256 in bfloat16) is used in FP32."""
    device = grads.device
    if torch.tensor(divisor, dtype=grads.dtype, device="cpu").item() == divisor:
        grads.div_(torch.full((), divisor, dtype=grads.dtype, device=device))
        return
    by = torch.full((), divisor, dtype=torch.float32, device=device)
    for piece in torch.split(grads.view(-1), piece_elements(device)):
        piece.copy_(piece.float().div_(by))


def finish_sum(total: Tensor, owned: Tensor, divisor: int, add: bool) -> None:
    """Divide a sum over ranks, and write it to this rank's shard.

    Args:
        total: the sum, FP32, 1-D; overwritten.
        owned: this rank's shard.
        divisor: divisor of the sum.
        add: True to add to the shard instead of replacing it.
    """
    # CUDA divides by a Python number as a product with the reciprocal, which rounds twice. So
    # divide by a tensor.
    if divisor != 1:
        total /= torch.full_like(total, divisor)
    if add:
        total += owned
    owned.copy_(total)


def all_gather(flat: Tensor, bounds: Sequence[int], group: ProcessGroup) -> list[Any]:
    """Start to fill a flat buffer with the shards of all ranks. Collective.

    Args:
        flat: the buffer, 1-D; has this rank's shard.
        bounds: index of the first element of each rank's shard, and the end of the last shard.
        group: the ranks.

    Returns:
        Handles for :func:`wait_for_all`.
    """
    if group.size() == 1:
        return []
    data, width = _bytes(flat), flat.element_size()
    parts = [data[first * width : last * width] for first, last in itertools.pairwise(bounds)]
    if _are_even(bounds):
        return [start_collective(_gather_into, data, parts[group.rank()], group=group)]
    return [
        start_collective(dist.broadcast, part, src=dist.get_global_rank(group, rank), group=group)
        for rank, part in enumerate(parts)
        if len(part)
    ]


def broadcast(flat: Tensor, group: ProcessGroup) -> None:
    """Overwrite a flat buffer with the values of the group's first rank, and wait. Collective."""
    if group.size() > 1:
        first = dist.get_global_rank(group, 0)
        work = start_collective(dist.broadcast, _bytes(flat), src=first, group=group)
        wait_for(work, group, flat.device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
