"""Deviations between results of two backends, in units of their tolerances."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mp_optim.kernels.kernel_args import TensorLists

_BFLOAT16_UNIT = 2.0**-7
MOST_ULPS, MOST_LR = 4.0, 1e-4
"""Largest deviation of a usable backend's parameters after two steps: ulps, plus units of lr."""

MOST_RELATIVE = 1e-4
"""Largest relative deviation of moments and sums of squares."""


@dataclass
class Deviation:
    """Largest deviations found so far: of parameters in two units, of other tensors relative to
    their largest value."""

    ulps: float = 0.0
    lrs: float = 0.0
    relative: float = 0.0
    excess: float = 0.0
    same: bool = True

    def lists(
        self, ours: TensorLists, theirs: TensorLists, lr: float, allowed: float | None = None
    ) -> None:
        """Compare the tensors of two lists.

        Args:
            lr: unit of parameter deviations.
            allowed: relative tolerance of moments; default :data:`MOST_RELATIVE`.
        """
        for main, expected in zip(ours.main, theirs.main, strict=True):
            self.params(main, expected, lr)
        for output, other in zip(ours.output, theirs.output, strict=True):
            if output is not None and other is not None:
                self.others(output, other, _BFLOAT16_UNIT)
        for key, tensors in ours.state.items():
            for tensor, other in zip(tensors, theirs.state[key], strict=True):
                self.others(tensor, other, allowed or MOST_RELATIVE)

    def params(self, ours: Tensor, theirs: Tensor, lr: float) -> None:
        """Compare parameters."""
        apart = self._apart(ours, theirs)
        if apart is None:
            return
        top = float(theirs.double().abs().nan_to_num().max())
        unit = 2.0 ** (math.floor(math.log2(max(top, lr))) - 23)
        self.ulps, self.lrs = max(self.ulps, apart / unit), max(self.lrs, apart / lr)
        self.excess = max(self.excess, apart / (MOST_ULPS * unit + MOST_LR * lr))

    def others(self, ours: Tensor, theirs: Tensor, allowed: float = MOST_RELATIVE) -> None:
        """Compare moments, outputs or sums."""
        apart = self._apart(ours, theirs)
        if apart is None:
            return
        apart /= max(float(theirs.double().abs().max()), 1e-30)
        self.relative = max(self.relative, apart)
        self.excess = max(self.excess, apart / allowed)

    def _apart(self, ours: Tensor, theirs: Tensor) -> float | None:
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.itemsize]
        is_same = ours.dtype == theirs.dtype and torch.equal(ours.view(bits), theirs.view(bits))
        self.same &= is_same
        if is_same or not ours.numel():
            return None
        found = float((ours.double() - theirs.double()).abs().max())
        return math.inf if math.isnan(found) else found

    @property
    def tolerable(self) -> bool:
        """True if every deviation is within its tolerance."""
        return self.excess <= 1.0
