"""Skip tests of kernels if their package is missing; fail if an installed package does not work."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from mp_optim.kernels import proof_of
from mp_optim.kernels.native_library import native_library

_PACKAGES = {"apex": "amp_C", "transformer_engine": "transformer_engine", "triton": "triton"}

NEED_KERNELS = [
    pytest.mark.native,
    pytest.mark.skipif(
        native_library().handle is None, reason=f"no native kernels: {native_library().why}"
    ),
]


def needs_kernels(test: Any) -> Any:
    for mark in NEED_KERNELS:
        test = mark(test)
    return test


def require_usable(name: str, device: torch.device) -> None:
    """Skip if the package of a backend is not installed; fail if it is installed and unusable.

    A skip would hide a broken kernel.
    """
    proof = proof_of(name, device)
    package = _PACKAGES.get(name)
    if not proof.usable and package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert proof.usable, f"{name} on {device}: {proof.reason}"
