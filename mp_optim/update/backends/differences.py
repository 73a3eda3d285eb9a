"""How far what a backend computes is from ``reference``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mp_optim.update.kernel_args import TensorLists

MOST_ULPS, MOST_LR = 4.0, 1e-4
"""How far a usable backend's parameters may be from reference's after the two steps: ulps, plus
units of lr."""

MOST_RELATIVE = 1e-4
"""The same for moments and sums of squares, relative to the largest."""


@dataclass
class Difference:
    """Largest differences found so far: parameters in two units, and everything else relative to
    its largest value."""

    ulps: float = 0.0
    lrs: float = 0.0
    relative: float = 0.0
    excess: float = 0.0
    same: bool = True

    def params(self, ours: Tensor, theirs: Tensor, lr: float) -> None:
        """Compare parameters."""
        self.same &= _same(ours, theirs)
        if not ours.numel():
            return
        apart, top = (
            _largest((ours.double() - theirs.double()).abs()),
            float(theirs.double().abs().nan_to_num().max()),
        )
        unit = 2.0 ** (math.floor(math.log2(max(top, lr))) - 23)
        self.ulps, self.lrs = max(self.ulps, apart / unit), max(self.lrs, apart / lr)
        self.excess = max(self.excess, apart / (MOST_ULPS * unit + MOST_LR * lr))

    def others(
        self, ours: Tensor, theirs: Tensor, allowed: float = MOST_RELATIVE
    ) -> None:
        """Compare moments, outputs or sums."""
        self.same &= _same(ours, theirs)
        if ours.numel():
            top = max(float(theirs.double().abs().max()), 1e-30)
            found = _largest((ours.double() - theirs.double()).abs()) / top
            self.relative = max(self.relative, found)
            self.excess = max(self.excess, found / allowed)

    @property
    def tolerable(self) -> bool:
        """Whether everything is within the tolerances."""
        return self.excess <= 1.0


def _same(a: Tensor, b: Tensor) -> bool:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def _largest(values: Tensor) -> float:
    found = float(values.max())
    return math.inf if math.isnan(found) else found


def difference(
    ours: TensorLists, theirs: TensorLists, lr: float, found: Difference
) -> None:
    """Add what two sets of lists differ in."""
    for index, main in enumerate(ours.main):
        found.params(main, theirs.main[index], lr)
        output, other = ours.output[index], theirs.output[index]
        if output is not None and other is not None:
            found.others(output, other, 2.0**-7)  # one unit of bfloat16
        for key, tensors in ours.state.items():
            found.others(tensors[index], theirs.state[key][index])
