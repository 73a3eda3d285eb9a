"""What one backend call of a step is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.slots import CachedTensorList, Multiplier, SlotUpdates
from mp_optim.update.kernel_args import TensorLists

Shared = tuple[torch.device, torch.dtype, float, Multiplier, tuple[str, ...]]
"""What updates of one group have in common that go into one backend call: device, dtype, count of
steps, multiplier, and keys of the moments and of their scales."""


class PlannedLaunch(NamedTuple):
    """One backend call of a step, with all that its result depends on.

    Attributes:
        group, positions: the slots. settings: of their group. updates: their updates.
        device, step, multiplier: what these have in common.
        mains, outputs: what is stepped and written; ``lists`` holds copies of those that are not
            contiguous.
        lists: what the backend is handed.
        firsts: where each tensor begins in what the rank has of its parameter; empty if all of them
            are all of it.
    """

    group: int
    positions: list[int]
    settings: dict[str, Any]
    device: torch.device
    step: float
    multiplier: Multiplier
    updates: SlotUpdates
    mains: CachedTensorList
    outputs: Sequence[Tensor | None]
    lists: TensorLists
    firsts: Sequence[int] = ()

    def copy_back(self) -> None:
        """Give what is not contiguous the values of the copies that were stepped."""
        for tensors, stepped in ((self.mains, self.lists.main), (self.outputs, self.lists.output)):
            if tensors is stepped:
                continue
            for tensor, copy in zip(tensors, stepped, strict=True):
                if tensor is not None and copy is not None and tensor is not copy:
                    tensor.copy_(copy)


def contiguous(tensors: CachedTensorList) -> CachedTensorList:
    """The list itself if every tensor in it is contiguous, else one that is."""
    if tensors.contiguous:
        return tensors
    return CachedTensorList(tensor.contiguous() for tensor in tensors)


def contiguous_outputs(outputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The list itself if every tensor in it is contiguous, else one with copies of those that are
    not: a step that the device skips leaves them as they are."""
    if isinstance(outputs, CachedTensorList) and outputs.contiguous:
        return outputs
    if all(map(Tensor.is_contiguous, [output for output in outputs if output is not None])):
        return outputs
    return [None if output is None else output.contiguous() for output in outputs]
