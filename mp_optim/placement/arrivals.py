"""What was seen of gradients as they got ready in backward: their order, and by what early work is
judged: is a gradient still the one that work was begun with?

``clip_grad_norm_`` multiplies every gradient by ``min(1, limit / norm)``, by 1 as well, which
counts as a write and changes no bit; and torch does not count what its foreach operations write to
a DTensor. So where nothing but that count stands against early work, the gradients are compared
with what came down, bit by bit. They come down a second time for it from the accelerator, next to
the first copy, one bucket ahead of the comparison. Gradients in host memory are compared where they
are, at every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.placement.backward_jobs import BackwardJob
from mp_optim.placement.grad_hooks import GradVersion
from mp_optim.placement.staging import BucketStep, Staging
from mp_optim.process.transfer import Transfer
from mp_optim.slots import Slot, SlotUpdates

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Arrivals:
    """Counts gradients by slot, and remembers what was measured of them in this backward.

    Attributes:
        uncounted: slots whose last gradient torch does not count all writes to.
    """

    def __init__(self) -> None:
        self._counts: Counter[Slot] = Counter()
        self.uncounted: set[Slot] = set()
        self._sums: dict[int, tuple[GradVersion, Slot, float, Tensor | None]] = {}
        self._compared: dict[Slot, bool] = {}

    def note(self, slot: Slot, writes_are_counted: bool) -> None:
        """A gradient got ready; ``writes_are_counted`` by torch, so that its version tells."""
        count = self.uncounted.discard if writes_are_counted else self.uncounted.add
        count(slot)
        self._counts[slot] += 1

    # -- versions ---------------------------------------------------------------------------------

    def versions(self, updates: SlotUpdates, with_bits: bool = False) -> dict[Slot, GradVersion]:
        """The gradients of some updates as they are now; see :meth:`GradVersion.of`."""
        return {
            slot: GradVersion.of(grad, self._counts[slot], slot not in self.uncounted, with_bits)
            for slot, grad in zip(updates.slots, updates.grads, strict=True)
        }

    def is_fresh(self, job: BackwardJob, updates: SlotUpdates) -> bool:
        """Whether a job was given just these gradients, as they are now."""
        return tuple(job.versions) == tuple(updates.slots) and all(
            version.matches(grad, self._counts[slot])
            for (slot, version), grad in zip(job.versions.items(), updates.grads, strict=True)
        )

    def is_complete(self, job: BackwardJob, updates: SlotUpdates) -> bool:
        """Whether a job was given a gradient of each of these, and no other got ready since."""
        return tuple(job.versions) == tuple(updates.slots) and all(
            version.count == self._counts[slot] for slot, version in job.versions.items()
        )

    def is_as_staged(self, job: BackwardJob, updates: SlotUpdates) -> bool:
        """Whether a job was given these gradients of memory that the host reads, and has in its
        staging memory every bit that is in them now."""
        rows = zip(updates.slots, updates.grads, job.staged.grads, strict=True)
        return self.is_complete(job, updates) and all(
            self._has_bits(slot, grad, staged) for slot, grad, staged in rows
        )

    def _has_bits(self, slot: Slot, grad: Tensor, staged: Tensor) -> bool:
        """Compared once a step."""
        if slot not in self._compared:
            self._compared[slot] = same_bits([grad], [staged])
        return self._compared[slot]

    # -- sums of squares --------------------------------------------------------------------------

    def measured(self, job: BackwardJob | None, compares: bool) -> None:
        """Remember what a job measured, if it did.

        Args:
            compares: the host can compare the gradients with what came down of them.
        """
        if job is None or job.sums is None:
            return
        rows = zip(job.versions.items(), job.sums, job.staged.grads, strict=True)
        for (slot, version), value, grad in rows:
            staged = grad if compares and not job.releases else None
            self._sums[version.address] = version, slot, value, staged

    def sum_of_squares(self, grad: Tensor) -> float | None:
        """Of a gradient that was measured and is the same; else None."""
        known = self._sums.get(grad.data_ptr())
        if known is None or not grad.numel():
            return None
        version, slot, value, staged = known
        if staged is None:
            return value if version.matches(grad, self._counts[slot]) else None
        # Another slot's gradient may lie at the address by now.
        is_last = version.count == self._counts[slot] and version.is_memory_of(grad)
        return value if is_last and self._has_bits(slot, grad, staged) else None

    def forget_sums(self) -> None:
        """What was measured is of no use any more."""
        self._sums, self._compared = {}, {}


class BackwardOrder:
    """The order of an optimizer's slots.

    Attributes:
        is_known: a backward was seen, and a step after it.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._seen: dict[Slot, None] = {}

    def note(self, slot: Slot) -> None:
        """A slot's complete gradient got ready."""
        self._seen.setdefault(slot)

    def forget(self) -> None:
        """There are other slots."""
        self.is_known, self._seen = False, {}

    def learn(self, slots: Iterable[Slot], parts: Iterable[SlotUpdates]) -> list[Slot] | None:
        """After a step: all slots in the order of the first backward, if that was not known, is
        another than theirs, and may be followed.

        Args:
            parts: the updates of the step.
        """
        if self.is_known or not self._seen:
            return None
        self.is_known = True
        before = list(slots)
        order = list({**self._seen, **dict.fromkeys(before)})
        return None if order == before or any(map(_are_split, parts)) else order


