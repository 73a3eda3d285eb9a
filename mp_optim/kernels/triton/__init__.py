"""Loader of the Triton backend, for a GPU or Triton's interpreter.

Triton is imported when the backend is first used.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mp_optim.kernels.triton.backend import TritonBackend

__all__ = ["triton_backend"]


@cache
def triton_backend() -> tuple[TritonBackend | None, str]:
    """Return the backend and the device on which it runs; or None and the reason why it is missing.

    The result is cached for the process.
    """
    try:
        from mp_optim.kernels.triton.backend import TritonBackend

        backend = TritonBackend()
    # A broken installation can raise any error, which must not prevent the use of other backends.
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return backend, backend.runs_on
