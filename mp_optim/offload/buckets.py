"""Host memory of each ``offload_mode``: which host slots travel together, and how many bytes of
staging and back buffers that takes; and which parameters are offloaded. Plans, made of sizes alone.

A bucket holds gradients and parameters in the model's dtype, each tensor rounded up to 64 bytes.
``most`` is ``OptimizerConfig.offload_bucket_bytes``; one larger parameter is a bucket by itself.

================  =======================  ==================================  =====================
``offload_mode``  bytes of a bucket        staging                             back buffer
================  =======================  ==================================  =====================
``sync``          at most ``most``         the largest bucket; with            none
                                           ``overlap_cpu_optimizer_d2h_h2d``
                                           three times that, or all buckets
                                           if there are no more than three
``overlap``       a sixteenth of all, at   all buckets                         none
                  least 4 MiB, at most
                  ``most``
``speculative``   as ``overlap``           all buckets                         main params and
                                                                               moments once more
================  =======================  ==================================  =====================

With ``sync`` a model in host memory has no staging: its gradients and parameters are read and
written in place. A plan on the meta device is for an accelerator and counts the staging.

What is stepped in windows has no staging with ``sync``. In the other modes it has staging of all
buckets, for gradients alone: on the host with ``optimizer_state_path`` (with ``speculative``, for
parameters, too), and streamed with ``release_gradients``. Windows of a file take host memory,
:func:`~mp_optim.offload.state_storage.windows_held` of them; the spare of ``speculative`` is in the
file then. A model in host memory does without gradients there that nothing releases.

Decided here: :func:`plan_staging` cuts buckets and sizes staging, :func:`back_buffer_bytes` sizes
the back buffer. The run allocates just that (:class:`~mp_optim.offload.host_part.HostPart`,
:class:`~mp_optim.offload.double_buffer.DoubleBuffer`). The planner (``factory/memory_plan.py``)
builds
the same stack on the meta device, and reads :class:`HostBytes` from ``HostPart.host_bytes()``.
``tests/unit/offload/test_host_bytes.py`` and ``test_combinations.py`` count what a run allocates
and compare.
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
"""Staging bytes below which a bucket's fixed costs show."""

PER_ROUND = 16
"""Buckets a model is cut into, unless they were smaller than :data:`SMALLEST` or larger than
allowed: the last one arrives with the end of backward and is the one that cannot be hidden."""


class HostBytes(NamedTuple):
    """Host memory beside main params and state: the bytes of each piece that a stepper will ask
    for, with gradients in the model's dtype. Wider gradients let staging grow in the first step.

    Attributes:
        staging: for gradients and parameters on their way.
        back_mains, back_state: of the back buffer, for main params and for the rest.
        moments, remainders, averages: of streamed slots, whose state lies in memory that copies
            read.
        windows: of state that is kept on a disk.
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
    """Bytes of a file that state is kept in: whole blocks for each tensor."""

    main_params: int = 0
    moments: int = 0
    averages: int = 0


@dataclass(frozen=True)
class HostSlot:
    """A slot of the host's optimizer, and what is expected to travel for it: a gradient and a
    parameter of the model's dtype.

    Attributes:
        share: elements per rank that holds a part of it, the same number on every rank.
        numel: elements of this rank.
        stays: its main param is the model's parameter, on the device.
    """

    slot: Slot
    share: int
    numel: int
    dtype: torch.dtype
    stays: bool = False


def plan_staging(
    mode: str, slots: Sequence[HostSlot], most: int, pipelined: bool, has_outputs: bool = True
) -> tuple[list[tuple[Slot, ...]], list[int]]:
    """The buckets of a mode, and the bytes of each piece of its staging memory.

    Args:
        slots: in the order in which their gradients are expected.
        most: staging bytes per bucket.
        pipelined: ``overlap_cpu_optimizer_d2h_h2d``.
        has_outputs: parameters are staged, too.
    """
    # ranks that reduce together get the same numbers, so they cut the same buckets
    shared = [2 * slot.share * slot.dtype.itemsize for slot in slots]
    bucket_bytes = most if mode == "sync" else fitting_bucket_bytes(sum(shared), most)
    buckets = plan_buckets([slot.slot for slot in slots], shared, bucket_bytes)
    tensors, taken = 2 if has_outputs else 1, {}
    for slot in slots:
        taken[slot.slot] = tensors * aligned_bytes(slot.numel, slot.dtype)
    needed = [sum(map(taken.__getitem__, bucket)) for bucket in buckets]
    # In step, one bucket comes down, one is stepped, one goes up; backward brings all down.
    in_step = 3 if pipelined else 1
    if mode == "sync" and len(needed) > in_step:  # a ring of pieces that each hold the largest
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
    """Staging bytes per bucket for ``total`` of them: small enough to start early, large enough to
    be worth it."""
    return max(1, min(most, max(SMALLEST, -(-total // PER_ROUND))))


def back_buffer_bytes(tensors: Iterable[Tensor]) -> int:
    """Host memory that as much again takes as these main params, or this state, have."""
    return sum(aligned_bytes(tensor.numel(), tensor.dtype) for tensor in tensors)


def plan_offload(sizes: Sequence[int], fraction: float) -> frozenset[int]:
    """Choose whole parameters that together hold at least ``fraction`` of all elements.

    The policy, in order: parameters are considered from the last to the first, because backward
    produces their gradients in that order and the host can start earliest on them; one that would
    overshoot is passed over; what is still missing at the end is covered by the smallest parameter
    left, and what that made unnecessary is dropped again, largest first. So the fraction is always
    reached, and the same sizes always give the same plan.

    Args:
        sizes: elements of each parameter, in slot order.
        fraction: between 0 (nothing) and 1 (everything that has elements).

    Returns:
        Indices into ``sizes``.

    Raises:
        ValueError: if ``fraction`` is outside [0, 1].
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
