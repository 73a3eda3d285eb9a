"""Adding up gradients so that every rank gets its shard of the sum, in an order of additions that
ranks alone decide.

Two ways. *Exchange*: each rank sends every other its shard, and the owner adds in FP32 in the order
of ranks, rounding once: the same bits on any backend, and the only way on gloo. *Collective*: the
backend's reduce-scatter (NCCL), which needs no memory to receive and adds in an order of its own,
though always the same for the same bucket.
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

from mp_optim.ranks.missing_ranks import wait_for, wait_for_all
from mp_optim.update.chunking import piece_elements

_gather_into: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def uses_exchange(group: ProcessGroup, device: torch.device, fp32_accumulation: bool) -> bool:
    """Whether gradients on a device are exchanged and added here, rather than by the backend."""
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
        grads: this rank's gradients, flat; not to be touched before the end.
        owned: where this rank's shard of the result goes; may be its part of ``grads``.
        bounds: where each rank's shard begins in ``grads``, and where the last one ends.
        divisor: what the sum is divided by: 1 for a sum.
        exchange: which way.
        add: add to what is in ``owned`` instead of replacing it.
    """
    kind = _Exchange if exchange or group.size() == 1 else Reduction
    return kind(grads, owned, group, bounds, divisor, add)


class Flag:
    """A question to a group that is under way: is it so on any rank? Collective.

    Args:
        raised: whether it is so here.
    """

    def __init__(self, group: ProcessGroup, raised: bool) -> None:
        kinds = {device.type: device for device in group._device_types}
        self._device, self._group = kinds.get("cpu", next(iter(kinds.values()))), group
        self._flag = torch.full((1,), raised, dtype=torch.int32, device=self._device)
        largest = dist.ReduceOp.MAX
        self._work = dist.all_reduce(self._flag, op=largest, group=group, async_op=True)

    def wait(self) -> bool:
        """The answer, known to the host."""
        wait_for(self._work, self._group, self._device)
        return bool(self._flag.item())


def _are_even(bounds: Sequence[int]) -> bool:
    return len({last - first for first, last in itertools.pairwise(bounds)}) == 1


_PADDING = 1.25
"""By how much the fullest shard may exceed the mean before an exchange is done in several
rounds."""


@dataclass
class Reduction:
    """A reduction of a bucket under way, by the arguments of :func:`start_reduction`: the backend's
    reduce-scatter, or for shards of different sizes one reduction for each rank's.

    Attributes:
        works: of the backend. result: where they leave this rank's shard.
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
        elif self.divisor != 1:  # before the sum: 16-bit floats may not hold it
            divide_(self.grads, self.divisor)
        if _are_even(self.bounds):
            self.result = torch.empty_like(self.owned) if self.add else self.owned
            self.works.append(
                _reduce_scatter(self.result, self.grads, op=op, group=self.group, async_op=True)
            )
            return
        for rank, (first, last) in enumerate(itertools.pairwise(self.bounds)):
            if rank == self.group.rank():
                self.result = self.grads[first:last]
            if last > first:
                to, part = dist.get_global_rank(self.group, rank), self.grads[first:last]
                self.works.append(dist.reduce(part, to, op, group=self.group, async_op=True))

    def wait(self) -> None:
        """Return when the owned shard is complete (on an accelerator: for work queued from now
        on)."""
        wait_for_all(self.works, self.group, self.grads.device)
        if self.add:
            self.owned += self.result
        elif self.result.data_ptr() != self.owned.data_ptr():
            self.owned.copy_(self.result)


@dataclass
class _Exchange(Reduction):
    """Each rank sends the others their shards.

    Attributes:
        fullest: elements of the largest shard.
        piece: elements of a shard that are exchanged in one round. The owner of a large one
            receives it from every rank: in one round, that would take as much memory as so many
            whole buckets.
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
        """Begin the round of what lies at ``start`` and on in every shard."""
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
        work = dist.all_to_all_single(
            _bytes(self.received),
            _bytes(self.sent),
            None if even else [count * width] * ranks,
            None if even else [of_rank * width for of_rank in counts],
            group=self.group,
            async_op=True,
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
            for row in rows[1:]:  # in the order of ranks
                total += row
            self.received = self.sent = None
            finish_sum(total, self.owned[start : start + len(total)], self.divisor, self.add)


def divide_(grads: Tensor, divisor: int) -> None:
    """Divide gradients in their own dtype, each rounded once: also by a number that a 16-bit float
    does not hold (257 would be 256 in bfloat16)."""
    device = grads.device
    if torch.tensor(divisor, dtype=grads.dtype, device="cpu").item() == divisor:
        grads.div_(torch.full((), divisor, dtype=grads.dtype, device=device))
        return
    by = torch.full((), divisor, dtype=torch.float32, device=device)
    for piece in torch.split(grads.view(-1), piece_elements(device)):
        piece.copy_(piece.float().div_(by))


def finish_sum(total: Tensor, owned: Tensor, divisor: int, add: bool) -> None:
    """Write a sum over ranks, divided, to where it belongs, or add it to what is there."""
    if divisor != 1:  # by a tensor: CUDA would multiply with a number's reciprocal
        total /= torch.full_like(total, divisor)
    if add:
        total += owned
    owned.copy_(total)


def all_gather(flat: Tensor, bounds: Sequence[int], group: ProcessGroup) -> list[Any]:
    """Start to fill a flat buffer with all ranks' shards, of which this rank has its own.

    Args:
        bounds: where each rank's shard begins, and where the last one ends.

    Returns:
        Work to wait for.
    """
    if group.size() == 1:
        return []
    data, width = _bytes(flat), flat.element_size()
    parts = [data[first * width : last * width] for first, last in itertools.pairwise(bounds)]
    if _are_even(bounds):
        return [_gather_into(data, parts[group.rank()], group=group, async_op=True)]
    return [
        dist.broadcast(part, src=dist.get_global_rank(group, rank), group=group, async_op=True)
        for rank, part in enumerate(parts)
        if len(part)
    ]


def broadcast(flat: Tensor, group: ProcessGroup) -> None:
    """Give every rank the first one's values."""
    if group.size() > 1:
        work = dist.broadcast(
            _bytes(flat), src=dist.get_global_rank(group, 0), group=group, async_op=True
        )
        wait_for(work, group, flat.device)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: backends differ in the dtypes they move."""
    return tensor.view(torch.uint8)
