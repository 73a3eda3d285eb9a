"""Benchmarks of the host are about its compiled kernels."""

from __future__ import annotations

import torch

from mp_optim.kernels import choose_backend, proof_of


def require_kernels() -> None:
    """End the program where ``fused_backend="auto"`` would not step the host with the compiled
    kernels: its times would be those of torch operations.

    Raises:
        SystemExit: naming what is chosen instead, and why.
    """
    host = torch.device("cpu")
    chosen, _ = choose_backend("auto", host)
    if chosen.name != "native":
        raise SystemExit(
            f"nothing was measured: fused_backend='auto' takes {chosen.name!r} on this host, not "
            f"the compiled kernels ({proof_of('native', host).reason}). Build them with "
            "'pip install -e .', which needs a C++ compiler, and leave MP_OPTIM_NATIVE unset"
        )
