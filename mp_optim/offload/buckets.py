"""Plans of host memory for each ``offload_mode``, from sizes alone: the buckets of slots, the bytes
of staging and back buffers, and the parameters to offload.

A bucket holds gradients and parameters in the model's dtype, each tensor rounded up to 64 bytes.
``most`` is ``OptimizerConfig.offload_bucket_bytes``; a parameter larger than that is a bucket by
itself.

- ``sync``: buckets of at most ``most`` bytes. Staging is the largest bucket; with
  ``overlap_cpu_optimizer_d2h_h2d`` three times that, or all buckets if there are at most three. No
  back buffer.
- ``overlap``: buckets of a sixteenth of all bytes, at least 4 MiB and at most ``most``. Staging is
  all buckets. No back buffer.
- ``speculative``: buckets and staging as with ``overlap``. The back buffer has main params and
  moments once more.

With ``sync`` a model in host memory has no staging: a step reads and writes its gradients and
parameters in place. A plan on the meta device is for an accelerator and counts the staging.

Slots in windows have no staging with ``sync``. In the other modes they have staging for the
gradients of all buckets: on the host with ``optimizer_state_path``, and streamed with
``release_gradients``. They have no back buffer. Windows of a file take host memory,
:func:`~mp_optim.offload.state_storage.windows_held` of them. A model in host memory has no staging
for gradients that are not released.

:func:`plan_staging` cuts buckets and sizes staging, :func:`back_buffer_bytes` sizes the back
buffer. A run allocates the same bytes (:class:`~mp_optim.offload.host_part.HostPart`,
:class:`~mp_optim.offload.double_buffer.DoubleBuffer`). The planner (``factory/memory_plan.py``)
builds the same stack on the meta device, and reads :class:`HostBytes` from
``HostPart.host_bytes()``. ``tests/unit/offload/test_host_bytes.py`` and ``test_combinations.py``
compare both with the allocations of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.core import Slot
from mp_optim.host.host_memory import aligned_bytes

SMALLEST = 4 << 20
"""Staging bytes below which a bucket's fixed costs dominate."""

PER_ROUND = 16
"""Number of buckets of a model, within the limits of size. The last bucket arrives with the end of
backward and cannot be hidden."""


class HostBytes(NamedTuple):
    """Bytes of each piece of host memory that a stepper allocates in addition to main params and
    state, with gradients in the model's dtype. Staging grows in the first step if gradients are
    wider.

    Attributes:
        staging: pieces for gradients and parameters that are copied.
        back_mains: pieces of the back buffer for main params.
        back_state: pieces of the back buffer for state.
        moments: pieces for moments of streamed slots, in memory that copies read.
        remainders: pieces for remainders of streamed slots.
        averages: pieces for averages of streamed slots.
        windows: pieces for windows of state on a disk.
    """

    staging: tuple[int, ...]
    back_mains: tuple[int, ...] = ()
    back_state: tuple[int, ...] = ()
    moments: tuple[int, ...] = ()
    remainders: tuple[int, ...] = ()
    averages: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()

    @property
    def back(self) -> int:
        """Bytes of the back buffer."""
        return sum(self.back_mains) + sum(self.back_state)


class DiskBytes(NamedTuple):
    """Bytes of the state file: whole blocks for each tensor."""

    main_params: int = 0
    moments: int = 0
    averages: int = 0


@dataclass(frozen=True)
class HostSlot:
    """An offloaded slot, and the sizes of its gradient and parameter in the model's dtype.

    Attributes:
        slot: the slot.
        share: elements on each rank that holds a part, the same number on every rank.
        numel: elements of this rank.
        dtype: dtype of the gradient and the parameter.
        is_stepped_in_place: True if the main param is the model's parameter, on the device.
    """

    slot: Slot
    share: int
    numel: int
    dtype: torch.dtype
    is_stepped_in_place: bool = False


