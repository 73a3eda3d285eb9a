"""StableAdamW's steps of single parameters, formed on the device: ``update/stable_steps.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mp_optim.update.backends.triton.launcher import DECAY_RATE, RATE
from mp_optim.update.stable_steps import NOT_CLIPPED
from mp_optim.update.sums import root

_LIMIT = 9
"""Where the limit lies in a launch's numbers."""


def clipped_steps(
    sums: Tensor, counts: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """FP32 ``step_size`` and ``decay`` of each parameter, shape (n, 2), and which are clipped.

    Args:
        sums: as :meth:`~mp_optim.update.backends.interface.Backend.stable_adamw_sums` gives them.
        counts: elements of whole parameters.
        numbers: of the launch.
    """
    rate = numbers[RATE : RATE + 2].view(torch.float64)
    decay_rate = numbers[DECAY_RATE : DECAY_RATE + 2].view(torch.float64)
    limit = numbers[_LIMIT : _LIMIT + 1].view(torch.float32).double()
    high, low, nans = sums.unbind(1)
    high, low = high + (low >> 31), low & 0x7FFFFFFF
    value = (high.double() * 2.0**31 + low.double()) * (limit * 2.0**-52)
    mean = torch.where(nans == 0, value, math.nan) / counts.clamp(min=1).double()
    clip = torch.where(mean <= NOT_CLIPPED, 1.0, root(mean))
    return torch.stack([rate / clip, decay_rate / clip], 1).float(), clip != 1.0
