"""Published weight changes of ranks, applied to a copy of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lab.layout_fuzz.case import Case, Param
from lab.layout_fuzz.model import dtype_of
from lab.published import Receiver
from mp_optim import WeightDelta
from support.deltas import differing


class Published(Receiver):
    """A copy of the whole model, which begins with a full publication.

    Args:
        part: returns the part of a whole tensor that this rank has.
    """

    def __init__(self, case: Case, optimizer: Any, part: Callable[[Param, Tensor], Tensor]) -> None:
        self._optimizer, self._part = optimizer, part
        whole = {
            f"{layer.name}.{param.name}": torch.zeros(param.shape, dtype=dtype_of(case, layer))
            for layer in case.layers
            for param in layer.params
        }
        super().__init__(whole, case.seed)
        optimizer.track_changes()
        self._known = self.publish(full=True)

    def publish(self, full: bool = False) -> set[str]:
        """Publish the changes of all ranks; return the names of the published weights."""
        own = self._optimizer.changed_weights(full=full).to_bytes()
        parts = [own]
        if dist.is_initialized():
            parts = [b""] * dist.get_world_size()
            dist.all_gather_object(parts, own)
        deltas = [WeightDelta.from_bytes(part) for part in parts]
        patches = [patch for delta in deltas for patch in delta.patches]
        for name, whole in self.copies.items():
            mine = [patch for patch in patches if patch.name == name]
            listed = [torch.arange(whole.numel()) if p.indices is None else p.indices for p in mine]
            every = torch.cat(listed) if listed else torch.empty(0)
            assert every.unique().numel() == every.numel(), f"{name} is published twice"
            if full and listed:
                assert every.numel() == whole.numel(), f"{name} is not published whole"
        self.take(deltas)
        return {patch.name for patch in patches}

    def check_params(self, params: Mapping[str, tuple[Param, Tensor]]) -> None:
        """Raise AssertionError if this rank's parameters differ from the copy."""
        for name, (param, now) in params.items():
            if name not in self._known:
                continue  # frozen when buckets were made
            mine, copy = now.detach(), self.copies[name]
            if isinstance(mine, DTensor):
                mine = mine.full_tensor()
            else:
                copy = self._part(param, copy)
            missed = int(differing(mine, copy).sum())
            assert not missed, f"{name}: {missed} of {mine.numel()} changed and were not published"
