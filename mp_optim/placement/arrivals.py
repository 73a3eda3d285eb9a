"""What was seen of gradients as they got ready in backward, by which early work is judged: is a
gradient still the one that work was begun with?"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from mp_optim.placement.backward_jobs import BackwardJob
from mp_optim.placement.grad_hooks import GradVersion
from mp_optim.placement.second_look import same_bits
from mp_optim.slots import Slot, SlotUpdates


class Arrivals:
    """Counts gradients by slot, and remembers what was measured of them in this backward."""

    def __init__(self) -> None:
        self._counts: Counter[Slot] = Counter()
        self._uncounted: set[Slot] = set()
        self._sums: dict[int, tuple[GradVersion, Slot, float, Tensor | None]] = {}
        self._compared: dict[Slot, bool] = {}

    def note(self, slot: Slot, writes_are_counted: bool) -> None:
        """A gradient got ready; ``writes_are_counted`` by torch, so that its version tells."""
        count = self._uncounted.discard if writes_are_counted else self._uncounted.add
        count(slot)
        self._counts[slot] += 1

    def is_uncounted(self, slot: Slot) -> bool:
        """Whether torch does not count all writes to a slot's last gradient."""
        return slot in self._uncounted

    @property
    def any_uncounted(self) -> bool:
        return bool(self._uncounted)

    # -- versions ---------------------------------------------------------------------------------

    def versions(
        self, updates: SlotUpdates, with_bits: bool = False
    ) -> dict[Slot, GradVersion]:
        """The gradients of some updates as they are now; see :meth:`GradVersion.of`."""
        return {
            slot: GradVersion.of(
                grad, self._counts[slot], slot not in self._uncounted, with_bits
            )
            for slot, grad in zip(updates.slots, updates.grads, strict=True)
        }

    def is_fresh(self, job: BackwardJob, updates: SlotUpdates) -> bool:
        """Whether a job was given just these gradients, as they are now."""
        return tuple(job.versions) == tuple(updates.slots) and all(
            version.matches(grad, self._counts[slot])
            for (slot, version), grad in zip(
                job.versions.items(), updates.grads, strict=True
            )
        )

    def is_complete(self, job: BackwardJob, updates: SlotUpdates) -> bool:
        """Whether a job was given a gradient of each of these, and no other got ready since."""
        return tuple(job.versions) == tuple(updates.slots) and all(
            version.count == self._counts[slot]
            for slot, version in job.versions.items()
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
        if job is None or job.result is None:
            return
        rows = zip(job.versions.items(), job.result.sums, job.staged.grads, strict=True)
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