def _are_split(updates: SlotUpdates) -> bool:
    """Whether other ranks, which may see gradients in another order, hold the rest of a
    parameter."""
    layouts = (layout for layout in updates.layouts if layout is not None)
    return any(updates.shard_groups) or any(layout.splits_matrices for layout in layouts)


class SecondLook:
    """Compares the gradients of buckets with what came down of them.

    Args:
        make: makes memory for a bucket's gradients, which is taken when it is first used.
    """

    def __init__(self, transfer: Transfer, make: Callable[[], Staging]) -> None:
        self._transfer = transfer
        self._landings = make(), make()

    def compare(self, steps: Sequence[BucketStep], gradients: Any) -> list[bool]:
        """Whether the gradients of each bucket are, in every bit, what its staging memory has.
        Where they are not, they are put there. The staging memory is the caller's.

        Args:
            gradients: the mark at which they are complete.
        """
        results: list[bool] = []
        coming: list[tuple[Sequence[Tensor], Any]] = []
        for index, step in enumerate(steps):
            for ahead in steps[len(coming) : index + 2]:
                landing, grads = self._landings[len(coming) % 2], ahead.updates.grads
                to = landing.landing_for(grads)
                coming.append((to, landing.download(grads, to, gradients)))
            present, ticket = coming[index]
            self._transfer.wait(ticket)
            results.append(same_bits(present, step.staged.grads))
            step.is_downloaded = results[-1]
            if not step.is_downloaded:
                torch._foreach_copy_(list(step.staged.grads), list(present))
                step.is_downloaded = True
        return results


def same_bits(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether host tensors have the same bits: -0.0 is not 0.0, and a NaN is itself."""
    return all(map(_are_same, some, others))


def _are_same(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    words = _words(one), _words(other)
    if words[0] is not None and words[1] is not None:
        return torch.equal(words[0], words[1])
    integers = _INTEGERS[one.dtype.itemsize]
    return torch.equal(one.detach().view(integers), other.detach().view(integers))


def _words(tensor: Tensor) -> Tensor | None:
    """The same bytes as int64, four times as fast to compare as 16-bit elements; None if they are
    not whole words."""
    first = tensor.storage_offset() * tensor.dtype.itemsize
    if not tensor.is_contiguous() or first % 8 or tensor.nbytes % 8:
        return None
    return tensor.detach().view(-1).view(torch.int64)
