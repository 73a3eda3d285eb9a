"""Published weight changes, applied to a copy of the weights and to a copy of their codes."""

from __future__ import annotations

import torch

from lab.any_program.subject import Subject
from mp_optim import WeightDelta, apply_delta
from mp_optim.apps.deltas import DeltaQuantizer, quantized_weights
from support.deltas import differing

__all__ = ["Published"]


class Published:
    """A copy of a subject's weights.

    Attributes:
        subject: the owner of the tracked changes.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        subject.optimizer.track_changes()
        self._after: tuple[str, ...] | None = None
        params = self._params()
        self._copies = {name: param.detach().clone() for name, param in params.items()}
        self._matrices = [name for name, param in params.items() if param.ndim == 2]
        self._quantizer = DeltaQuantizer("fp8_row", "|".join(self._matrices))
        self._codes: dict[str, torch.Tensor] | None = self._quantized(params)

    def _params(self) -> dict[str, torch.Tensor]:
        named = {id(param): name for name, param in self.subject.params()}
        groups = self.subject.optimizer.param_groups
        return {named[id(param)]: param for group in groups for param in group["params"]}

    def _quantized(self, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Return copies of codes, or None if a value is not finite and has no code."""
        if not self._matrices or not all(params[n].isfinite().all() for n in self._matrices):
            return None
        found = quantized_weights(params, "fp8_row", "|".join(self._matrices))
        return {name: tensor.clone() for name, tensor in found.items()}

    def take(self, full: bool) -> None:
        delta = WeightDelta.from_bytes(self.subject.optimizer.changed_weights(full=full).to_bytes())
        params = self._params()
        for name, param in params.items():  # of groups that were added
            self._copies.setdefault(name, torch.zeros_like(param))
        after, self._after = self._after, apply_delta(self._copies, delta, self._after)
        for name, param in params.items():
            missed = int(differing(param.detach(), self._copies[name]).sum())
            assert not missed, f"{name}: {missed} of {param.numel()} changed and were not published"
        self._take_codes(delta, after, params)

    def _take_codes(
        self, delta: WeightDelta, after: tuple[str, ...] | None, params: dict[str, torch.Tensor]
    ) -> None:
        expected = self._quantized(params)
        if expected is None or (self._codes is None and not delta.is_full):
            self._codes = None  # Only a full publication begins a new series.
            return
        held = self._codes or {}
        for name, tensor in expected.items():
            held.setdefault(name, torch.zeros_like(tensor))
        self._codes = held
        apply_delta(held, self._quantizer.quantize(delta, params), after)
        for name, tensor in expected.items():
            missed = int(differing(tensor, held[name]).sum())
            assert not missed, f"{name}: {missed} codes changed and were not published"
