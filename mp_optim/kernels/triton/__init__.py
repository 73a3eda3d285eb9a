"""The rules by Triton kernels, on a GPU or under Triton's interpreter; nothing here imports Triton
until asked to."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mp_optim.kernels.triton.backend import TritonBackend

__all__ = ["triton_backend"]


@cache
def triton_backend() -> tuple[TritonBackend | None, str]:
    """Return the backend and its device; or None and the reason. The answer is final for this
    process."""
    try:
        from mp_optim.kernels.triton.backend import TritonBackend

        backend = TritonBackend()
    except (
        Exception
    ) as error:  # a broken installation raises anything; the other backends must go on
        return None, f"{type(error).__name__}: {error}"
    return backend, backend.runs_on
