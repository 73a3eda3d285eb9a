"""Whether two tensors have the same values."""

from __future__ import annotations

import torch
from torch import Tensor


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one device have the same shape and values. A NaN is the same as any
    other, where ``torch.equal`` says that nothing is."""
    if torch.equal(one, other):
        return True
    if one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