def plan_staging(
    mode: str, slots: Sequence[HostSlot], most: int, pipelined: bool, has_outputs: bool = True
) -> tuple[list[tuple[Slot, ...]], list[int]]:
    """Return the buckets of a mode, and the bytes of each piece of its staging memory.

    Args:
        mode: the ``offload_mode``.
        slots: in the order in which their gradients are expected.
        most: largest staging bytes of a bucket.
        pipelined: ``overlap_cpu_optimizer_d2h_h2d``.
        has_outputs: True if parameters are staged, too.
    """
    # ranks that reduce together have the same sizes, so their buckets are equal
    shared = [2 * slot.share * slot.dtype.itemsize for slot in slots]
    bucket_bytes = most if mode == "sync" else fitting_bucket_bytes(sum(shared), most)
    buckets = plan_buckets([slot.slot for slot in slots], shared, bucket_bytes)
    tensors, taken = 2 if has_outputs else 1, {}
    for slot in slots:
        taken[slot.slot] = tensors * aligned_bytes(slot.numel, slot.dtype)
    needed = [sum(map(taken.__getitem__, bucket)) for bucket in buckets]
    # In a step one bucket is copied down, one is stepped and one is copied up. Backward copies all
    # down.
    in_step = 3 if pipelined else 1
    if mode == "sync" and len(needed) > in_step:  # a ring of pieces of the largest size
        needed = [max(needed)] * in_step
    return buckets, needed


def plan_buckets(
    slots: Sequence[Slot], sizes: Sequence[int], bucket_bytes: int
) -> list[tuple[Slot, ...]]:
    """Cut slots into buckets of at most ``bucket_bytes``; a larger slot is a bucket by itself.

    Args:
        slots: in the order in which their gradients are expected.
        sizes: staging bytes of each. Ranks that reduce together pass the same numbers and cut the
            same buckets.
    """
    buckets: list[list[Slot]] = []
    filled = 0
    for slot, size in zip(slots, sizes, strict=True):
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(slot)
        filled += size
    return list(map(tuple, buckets))


def fitting_bucket_bytes(total: int, most: int) -> int:
    """Return the staging bytes of a bucket for a total: small enough to start early, large enough
    to be worth the fixed costs."""
    return max(1, min(most, max(SMALLEST, -(-total // PER_ROUND))))


def back_buffer_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of a back buffer for these main params, or this state."""
    return sum(aligned_bytes(tensor.numel(), tensor.dtype) for tensor in tensors)


def plan_offload(sizes: Sequence[int], fraction: float) -> frozenset[int]:
    """Choose whole parameters that together hold at least ``fraction`` of all elements.

    Parameters are considered from the last to the first, because backward produces their gradients
    in that order. A parameter that would overshoot is skipped. The smallest parameter left covers
    the remainder. Parameters that became unnecessary by that are dropped again, largest first. So
    the fraction is always reached, and equal sizes give equal plans.

    Args:
        sizes: elements of each parameter, in slot order.
        fraction: between 0 (nothing) and 1 (every parameter that has elements).

    Returns:
        Indices into ``sizes``.

    Raises:
        ValueError: ``fraction`` is outside [0, 1].
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"offload_fraction={fraction!r}: must be between 0 and 1")
    missing = math.ceil(fraction * sum(sizes))
    chosen: set[int] = set()
    for index in reversed(range(len(sizes))):
        if 0 < sizes[index] <= missing:
            chosen.add(index)
            missing -= sizes[index]
    if missing > 0:
        left = [index for index in range(len(sizes)) if index not in chosen and sizes[index] > 0]
        chosen.add(min(left, key=lambda index: (sizes[index], -index)))
    excess = sum(sizes[index] for index in chosen) - math.ceil(fraction * sum(sizes))
    for index in sorted(chosen, key=lambda index: (-sizes[index], index)):
        if sizes[index] <= excess:
            chosen.remove(index)
            excess -= sizes[index]
    return frozenset(chosen)
