"""Published weight changes, applied to a copy of the weights and to a copy of their codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mp_optim import WeightDelta, apply_delta
from mp_optim.apps.deltas import DeltaQuantizer, quantized_weights
from support.deltas import differing

FORMS = ("fp8_block", "fp8_row", "nvfp4")


class Receiver:
    """Copies of weights and of their codes, which publications keep up to date.

    Args:
        copies: weights by name, which publications overwrite.
        number: chooses one of ``FORMS``.
    """

    def __init__(self, copies: dict[str, Tensor], number: int) -> None:
        self.copies, self._form = copies, FORMS[number % len(FORMS)]
        self._after: tuple[str, ...] | None = None
        self._codes_after: tuple[str, ...] | None = None
        columns = 16 if self._form == "nvfp4" else 1
        matrices = [name for name, copy in copies.items() if copy.ndim == 2]
        self._names = [name for name in matrices if copies[name].shape[1] % columns == 0]
        self._quantizer = DeltaQuantizer(self._form, "|".join(self._names))
        self._codes = self._quantized()

    def _quantized(self) -> dict[str, Tensor] | None:
        """Return codes of the copies, or None if a value is not finite and has no code."""
        if not self._names or not all(self.copies[name].isfinite().all() for name in self._names):
            return None
        found = quantized_weights(self.copies, self._form, "|".join(self._names))
        return {name: tensor.clone() for name, tensor in found.items()}

    def take(self, parts: Sequence[WeightDelta]) -> None:
        """Apply the parts of a publication to the copies, and compare the codes that the quantizer
        publishes with codes of the published values."""
        self._after = apply_delta(self.copies, parts, self._after)
        expected = self._quantized()
        if expected is None or (self._codes is None and not parts[0].is_full):
            self._codes = self._codes_after = None  # Only a full publication begins a new series.
            return
        held = self._codes or {}
        for name, tensor in expected.items():
            held.setdefault(name, torch.zeros_like(tensor))
        self._codes = held
        codes = self._quantizer.quantize(parts, self.copies)
        self._codes_after = apply_delta(held, codes, self._codes_after)
        for name, tensor in expected.items():
            missed = int(differing(tensor, held[name]).sum())
            assert not missed, f"{name}: {missed} codes changed and were not published"
