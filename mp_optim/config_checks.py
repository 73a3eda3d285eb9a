"""What a config may hold: types, choices, ranges, and fields that do something only in company."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from mp_optim.capabilities import BACKENDS, OPTIMIZERS, refusal
from mp_optim.muon_settings import (
    COEFFICIENT_TYPES,
    MATMUL_PRECISIONS,
    SCALAR_OPTIMIZERS,
    SCALE_MODES,
    TP_MODES,
    coefficients,
)

if TYPE_CHECKING:
    from mp_optim.config import OptimizerConfig

__all__ = ["check_config", "nearest"]

OFFLOAD_MODES = ("sync", "overlap", "speculative")


def check_config(config: OptimizerConfig) -> None:
    """Raise if a value is out of range, contradictory or without effect.

    Raises:
        ValueError: naming field and value.
    """
    for check in (_check_types, _check_choices, _check_ranges, _check_precision, _check_graph, _check_inert):
        check(config)


def nearest(name: str, known: list[str]) -> str:
    """A question whether the most similar of the known names was meant; empty if none is similar."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean {found[0]!r}?" if found else ""


def _fail(config: OptimizerConfig, name: str, rule: str) -> None:
    raise ValueError(f"{name}={getattr(config, name)!r}: {rule}")


_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "str": (str,), "int": (int, float), "float": (int, float),
    "float | None": (int, float, type(None)), "float | str": (int, float, str), "int | None": (int, float, type(None)),
}
"""Annotations whose values are checked, and what they take."""


def _check_types(config: OptimizerConfig) -> None:
    for spec in fields(config):
        kinds, value = _KINDS.get(str(spec.type)), getattr(config, spec.name)
        if kinds is None or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
            continue
        _fail(config, spec.name, f"must be a {spec.type}, not a {type(value).__name__}")


_CHOICES = {"optimizer": OPTIMIZERS, "fused_backend": BACKENDS,
            "offload_mode": OFFLOAD_MODES, "grad_reduce_op": ("avg", "sum"),
            "data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads"), "muon_scale_mode": SCALE_MODES,
            "muon_fp32_matmul_prec": MATMUL_PRECISIONS, "muon_coefficient_type": COEFFICIENT_TYPES,
            "muon_tp_mode": TP_MODES, "muon_scalar_optimizer": SCALAR_OPTIMIZERS}
_NOT_HERE = {("muon_fp32_matmul_prec", "high"): "; TF32 is not to be had on the host",
             ("muon_tp_mode", "distributed"): "; it adds up products in an order that depends on the ranks"}
"""Choices of Megatron's that are not supported, and why."""


def _check_choices(config: OptimizerConfig) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        if value not in choices:
            why = _NOT_HERE.get((name, value)) or nearest(str(value), list(choices))
            _fail(config, name, f"must be one of {list(choices)}{why}")


def _check_ranges(config: OptimizerConfig) -> None:
    for name in ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"):
        value = getattr(config, name)
        if value is not None and not 0.0 <= value < math.inf:
            _fail(config, name, "must be a finite number >= 0")
    for low, high in (("min_lr", "lr"), ("decoupled_min_lr", "decoupled_lr")):
        floor, top = getattr(config, low), getattr(config, high)
        if floor is not None and top is not None and floor > top:
            _fail(config, low, f"must not exceed {high}={top!r}")
    for name in ("weight_decay", "adam_eps", "sgd_momentum", "clip_grad"):
        if not 0.0 <= getattr(config, name) < math.inf:
            _fail(config, name, "must be a finite number >= 0")
    for name in ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2", "muon_momentum"):
        if not 0.0 <= getattr(config, name) < 1.0:
            _fail(config, name, "must be in [0, 1)")
    if config.host_threads is not None and (config.host_threads < 1 or int(config.host_threads) != config.host_threads):
        _fail(config, "host_threads", "must be a whole number >= 1")
    if config.bucket_size is not None and (config.bucket_size < 1 or int(config.bucket_size) != config.bucket_size):
        _fail(config, "bucket_size", "must be a whole number of elements >= 1")
    if getattr(config, "optimizer_cuda_graph", False) and config.is_distributed:
        _fail(config, "optimizer_cuda_graph", "a step that reduces over data-parallel ranks is not captured; set it to "
              "False, or use_distributed_optimizer=False")
    if (config.optimizer == "muon" and config.is_distributed and not config.use_layer_wise_distributed_optimizer
            and config.data_parallel_sharding_strategy != "no_shard"):
        _fail(config, "use_distributed_optimizer", "muon needs whole matrices; set "
              "use_layer_wise_distributed_optimizer=True")
    if config.use_layer_wise_distributed_optimizer and config.data_parallel_sharding_strategy == "no_shard":
        _fail(config, "data_parallel_sharding_strategy", "contradicts use_layer_wise_distributed_optimizer=True")
    if config.host_cores is not None and (not config.host_cores or not all(isinstance(core, int) and core >= 0
                                                                      for core in config.host_cores)):
        _fail(config, "host_cores", "must name at least one core")
    if not 0.0 < config.muon_extra_scale_factor < math.inf:
        _fail(config, "muon_extra_scale_factor", "must be a finite number > 0")
    try:
        coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
    except ValueError as error:
        raise ValueError(f"muon_{error}") from None
    if not config.grad_norm_skip_threshold > 0.0:
        _fail(config, "grad_norm_skip_threshold", "must be > 0 (inf: never skip)")
    if config.gpu_memory is not None and config.gpu_memory < 1:
        _fail(config, "gpu_memory", "must be a number of bytes >= 1")
    fraction = config.optimizer_offload_fraction
    if fraction != "auto" and (isinstance(fraction, str) or not 0.0 <= fraction <= 1.0):
        _fail(config, "optimizer_offload_fraction", "must be between 0 and 1, or 'auto'")


_MOMENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
_STATE_DTYPES = {"main_grads_dtype": (torch.float32,), "main_params_dtype": (torch.float32,),
                 "exp_avg_dtype": _MOMENT_DTYPES, "exp_avg_sq_dtype": _MOMENT_DTYPES}


def _check_precision(config: OptimizerConfig) -> None:
    if config.fp16 and config.bf16:
        raise ValueError("fp16=True and bf16=True: set the one that matches the model's dtype")
    half = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else torch.float32
    if config.params_dtype not in (half, torch.float32):
        _fail(config, "params_dtype", f"contradicts fp16={config.fp16!r}, bf16={config.bf16!r}; set the flag that "
              "matches the model")
    for name, choices in _STATE_DTYPES.items():
        value = getattr(config, name)
        if value not in choices:
            _fail(config, name, f"must be one of {list(choices)} in this version")
    moments = [dtype for dtype in (config.exp_avg_dtype, config.exp_avg_sq_dtype) if isinstance(dtype, torch.dtype)]
    refused = refusal(config.fused_backend, config.elementwise_rule, moments,
                      config.param_remainder_bits if config.keeps_remainders else None, config.stochastic_rounding)
    if refused is not None:
        _fail(config, *refused)
    if config.param_remainder_bits not in (8, 16):
        _fail(config, "param_remainder_bits", "must be 16 or 8")
    if not 0 <= config.stochastic_rounding_seed < 2**32:
        _fail(config, "stochastic_rounding_seed", "must be in [0, 2**32)")
    for name in ("loss_scale_window", "hysteresis"):
        value = getattr(config, name)
        if value < 1 or int(value) != value:
            _fail(config, name, "must be a whole number of steps >= 1")
    for name in ("initial_loss_scale", "min_loss_scale", "loss_scale"):
        value = getattr(config, name)
        if value is not None and not 0.0 < value <= 2.0**126:
            _fail(config, name, "must be positive and at most 2**126")
    if config.min_loss_scale > config.initial_loss_scale:
        _fail(config, "min_loss_scale", f"must not exceed initial_loss_scale={config.initial_loss_scale!r}")


_DISTRIBUTED: tuple[str, Callable[[OptimizerConfig], bool]] = (
    "use_distributed_optimizer=True", lambda c: c.is_distributed)

