"""Check that benchmarks of the host measure its compiled kernels."""

from __future__ import annotations

import torch

from mp_optim.kernels import choose_backend, proof_of


def require_kernels() -> None:
    """Check that ``fused_backend="auto"`` takes the compiled kernels. Otherwise a benchmark would
    time torch operations.

    Raises:
        SystemExit: another backend is chosen; the message has its name and the reason.
    """
    host = torch.device("cpu")
    chosen, _ = choose_backend("auto", host)
    if chosen.name != "native":
        raise SystemExit(
            f"nothing was measured: fused_backend='auto' takes {chosen.name!r} on this host, not "
            f"the compiled kernels ({proof_of('native', host).reason}). Build them with "
            "'pip install -e .', which needs a C++ compiler, and leave MP_OPTIM_NATIVE unset"
        )
