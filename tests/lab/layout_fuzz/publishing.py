"""Published weight changes of ranks, applied to a copy of the whole model and of its codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lab.layout_fuzz.case import Case, Param
from lab.layout_fuzz.model import dtype_of
from mp_optim import WeightDelta, apply_delta
from mp_optim.apps.deltas import DeltaQuantizer, quantized_weights
from support.deltas import differing

__all__ = ["Published"]


class Published:
    """A copy of the whole model, which begins with a full publication.

    Args:
        part: returns the part of a whole tensor that this rank has.
    """

    def __init__(self, case: Case, optimizer: Any, part: Callable[[Param, Tensor], Tensor]) -> None:
        self._optimizer, self._part = optimizer, part
        self.whole = {
            f"{layer.name}.{param.name}": torch.zeros(param.shape, dtype=dtype_of(case, layer))
            for layer in case.layers
            for param in layer.params
        }
        self._matrices = [name for name, whole in self.whole.items() if whole.ndim == 2]
        self._quantizer = DeltaQuantizer("fp8_block", "|".join(self._matrices))
        self._codes = self._quantized()
        self._codes_after: tuple[str, ...] | None = None
        optimizer.track_changes()
        self._after: tuple[str, ...] | None = None
        self._known = self.take(full=True)

    def _quantized(self) -> dict[str, Tensor]:
        if not self._matrices:
            return {}
        found = quantized_weights(self.whole, "fp8_block", "|".join(self._matrices))
        return {name: tensor.clone() for name, tensor in found.items()}

    def take(self, full: bool = False) -> set[str]:
        own = self._optimizer.changed_weights(full=full).to_bytes()
        parts = [own]
        if dist.is_initialized():
            parts = [b""] * dist.get_world_size()
            dist.all_gather_object(parts, own)
        deltas = [WeightDelta.from_bytes(part) for part in parts]
        patches = [patch for delta in deltas for patch in delta.patches]
        for name, whole in self.whole.items():
            mine = [patch for patch in patches if patch.name == name]
            listed = [torch.arange(whole.numel()) if p.indices is None else p.indices for p in mine]
            every = torch.cat(listed) if listed else torch.empty(0)
            assert every.unique().numel() == every.numel(), f"{name} is published twice"
            if full and listed:
                assert every.numel() == whole.numel(), f"{name} is not published whole"
        self._after = apply_delta(self.whole, deltas, self._after)
        if self._matrices:
            codes = self._quantizer.quantize(deltas, self.whole)
            self._codes_after = apply_delta(self._codes, codes, self._codes_after)
        for name, expected in self._quantized().items():
            missed = int(differing(expected, self._codes[name]).sum())
            assert not missed, f"{name}: {missed} codes changed and were not published"
        return {patch.name for patch in patches}

    def check(self, params: Mapping[str, tuple[Param, Tensor]]) -> None:
        for name, (param, now) in params.items():
            if name not in self._known:
                continue  # frozen when buckets were made
            mine, copy = now.detach(), self.whole[name]
            if isinstance(mine, DTensor):
                mine = mine.full_tensor()
            else:
                copy = self._part(param, copy)
            missed = int(differing(mine, copy).sum())
            assert not missed, f"{name}: {missed} of {mine.numel()} changed and were not published"
