"""This package's kernels and steps, which compete with :mod:`benchmarks.opponents`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.opponents import BETAS, CLIP, DECAY, EPS, LR, SETTINGS
from benchmarks.section import Step
from mp_optim import FusedAdam, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from mp_optim.core import Slot, SlotUpdate, SlotUpdates
from mp_optim.kernels.native_library import set_host_threads

OURS = "mp_optim"
ADAM_BYTES = 28
"""FP32 p, m, v read and written; two-byte gradient read, two-byte param written."""
STEP_BYTES = 30
"""Bytes of :data:`ADAM_BYTES`, and the gradient read once more for its norm."""


def _kind(moments: str, remainder_bits: int | None) -> dict[str, Any]:
    mains = (
        {"store_param_remainders": False}
        if remainder_bits is None
        else {"param_remainder_bits": remainder_bits}
    )
    return {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
        **mains,
    }


KINDS: dict[str, dict[str, Any]] = {
    "FP32 moments": {},
    "FP32 moments, 16-bit remainder": _kind("float32", 16),
    "bf16 moments": _kind("bfloat16", None),
    "bf16 moments, 16-bit remainder": _kind("bfloat16", 16),
    "fp16 moments, 16-bit remainder": _kind("float16", 16),
    "8-bit moments, 16-bit remainder": _kind("uint8", 16),
    "8-bit moments, 8-bit remainder": _kind("uint8", 8),
}
"""Forms of optimizer state. Main params without a remainder are FP32. The others are compared with
the first form."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    set_host_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        set_host_threads(None)


def our_kernel(
    mains: list[Tensor],
    grads: list[Tensor],
    outputs: list[Tensor] | None,
    backend: str = "auto",
    **settings: Any,
) -> Step:
    """Return the update alone.

    Raises:
        RuntimeError: another backend than the named one would take the step.
    """
    optimizer = FusedAdam(mains, **SETTINGS, backend=backend, **settings)
    found = optimizer.executor.backend_for(mains[0].device)[0].name
    if backend not in ("auto", found):
        raise RuntimeError(f"stepped by {found}")
    updates = SlotUpdates.of(
        [
            SlotUpdate(Slot(0, index), grad, 0.5, None if outputs is None else outputs[index])
            for index, grad in enumerate(grads)
        ]
    )
    return lambda: optimizer.step_slots(updates)


def our_optimizer(params: list[Tensor], grads: list[Tensor], **settings: Any) -> MegatronOptimizer:
    """Return our whole mixed-precision optimizer, clipping on. FP32 gradients of 16-bit params are
    in ``main_grad``."""
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}[params[0].dtype]
    scale = {"loss_scale": 1.0} if half == "fp16" else {}
    config = OptimizerConfig(
        lr=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        weight_decay=DECAY,
        clip_grad=CLIP,
        **{half: True},
        **scale,
        **settings,
    )
    model = nn.ParameterList([nn.Parameter(param) for param in params])
    optimizer = get_megatron_optimizer(config, model, config_overrides={})
    for param, grad in zip(model, grads, strict=True):
        setattr(param, "grad" if grad.dtype == param.dtype else "main_grad", grad)
    return optimizer
