"""Megatron's wrappers with Megatron's arguments: its config, its grad scaler, any optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim import precision
from mp_optim.config import OptimizerConfig
from mp_optim.distributed import composite
from mp_optim.megatron.config import config_from_megatron
from mp_optim.megatron.face import MegatronFace
from mp_optim.placement import hybrid
from mp_optim.precision import MegatronGradScaler, MegatronOptimizer
from mp_optim.slots import iter_slots
from mp_optim.update import FusedAdam


def grad_scaler_from_megatron(scaler: Any) -> MegatronGradScaler | None:
    """Our grad scaler from one of Megatron's (or ours, as it is), with what it counts.

    Raises:
        TypeError: it is neither constant nor dynamic.
    """
    if scaler is None or isinstance(scaler, MegatronGradScaler):
        return scaler
    scale, device = float(scaler.scale), scaler.scale.device
    if type(scaler).__name__ == "ConstantGradScaler":
        return precision.ConstantGradScaler(scale, device)
    if type(scaler).__name__ != "DynamicGradScaler":
        raise TypeError(
            f"grad_scaler is a {type(scaler).__name__}: give a ConstantGradScaler or a "
            "DynamicGradScaler"
        )
    ours = precision.DynamicGradScaler(
        scale,
        float(scaler.min_scale),
        growth_factor=float(scaler.growth_factor),
        backoff_factor=float(scaler.backoff_factor),
        growth_interval=scaler.growth_interval,
        hysteresis=scaler.hysteresis,
        device=device,
    )
    ours.load_state_dict(scaler.state_dict())
    return ours


def _stack_over(
    wrapper: Callable[..., MegatronOptimizer],
    optimizer: torch.optim.Optimizer | None,
    config: Any,
    grad_scaler: Any = None,
) -> MegatronOptimizer:
    """One optimizer over the model's parameters, wrapped.

    Args:
        optimizer: any torch optimizer; None on a rank that has nothing to step.
        config: Megatron's ``OptimizerConfig``, or ours.
    """
    if optimizer is None:
        optimizer = FusedAdam([{"params": []}], lr=0.0)
    if getattr(config, "lr", None) is None and not isinstance(config, OptimizerConfig):
        # the rate is the optimizer's where the config leaves it open
        config = dataclasses.replace(config, lr=float(optimizer.param_groups[0]["lr"] or 0.0))
    scaler = grad_scaler_from_megatron(grad_scaler)
    return wrapper(optimizer, config_from_megatron(config), scaler)


class Float16OptimizerWithFloat16Params(MegatronFace):
    """See :class:`mp_optim.Float16OptimizerWithFloat16Params`.

    Args:
        optimizer, config: of :func:`_stack_over`.
        init_state_fn: kept for those who ask for it; state is allocated here.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Callable[..., Any] | None = None,
    ) -> None:
        wrapper = precision.Float16OptimizerWithFloat16Params
        super().__init__(_stack_over(wrapper, optimizer, config, grad_scaler))
        self.init_state_fn = init_state_fn


class FP32Optimizer(MegatronFace):
    """See :class:`mp_optim.FP32Optimizer`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: Any,
        init_state_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(_stack_over(precision.FP32Optimizer, optimizer, config))
        self.init_state_fn = init_state_fn


class ChainedOptimizer(MegatronFace):
    """See :class:`mp_optim.ChainedOptimizer`; without members, one that has nothing to step.

    Args:
        chained_optimizers: what the wrappers here or :func:`get_megatron_optimizer` made.

    Raises:
        TypeError: one is another's.
    """

    def __init__(self, chained_optimizers: Sequence[Any]) -> None:
        members: list[MegatronOptimizer] = []
        for member in chained_optimizers:
            if not isinstance(member, MegatronFace):
                raise TypeError(
                    f"chained_optimizers holds a {type(member).__name__}: wrap it in a "
                    "Float16OptimizerWithFloat16Params or an FP32Optimizer of mp_optim.megatron"
                )
            members += member.stack.chained_optimizers
        if not members:
            nothing = FusedAdam([{"params": []}], lr=0.0)
            members = [precision.FP32Optimizer(nothing, OptimizerConfig(lr=0.0))]
        super().__init__(composite.ChainedOptimizer(members))


class HybridDeviceOptimizer(hybrid.HybridDeviceOptimizer):
    """See :class:`mp_optim.HybridDeviceOptimizer`; with what Megatron's callers ask of theirs."""

    @property
    def param_to_fp32_param(self) -> dict[Tensor, Tensor]:
        """The FP32 copy of each parameter that has one."""
        copies: dict[Tensor, Tensor] = {}
        for slot, param in iter_slots(self.param_groups):
            main = self.main_param(slot)
            if main is not param and param.dtype != torch.float32:
                copies[param] = main
        return copies

    def dummy_step(self) -> None:
        """Allocate all state; nothing is stepped."""
        self.init_state()

    def update_fp32_param_by_new_param(self) -> None:
        """Nothing to do: copies follow what is written into the parameters."""