_NEEDS: dict[str, tuple[str, Callable[[OptimizerConfig], bool]]] = {
    "optimizer_offload_fraction": ("optimizer_cpu_offload=True", lambda c: c.optimizer_cpu_offload),
    "overlap_cpu_optimizer_d2h_h2d": ("optimizer_cpu_offload=True", lambda c: c.optimizer_cpu_offload),
    "offload_mode": ("optimizer_cpu_offload=True and optimizer_offload_fraction > 0",
                     lambda c: c.may_offload),
    "gpu_memory": ("optimizer_offload_fraction='auto'", lambda c: c.optimizer_offload_fraction == "auto"),
    "pin_cpu_grads": ("optimizer_cpu_offload=True", lambda c: c.optimizer_cpu_offload),
    "pin_cpu_params": ("optimizer_cpu_offload=True", lambda c: c.optimizer_cpu_offload),
    "loss_scale": ("fp16=True", lambda c: c.fp16),
    "initial_loss_scale": ("fp16=True without loss_scale", lambda c: c.fp16 and c.loss_scale is None),
    "min_loss_scale": ("fp16=True without loss_scale", lambda c: c.fp16 and c.loss_scale is None),
    "loss_scale_window": ("fp16=True without loss_scale", lambda c: c.fp16 and c.loss_scale is None),
    "hysteresis": ("fp16=True without loss_scale", lambda c: c.fp16 and c.loss_scale is None),
    "adam_beta1": ("optimizer='adam' or 'lamb', or muon with adam", lambda c: c.elementwise_rule in ("adam", "lamb")),
    "adam_beta2": ("optimizer='adam' or 'lamb', or muon with adam", lambda c: c.elementwise_rule in ("adam", "lamb")),
    "adam_eps": ("optimizer='adam' or 'lamb', or muon with adam", lambda c: c.elementwise_rule in ("adam", "lamb")),
    "decoupled_weight_decay": ("optimizer='adam' or 'lamb'", lambda c: c.optimizer in ("adam", "lamb")),
    "lion_beta1": ("optimizer='lion', or muon with lion", lambda c: c.elementwise_rule == "lion"),
    "lion_beta2": ("optimizer='lion', or muon with lion", lambda c: c.elementwise_rule == "lion"),
    "sgd_momentum": ("optimizer='sgd'", lambda c: c.optimizer == "sgd"),
    "lamb_use_nvlamb": ("optimizer='lamb'", lambda c: c.optimizer == "lamb"),
    "lamb_grad_averaging": ("optimizer='lamb'", lambda c: c.optimizer == "lamb"),
    "decoupled_min_lr": ("decoupled_lr", lambda c: c.decoupled_lr is not None),
    "exp_avg_dtype": ("use_precision_aware_optimizer=True", lambda c: c.use_precision_aware_optimizer),
    "exp_avg_sq_dtype": ("use_precision_aware_optimizer=True and optimizer='adam' or 'lamb'",
                         lambda c: c.use_precision_aware_optimizer and c.elementwise_rule in ("adam", "lamb")),
    "store_param_remainders": ("use_precision_aware_optimizer=True", lambda c: c.use_precision_aware_optimizer),
    "param_remainder_bits": ("use_precision_aware_optimizer=True, store_param_remainders=True and bf16=True",
                             lambda c: c.keeps_remainders),
    "stochastic_rounding": ("use_precision_aware_optimizer=True and bfloat16 or 8-bit state",
                            lambda c: c.use_precision_aware_optimizer and (c.param_remainder_bits == 8 or not {
                                c.exp_avg_dtype, c.exp_avg_sq_dtype}.isdisjoint({torch.bfloat16, torch.uint8}))),
    "stochastic_rounding_seed": ("stochastic_rounding=True", lambda c: c.stochastic_rounding),
    "data_parallel_sharding_strategy": _DISTRIBUTED,
    "overlap_grad_reduce": _DISTRIBUTED,
    "overlap_param_gather": ("use_distributed_optimizer=True and data_parallel_sharding_strategy='optim' or "
                             "'optim_grads'",
                             lambda c: c.is_distributed and c.data_parallel_sharding_strategy != "no_shard"),
    "grad_reduce_in_fp32": _DISTRIBUTED,
    "grad_reduce_op": _DISTRIBUTED,
    "reduce_scatter_with_fp32_accumulation": _DISTRIBUTED,
    "bucket_size": ("use_distributed_optimizer=True without use_layer_wise_distributed_optimizer",
                    lambda c: c.is_distributed and not c.use_layer_wise_distributed_optimizer),
    "barrier_with_L1_time": ("timers", lambda c: c.timers is not None),
    **{name: ("optimizer='muon'", lambda c: c.optimizer == "muon") for name in (
        "muon_momentum", "muon_use_nesterov", "muon_split_qkv", "muon_scale_mode", "muon_extra_scale_factor",
        "muon_fp32_matmul_prec", "muon_num_ns_steps", "muon_coefficient_type", "muon_tp_mode",
        "muon_scalar_optimizer")},
}
"""Fields that do something only in company: what they need, and whether a config has it."""


def _check_graph(config: OptimizerConfig) -> None:
    if not config.optimizer_cuda_graph:
        return
    if config.optimizer == "muon":
        _fail(config, "optimizer_cuda_graph", "muon's step is not captured; set optimizer_cuda_graph=False")
    if config.fused_backend not in ("auto", "triton"):
        _fail(config, "optimizer_cuda_graph", f"steps by fused_backend={config.fused_backend!r} cannot be captured; "
              "choose 'triton' or 'auto', or set optimizer_cuda_graph=False")
    if config.may_offload:
        _fail(config, "optimizer_cuda_graph", "a host part cannot be captured; set optimizer_cpu_offload=False, or "
              "optimizer_cuda_graph=False")
    if config.timers is not None:
        _fail(config, "optimizer_cuda_graph", "timers have nothing to be called between in a graph; set timers=None, "
              "or optimizer_cuda_graph=False")


def _check_inert(config: OptimizerConfig) -> None:
    defaults = {field.name: field.default for field in fields(config)}
    for name, (needed, has) in _NEEDS.items():
        if getattr(config, name) != defaults[name] and not has(config):
            _fail(config, name, f"has no effect without {needed}; set that, or leave it at {defaults[name]!r}")
