"""What carries a rule out on a device, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mp_optim.update.backends.native import NativeBackend
from mp_optim.update.backends.native_library import native_library
from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.backends.torch_fused import TorchBackend
from mp_optim.update.backends.triton import triton_backend
from mp_optim.update.lists import AdamScalars, LambScalars, LionScalars, SgdScalars, TensorLists

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

    def lion(self, lists: TensorLists, scalars: LionScalars, multiplier: float) -> None: ...

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: float) -> None: ...

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """FP64, shape (n,)."""
        ...


_SAME_BITS = "auto: the bits are the same in every place"
_BACKENDS: dict[str, Backend] = {"reference": ReferenceBackend(), "torch": TorchBackend()}
if native_library().handle is not None:
    _BACKENDS["native"] = NativeBackend(native_library())


def choose_backend(name: str, device: torch.device) -> tuple[Backend, str]:
    """The backend for ``fused_backend=name`` on a device, and why.

    ``auto`` and ``native`` take the native kernels on the host, and elsewhere ``reference``, which has their bits;
    ``triton`` takes what ``auto`` does where its kernels cannot run.

    Raises:
        ValueError: the name is unknown or not available.
    """
    on_host = device.type == "cpu"
    if name == "triton":
        return _triton(device)
    if name == "auto":
        if on_host and "native" in _BACKENDS:
            return _BACKENDS["native"], f"{_SAME_BITS}; {native_library().level}"
        missing = f"; no native kernels: {native_library().why}" if on_host and "native" not in _BACKENDS else ""
        return _BACKENDS["reference"], _SAME_BITS + missing
    if name == "native" and name not in _BACKENDS:
        raise ValueError(f"fused_backend='native' is not available: {native_library().why}; choose 'auto'")
    if name not in _BACKENDS:
        raise ValueError(f"fused_backend={name!r} is not available; choose from {['auto', *_BACKENDS, 'triton']}")
    if name == "native" and not on_host:
        return _BACKENDS["reference"], "native kernels run on the host; this has the same bits"
    return _BACKENDS[name], f"fused_backend={name!r}"


def _triton(device: torch.device) -> tuple[Backend, str]:
    backend, why = triton_backend()
    if backend is None:
        raise ValueError(f"fused_backend='triton' is not available: {why}; choose 'auto'")
    if device.type == backend.device_type:
        return backend, f"fused_backend='triton'; {why}"
    other, _ = choose_backend("auto", device)
    return other, f"{why} does not run on {device.type}; {other.name} has the same bits"
