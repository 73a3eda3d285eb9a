"""What was seen of gradients as they got ready in backward, by which early work is judged: is a
gradient still the one that work was begun with?"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from mp_optim.placement.backward_jobs import BackwardJob
from mp_optim.placement.grad_hooks import GradVersion
from mp_optim.slots import Slot, SlotUpdates


class Arrivals:
    """Counts gradients by slot, and remembers what was measured of them in this backward."""

    def __init__(self) -> None:
        self._counts: Counter[Slot] = Counter()
        self._uncounted: set[Slot] = set()
        self._sums: dict[int, tuple[GradVersion, Slot, float]] = {}

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

    def versions(self, updates: SlotUpdates) -> dict[Slot, GradVersion]:
        """The gradients of some updates as they are now."""
        return {
            slot: GradVersion.of(grad, self._counts[slot], slot not in self._uncounted)
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

    # -- sums of squares --------------------------------------------------------------------------

    def measured(self, job: BackwardJob | None) -> None:
        """Remember what a job measured, if it did."""
        if job is None or job.result is None:
            return
        for (slot, version), value in zip(
            job.versions.items(), job.result.sums, strict=True
        ):
            self._sums[version.address] = version, slot, value

    def sum_of_squares(self, grad: Tensor) -> float | None:
        """Of a gradient that was measured and is the same; else None."""
        version, slot, value = self._sums.get(grad.data_ptr(), (None, None, None))
        if version is None or slot is None or not grad.numel():
            return None
        return value if version.matches(grad, self._counts[slot]) else None

    def forget_sums(self) -> None:
        """What was measured is of no use any more."""
        self._sums = {}
