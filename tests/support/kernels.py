"""Which tests need the native kernels."""

from __future__ import annotations

from typing import Any

import pytest

from mp_optim.kernels.native_library import native_library

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
