"""Loader of the Triton backend, for a GPU or Triton's interpreter. Triton is imported at its first
use."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mp_optim.kernels.triton.backend import TritonBackend

__all__ = ["triton_backend"]


@cache
def triton_backend() -> tuple[TritonBackend | None, str]:
    """Return the backend and its device; or None and the reason. The result never changes in a
    process."""
    try:
        from mp_optim.kernels.triton.backend import TritonBackend

        backend = TritonBackend()
    except (
        Exception
    ) as error:  # A broken installation can raise any error, and must not affect other backends.
        return None, f"{type(error).__name__}: {error}"
    return backend, backend.runs_on
