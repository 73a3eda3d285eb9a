"""FusedAdam and FusedLAMB, with apex's names and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mp_optim.rules.rule_optimizer import RuleOptimizer


class FusedAdam(RuleOptimizer):
    """Adam over FP32 tensors on any device. Each kernel call updates many tensors in one pass.

    Args:
        params: FP32 parameters, named parameters or param groups.
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: number added to the root of the second moment.
        weight_decay: factor of the weight decay.
        bias_correction: True to correct the bias of both moments.
        adam_w_mode: True for decoupled weight decay; False adds ``weight_decay * p`` to the
            gradient.
        cautious_wd: see ``OptimizerConfig.cautious_wd``.
        backend: see ``OptimizerConfig.fused_backend``.
        **precision: fields of :class:`~mp_optim.kernels.state_format.StatePrecision`, such as
            ``exp_avg_dtype``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        cautious_wd: bool = False,
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        settings = {"betas": betas, "eps": eps, "bias_correction": bias_correction}
        settings |= {"adam_w_mode": adam_w_mode, "cautious_wd": cautious_wd}
        super().__init__("adam", params, lr, weight_decay, backend=backend, **settings, **precision)


class FusedLAMB(RuleOptimizer):
    """LAMB over FP32 tensors on any device, whole or sharded.

    A parameter has one trust ratio, computed on the device that steps the parameter, so no gradient
    or parameter is copied between devices. The ranks that share a parameter reduce one small tensor
    of sums. ``max_grad_norm`` limits the global gradient norm: callers of ``step_slots`` pass this
    norm, and ``step`` computes it over all devices.

    Args:
        params: FP32 parameters, named parameters or param groups.
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: number added to the root of the second moment.
        weight_decay: factor of the weight decay.
        bias_correction: True to correct the bias of both moments.
        adam_w_mode: True for decoupled weight decay; False adds ``weight_decay * p`` to the
            gradient.
        grad_averaging: True to multiply the gradient by ``1 - beta1`` in the first moment.
        max_grad_norm: largest global gradient norm; 0 turns clipping off.
        use_nvlamb: True to adapt the learning rate also if ``weight_decay`` is 0.
        backend: see ``OptimizerConfig.fused_backend``.
        **precision: fields of :class:`~mp_optim.kernels.state_format.StatePrecision`, such as
            ``exp_avg_dtype``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        settings = {"betas": betas, "eps": eps, "bias_correction": bias_correction}
        settings |= {"adam_w_mode": adam_w_mode, "max_grad_norm": max_grad_norm}
        settings |= {"use_nvlamb": use_nvlamb, "grad_averaging": grad_averaging}
        super().__init__("lamb", params, lr, weight_decay, backend=backend, **settings, **precision)
