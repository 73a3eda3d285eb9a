"""Host memory of offloaded slots, by purpose: planned bytes, allocated bytes, growth beyond a plan.

The plan is made of the forms of main params and state, and of gradients in the model's dtypes. It
has nothing that a background save or the system's huge pages add.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor

from mp_optim.core import Slot
from mp_optim.core.slot_state import STEP
from mp_optim.host.host_memory import is_on_host
from mp_optim.offload.host_part import HostPart
from mp_optim.offload.streaming import held_forms
from mp_optim.rules.rule_executor import RuleExecutor

STAGING, BACK, WINDOWS, STATE = "staging", "back buffers", "windows", "main params and state"
GROWN_BY = 1 / 50
"""Share of a plan by which an allocation may exceed it before a warning."""
_SMALL = 1 << 20
"""Bytes by which any allocation may exceed its plan, for alignment of tensors and blocks."""
_CAUSES = {STAGING: "gradients are wider than the model's dtype, or some stay after their release"}


class MemoryUse:
    """Planned and allocated bytes of a host part, and the purposes whose growth was reported.

    Args:
        part: the offloaded slots.
    """

    def __init__(self, part: HostPart) -> None:
        self._part = part
        self._reported: set[str] = set()
        self._state: tuple[object, int] = (None, 0)
        self._is_complete = False

    def planned(self) -> dict[str, int]:
        """Return the planned bytes by purpose, with state that is not allocated yet."""
        part = self._part
        held = part.host_bytes()
        staging = 0 if part.buckets is None else part.buckets.planned
        return {STAGING: staging, BACK: held.back, WINDOWS: sum(held.windows), STATE: self._forms()}

    def allocated(self) -> dict[str, int]:
        """Return the allocated bytes by purpose."""
        part = self._part
        pieces = () if part.buckets is None else part.buckets.staging
        windows = 0 if part.pipeline is None else part.pipeline.allocated_bytes
        return {
            STAGING: sum(piece.allocated for piece in pieces),
            BACK: 0 if part.speculation is None else part.speculation.allocated_bytes,
            WINDOWS: windows,
            STATE: self._state[1] if self._is_complete else self._tensors(),
        }

    def metrics(self) -> dict[str, float]:
        """Return ``planned_host_bytes`` and ``resident_host_bytes``. Warn once of each purpose that
        takes more than it was planned with."""
        planned, allocated = self.planned(), self.allocated()
        for purpose in planned.keys() - self._reported:
            more = allocated[purpose] - planned[purpose]
            if more > planned[purpose] * GROWN_BY + _SMALL:
                self._reported.add(purpose)
                warnings.warn(_growth(purpose, planned[purpose], allocated[purpose]), stacklevel=5)
        # No tensor of state has another size later, so its tensors are not added up again.
        self._is_complete = planned[STATE] == allocated[STATE] == self._state[1]
        return {
            "planned_host_bytes": sum(planned.values()),
            "resident_host_bytes": sum(allocated.values()),
        }

    def _forms(self) -> int:
        """Return the bytes of main params and state in host memory, also of later state."""
        part = self._part
        if part.settings.state_file is not None:
            return 0
        if not isinstance(executor := part.executor, RuleExecutor):
            return self._tensors()
        if self._state[0] is not part.slots:  # the slots have changed since
            forms = (form for slot in part.slots for form in held_forms(executor, slot).values())
            self._state = part.slots, sum(size.numel() * dtype.itemsize for size, dtype in forms)
            self._is_complete = False
        return self._state[1]

    def _tensors(self) -> int:
        """Return the bytes of main params and state that are in host memory now."""
        part, size = self._part, 0
        if part.settings.state_file is not None:
            return 0
        for slot in part.slots:
            tensors = list(self._state_of(slot.slot))
            if not slot.is_stepped_in_place:
                tensors.append(part.executor.stepped(slot.slot))
            size += sum(each.nbytes for each in tensors if is_on_host(each))
        return size

    def _state_of(self, slot: Slot) -> Iterable[Tensor]:
        """Return the state tensors of a slot; allocate none."""
        executor = self._part.executor
        if isinstance(executor, RuleExecutor):
            state = executor.rows.groups[slot.group].slots[slot.position]
            return [value for key, value in state.items() if key != STEP]
        return executor.state_of(slot).live().values()


def _growth(purpose: str, planned: int, allocated: int) -> str:
    cause = f" ({_CAUSES[purpose]})" if purpose in _CAUSES else ""
    return (
        f"host memory of {purpose}: {allocated:,} bytes are allocated, {planned:,} were "
        f"planned{cause}; leave room for them, or lower offload_bucket_bytes or the offload "
        "fraction"
    )
