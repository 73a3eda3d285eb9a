"""Steps host slots bucket by bucket: gradients come down, the rule runs, parameters go up.

While bucket k is computed, the gradients of bucket k+1 are on their way down and the parameters of
bucket k-1 on their way up. Gradients and parameters travel in the dtype they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mp_optim.placement.arena import HostArena, aligned_bytes
from mp_optim.placement.timeline import WAIT_COPIES, StepTimeline
from mp_optim.placement.transfer import CopyPair, Transfer
from mp_optim.slots import SlotUpdate

__all__ = ["HostPipeline", "TransferBytes", "staging_bytes"]

Bucket = list[SlotUpdate]


@dataclass
class TransferBytes:
    """Bytes of the last step over the bus."""

    down: int = 0
    up: int = 0


class _Stage:
    """Host memory of one bucket in flight, with the ticket that says when it is free again."""

    def __init__(self, transfer: Transfer, capacity: int, pin: bool) -> None:
        self._transfer = transfer
        self.arena = HostArena(transfer, capacity, pin)
        self._busy: Any = None

    def load(self, bucket: Bucket) -> tuple[Bucket, Any]:
        """Start the download of a bucket's gradients; returns host-side updates and the ticket."""
        if self._busy is not None:
            self._transfer.wait(self._busy)
            self._busy = None
        self.arena.reset()
        staged = [
            update._replace(
                grad=self.arena.take(update.grad.shape, update.grad.dtype),
                output=None
                if update.output is None
                else self.arena.take(update.output.shape, update.output.dtype),
            )
            for update in bucket
        ]
        pairs = [(mine.grad, theirs.grad) for mine, theirs in zip(staged, bucket, strict=True)]
        return staged, self._transfer.download(pairs)

    def store(self, staged: Bucket, bucket: Bucket) -> None:
        """Start the upload of a bucket's parameters."""
        pairs: list[CopyPair] = [
            (theirs.output, mine.output)
            for mine, theirs in zip(staged, bucket, strict=True)
            if mine.output is not None and theirs.output is not None
        ]
        self._busy = self._transfer.upload(pairs)


class HostPipeline:
    """A ring of stages.

    Args:
        bucket_bytes: staging bytes per bucket; one parameter larger than that is a bucket by
            itself.
        depth: buckets in flight; 1 means no overlap.
        pin: page-lock the staging memory.
        stages: where the time goes.
    """

    def __init__(
        self,
        transfer: Transfer,
        *,
        bucket_bytes: int,
        depth: int,
        pin: bool,
        stages: StepTimeline | None = None,
    ) -> None:
        if bucket_bytes < 1 or depth < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}, depth={depth}: both must be at least 1")
        self._transfer = transfer
        self._bucket_bytes = bucket_bytes
        self._depth = depth
        self._pin = pin
        self._times = stages or StepTimeline()
        self._stages: list[_Stage] = []
        self.traffic = TransferBytes()

    def over(self, transfer: Transfer) -> HostPipeline:
        """The same pipeline over another transfer."""
        return HostPipeline(
            transfer,
            bucket_bytes=self._bucket_bytes,
            depth=self._depth,
            pin=self._pin,
            stages=self._times,
        )

    @property
    def staging_bytes(self) -> int:
        """Host bytes held for staging; 0 before the first step."""
        return sum(stage.arena.capacity for stage in self._stages)

    def staging_for(self, updates: Sequence[SlotUpdate], shares: Sequence[int]) -> int:
        """Host bytes that stepping these takes."""
        sizes = [
            sum(map(staging_bytes, bucket))
            for bucket in _buckets(updates, shares, self._bucket_bytes)
        ]
        return max(sizes, default=0) * min(self._depth, len(sizes))

    def run(
        self, updates: Sequence[SlotUpdate], shares: Sequence[int], step: Callable[[Bucket], None]
    ) -> None:
        """Step all ``updates``; on return every upload is ordered before later accelerator work.

        Args:
            shares: elements of each update by which buckets are filled. All ranks that reduce
                together pass the same numbers, so that they cut the same buckets and meet in the
                same collectives.
            step: steps one bucket, whose tensors are on the host.
        """
        buckets = list(_buckets(updates, shares, self._bucket_bytes))
        self.traffic = TransferBytes(
            down=sum(u.grad.nbytes for u in updates),
            up=sum(u.output.nbytes for u in updates if u.output is not None),
        )
        if not buckets:
            return
        self._reserve(max(sum(map(staging_bytes, bucket)) for bucket in buckets), len(buckets))
        ahead = min(self._depth - 1, 1)
        loads = [
            self._stage(index).load(bucket) for index, bucket in enumerate(buckets[: 1 + ahead])
        ]
        for index, bucket in enumerate(buckets):
            staged, ticket = loads[index]
            with self._times.stage(WAIT_COPIES):
                self._transfer.wait(ticket)
            with self._times.stage("host_step"):
                step(staged)
            with self._times.stage("publish"):
                self._stage(index).store(staged, bucket)
            if (upcoming := index + 1 + ahead) < len(buckets):
                loads.append(self._stage(upcoming).load(buckets[upcoming]))
        self._transfer.join()

    def _stage(self, index: int) -> _Stage:
        return self._stages[index % len(self._stages)]

    def _reserve(self, capacity: int, buckets: int) -> None:
        depth = min(self._depth, max(buckets, len(self._stages)))
        if len(self._stages) < depth or self._stages[0].arena.capacity < capacity:
            self._transfer.join()
            self._stages = [_Stage(self._transfer, capacity, self._pin) for _ in range(depth)]


def staging_bytes(update: SlotUpdate) -> int:
    """Host bytes that an update's gradient and output take."""
    size = aligned_bytes(update.grad.numel(), update.grad.dtype)
    return (
        size
        if update.output is None
        else size + aligned_bytes(update.output.numel(), update.output.dtype)
    )


def _buckets(
    updates: Sequence[SlotUpdate], shares: Sequence[int], bucket_bytes: int
) -> Iterator[Bucket]:
    bucket: Bucket = []
    filled = 0
    for update, share in zip(updates, shares, strict=True):
        size = share * (
            update.grad.itemsize + (0 if update.output is None else update.output.itemsize)
        )
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(update)
        filled += size
    if bucket:
        yield bucket
