"""What carries a rule out on a device, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.backends.torch_fused import TorchBackend
from mp_optim.update.lists import AdamScalars, LambScalars, SgdScalars, TensorLists

__all__ = ["Backend", "choose_backend"]


class Backend(Protocol):
    """Each method updates every tensor of the lists in place and writes the outputs."""

    name: str

    def adam(self, lists: TensorLists, scalars: AdamScalars, multiplier: float) -> None: ...

    def lamb_moments(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> Tensor:
        """Update the moments; return FP64 (sum p^2, sum u^2) per tensor, shape (n, 2)."""
        ...

    def lamb_apply(self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float]) -> None:
        """Take the step, each tensor with its own ratio (FP32 value)."""
        ...

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: float) -> None: ...

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """FP64, shape (n,)."""
        ...


_REFERENCE = ReferenceBackend()
_BACKENDS: dict[str, Backend] = {"reference": _REFERENCE, "torch": TorchBackend()}


def choose_backend(name: str, device: torch.device) -> tuple[Backend, str]:
    """The backend for ``fused_backend=name`` on a device, and why.

    Raises:
        ValueError: the name is unknown or not available.
    """
    if name == "auto":
        return _REFERENCE, "auto: the bits are the same in every place"
    if name not in _BACKENDS:
        raise ValueError(f"fused_backend={name!r} is not available; choose from {['auto', *_BACKENDS]}")
    return _BACKENDS[name], f"fused_backend={name!r}"
