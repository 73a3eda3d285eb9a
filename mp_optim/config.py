"""OptimizerConfig: what to build, in Megatron's names.

A field exists only if setting it changes something; a setting that would be ignored raises.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from mp_optim.capabilities import BACKENDS, RULES, refusal

__all__ = ["AdamOptimizerConfig", "OptimizerConfig", "SGDOptimizerConfig"]

DTYPE_FIELDS = ("params_dtype", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@dataclass(kw_only=True)
class OptimizerConfig:
    """Everything :func:`mp_optim.get_megatron_optimizer` needs to know besides the model.

    Raises:
        TypeError: an unknown field, naming the nearest one.
        ValueError: a value out of range, contradictory or without effect, naming field and value.
    """

    optimizer: str = "adam"
    """The rule: adam (AdamW unless decoupled_weight_decay is off), sgd, lamb or lion."""
    lr: float | None = None
    """Learning rate; the max_lr of every param group. Required."""
    min_lr: float | None = None
    """Floor of the schedule."""
    decoupled_lr: float | None = None
    """Learning rate of embedding and output parameters."""
    decoupled_min_lr: float | None = None
    """Schedule floor of embedding and output parameters."""
    weight_decay: float = 0.01
    """Weight decay; biases and 1-D parameters get none by the standard overrides."""
    apply_wd_to_qk_layernorm: bool = False
    """Decay query and key layernorm weights, although they are 1-D."""
    fp16: bool = False
    """Model parameters are float16: FP32 main params and a loss scale."""
    bf16: bool = False
    """Model parameters are bfloat16: FP32 main params."""
    params_dtype: torch.dtype | str = torch.float32
    """Dtype of the model's parameters, a torch dtype or its name. float32 stands for what fp16 and bf16 say."""
    use_precision_aware_optimizer: bool = False
    """Keep optimizer state in the dtypes below, on the host too."""
    main_grads_dtype: torch.dtype | str = torch.float32
    """Gradients are read in the dtype they have and widened to this one in registers: float32."""
    main_params_dtype: torch.dtype | str = torch.float32
    """Dtype of the main params: float32."""
    exp_avg_dtype: torch.dtype | str = torch.float32
    """Dtype of the first moment, or sgd's momentum: float32, bfloat16, float16 (with a scale for each block of 256),
    or uint8 (8-bit codes with a scale for each block of 256)."""
    exp_avg_sq_dtype: torch.dtype | str = torch.float32
    """Dtype of the second moment; the same choices."""
    store_param_remainders: bool = True
    """With ``use_precision_aware_optimizer``, keep of a bfloat16 parameter's FP32 main param only what the parameter
    itself does not say: 2 bytes instead of 4, and the same bits."""
    param_remainder_bits: int = 16
    """Bits of a remainder: 16 for all of FP32, 8 for its upper 24 bits."""
    stochastic_rounding: bool = False
    """Round bfloat16 and 8-bit state stochastically; reproducible for any placement and number of threads."""
    stochastic_rounding_seed: int = 0
    """Seed of the random bits."""
    loss_scale: float | None = None
    """Constant loss scale for fp16; dynamic if not given."""
    initial_loss_scale: float = 2.0**32
    """Where the dynamic loss scale starts."""
    min_loss_scale: float = 1.0
    """Floor of the dynamic loss scale."""
    loss_scale_window: int = 1000
    """Clean steps in a row before the loss scale doubles."""
    hysteresis: int = 2
    """Overflows in a row before the loss scale halves."""
    adam_beta1: float = 0.9
    """Decay of the first moment (adam, lamb)."""
    adam_beta2: float = 0.999
    """Decay of the second moment (adam, lamb)."""
    adam_eps: float = 1e-8
    """Added to the denominator (adam, lamb)."""
    decoupled_weight_decay: bool = True
    """Decay the parameter (AdamW) rather than adding to the gradient."""
    sgd_momentum: float = 0.9
    """Momentum of sgd."""
    lion_beta1: float = 0.95
    """Weight of the momentum in the blend whose sign is the step (lion)."""
    lion_beta2: float = 0.98
    """Decay of the momentum (lion)."""
    lamb_use_nvlamb: bool = False
    """LAMB adapts the learning rate also where weight decay is 0."""
    lamb_grad_averaging: bool = True
    """LAMB weighs the gradient with 1 - beta1 in the first moment."""
    clip_grad: float = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""
    grad_norm_skip_threshold: float = math.inf
    """Skip steps whose gradient norm is larger."""
    log_num_zeros_in_grad: bool = False
    """Count zero gradient elements (one more read of every gradient)."""
    optimizer_cpu_offload: bool = False
    """Keep and step part of the optimizer on the host."""
    optimizer_offload_fraction: float = 0.0
    """Share of parameter elements that are stepped on the host, 0 to 1."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Overlap transfers in both directions with the host's arithmetic."""
    pin_cpu_grads: bool = True
    """Page-lock the staging memory for gradients and parameters."""
    pin_cpu_params: bool = True
    """Page-lock main params on the host."""
    use_distributed_optimizer: bool = False
    """Reduce gradients over the data-parallel ranks, and keep main params and state only for an owned share (ZeRO)."""
    data_parallel_sharding_strategy: str = "optim"
    """What data-parallel ranks share out: optim (main params and state: ZeRO-1), optim_grads (gradients too: ZeRO-2),
    or no_shard (nothing: every rank steps everything, with the same bits)."""
    use_layer_wise_distributed_optimizer: bool = False
    """Share out whole parameters, balanced by size, for rules that need whole matrices."""
    overlap_grad_reduce: bool = False
    """Reduce each bucket of gradients while backward computes the others."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward; each module waits for its own."""
    grad_reduce_in_fp32: bool = False
    """Add up and send gradients in FP32 rather than in the parameter's dtype."""
    grad_reduce_op: str = "avg"
    """What becomes of the ranks' gradients: avg, or sum (for losses divided by the number of tokens of all ranks)."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """Send 16-bit gradients as they are but add them in FP32, in the order of ranks, rounding once; always so where
    the backend is not NCCL."""
    bucket_size: int | None = None
    """Elements after which a bucket of parameters is closed; by default 40 M, or 1 M for each rank if that is more."""
    fused_backend: str = "auto"
    """What carries the rule out: auto (the fastest that has the bits of ``reference``), native (on the host),
    reference, torch, triton, apex or transformer_engine (their own bits; see docs/numerics.md)."""
    host_threads: int | None = None
    """Threads of the native host kernels, for the whole process; by default ``torch.get_num_threads()``."""
    host_cores: tuple[int, ...] | None = None
    """Cores that the native kernels' threads are pinned to, in turn, for the whole process."""
    timers: Callable[..., Any] | None = None
    """Megatron's timers: ``timers(name, log_level=1)`` has ``start(barrier=)`` and ``stop()``; called around the
    measuring (``optimizer-clip-main-grad``) and the stepping (``optimizer-inner-step``)."""
    barrier_with_L1_time: bool = False
    """Timers wait for all ranks before they start."""

    def __post_init__(self) -> None:
        for name in DTYPE_FIELDS:
            setattr(self, name, _as_dtype(name, getattr(self, name)))
        self.check()

    def check(self) -> None:
        """Raise if a value is out of range, contradictory or without effect; done at construction, and again by
        :func:`mp_optim.get_megatron_optimizer` for fields set since."""
        for check in (_check_types, _check_choices, _check_ranges, _check_precision, _check_inert):
            check(self)

    @property
    def is_distributed(self) -> bool:
        """Whether gradients are reduced, and state shared out, over data-parallel ranks."""
        return self.use_distributed_optimizer or self.use_layer_wise_distributed_optimizer

    @property
    def keeps_remainders(self) -> bool:
        """Whether bfloat16 parameters are stepped as they are, beside their remainders."""
        return self.use_precision_aware_optimizer and self.store_param_remainders and self.bf16

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> OptimizerConfig:
        """A config from plain data, such as a YAML mapping."""
        return cls(**settings)


AdamOptimizerConfig = SGDOptimizerConfig = OptimizerConfig

_generated_init = OptimizerConfig.__init__


def _init(self: OptimizerConfig, **settings: Any) -> None:
    known = [field.name for field in fields(OptimizerConfig)]
    for name in settings:
        if name not in known:
            reason = _elsewhere(name)
            raise TypeError(f"OptimizerConfig has no field {name!r}{reason or _nearest(name, known)}")
    if settings.get("optimizer_cpu_offload") and "optimizer_offload_fraction" not in settings:
        raise ValueError("optimizer_cpu_offload=True without optimizer_offload_fraction: Megatron's default of 0 would "
                         "offload nothing; set the fraction (1.0 for everything)")
    _generated_init(self, **settings)


_init.__wrapped__ = _generated_init  # type: ignore[attr-defined]
_init.__doc__ = _generated_init.__doc__
OptimizerConfig.__init__ = _init  # type: ignore[method-assign]


_ELSEWHERE = {
    "average_in_collective": "gradients are averaged where they are reduced; grad_reduce_op='sum' adds them up",
    "calculate_per_token_loss": "grad_reduce_op='sum' adds gradients up",
    "overlap_param_gather_with_optimizer_step": "overlap_param_gather=True gathers during the next forward",
    "num_distributed_optimizer_instances": "the state is shared out over all of ProcessGroups.dp",
    "use_torch_optimizer_for_cpu_offload": "choose fused_backend='torch'",
    "optimizer_cuda_graph": "step() is not captured",
    "fp8_recipe": "parameters are bf16, fp16 or fp32",
    "reuse_grad_buf_for_mxfp8_param_ag": "parameters are bf16, fp16 or fp32",
    "config_logger_dir": "log dataclasses.asdict(config)",
    "muon_": "optimizer is adam, sgd, lamb or lion", "adaptive_muon_": "optimizer is adam, sgd, lamb or lion",
    "soap_": "optimizer is adam, sgd, lamb or lion",
}
"""Megatron's fields (or their beginnings) that this version has no use for, and what there is instead."""


def _elsewhere(name: str) -> str:
    found = next((text for key, text in _ELSEWHERE.items() if name.startswith(key)), "")
    return f"; Megatron's is not part of this version: {found}" if found else ""


def _as_dtype(name: str, value: torch.dtype | str) -> torch.dtype:
    """A dtype from itself or its name, with or without ``torch.``; ``bf16``, ``fp16`` and ``fp32`` are understood."""
    if isinstance(value, torch.dtype):
        return value
    short = str(value).removeprefix("torch.")
    found = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(short, short), None)
    if not isinstance(found, torch.dtype):
        names = ["float32", "bfloat16", "float16"]
        raise ValueError(f"{name}={value!r}: not a torch dtype or the name of one{_nearest(short, names)}")
    return found


def _nearest(name: str, known: list[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean {found[0]!r}?" if found else ""


def _fail(config: OptimizerConfig, name: str, rule: str) -> None:
    raise ValueError(f"{name}={getattr(config, name)!r}: {rule}")


_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "str": (str,), "int": (int, float), "float": (int, float),
    "float | None": (int, float, type(None)), "int | None": (int, float, type(None)),
}
"""Annotations whose values are checked, and what they take."""


def _check_types(config: OptimizerConfig) -> None:
    for spec in fields(config):
        kinds, value = _KINDS.get(str(spec.type)), getattr(config, spec.name)
        if kinds is None or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
            continue
        _fail(config, spec.name, f"must be a {spec.type}, not a {type(value).__name__}")


def _check_choices(config: OptimizerConfig) -> None:
    for name, choices in (("optimizer", RULES), ("fused_backend", BACKENDS), ("grad_reduce_op", ("avg", "sum")),
                          ("data_parallel_sharding_strategy", ("no_shard", "optim", "optim_grads"))):
        value = getattr(config, name)
        if value not in choices:
            _fail(config, name, f"must be one of {list(choices)}{_nearest(str(value), list(choices))}")


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
    for name in ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2"):
        if not 0.0 <= getattr(config, name) < 1.0:
            _fail(config, name, "must be in [0, 1)")
    if config.host_threads is not None and (config.host_threads < 1 or int(config.host_threads) != config.host_threads):
        _fail(config, "host_threads", "must be a whole number >= 1")
    if config.bucket_size is not None and (config.bucket_size < 1 or int(config.bucket_size) != config.bucket_size):
        _fail(config, "bucket_size", "must be a whole number of elements >= 1")
    if (config.optimizer == "muon" and config.is_distributed and not config.use_layer_wise_distributed_optimizer
            and config.data_parallel_sharding_strategy != "no_shard"):
        _fail(config, "use_distributed_optimizer", "muon needs whole matrices; set "
              "use_layer_wise_distributed_optimizer=True")
    if config.use_layer_wise_distributed_optimizer and config.data_parallel_sharding_strategy == "no_shard":
        _fail(config, "data_parallel_sharding_strategy", "contradicts use_layer_wise_distributed_optimizer=True")
    if config.host_cores is not None and (not config.host_cores or not all(isinstance(core, int) and core >= 0
                                                                      for core in config.host_cores)):
        _fail(config, "host_cores", "must name at least one core")
    if not config.grad_norm_skip_threshold > 0.0:
        _fail(config, "grad_norm_skip_threshold", "must be > 0 (inf: never skip)")
    if not 0.0 <= config.optimizer_offload_fraction <= 1.0:
        _fail(config, "optimizer_offload_fraction", "must be between 0 and 1")


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
    refused = refusal(config.fused_backend, config.optimizer, moments,
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
    "pin_cpu_grads": ("optimizer_cpu_offload=True", lambda c: c.optimizer_cpu_offload),
    "pin_cpu_params": ("optimizer_cpu_offload=True", lambda c: c.optimizer_cpu_offload),
    "loss_scale": ("fp16=True", lambda c: c.fp16),
    "initial_loss_scale": ("fp16=True without loss_scale", lambda c: c.fp16 and c.loss_scale is None),
    "min_loss_scale": ("fp16=True without loss_scale", lambda c: c.fp16 and c.loss_scale is None),
    "loss_scale_window": ("fp16=True without loss_scale", lambda c: c.fp16 and c.loss_scale is None),
    "hysteresis": ("fp16=True without loss_scale", lambda c: c.fp16 and c.loss_scale is None),
    "adam_beta1": ("optimizer='adam' or 'lamb'", lambda c: c.optimizer in ("adam", "lamb")),
    "adam_beta2": ("optimizer='adam' or 'lamb'", lambda c: c.optimizer in ("adam", "lamb")),
    "adam_eps": ("optimizer='adam' or 'lamb'", lambda c: c.optimizer in ("adam", "lamb")),
    "decoupled_weight_decay": ("optimizer='adam' or 'lamb'", lambda c: c.optimizer in ("adam", "lamb")),
    "lion_beta1": ("optimizer='lion'", lambda c: c.optimizer == "lion"),
    "lion_beta2": ("optimizer='lion'", lambda c: c.optimizer == "lion"),
    "sgd_momentum": ("optimizer='sgd'", lambda c: c.optimizer == "sgd"),
    "lamb_use_nvlamb": ("optimizer='lamb'", lambda c: c.optimizer == "lamb"),
    "lamb_grad_averaging": ("optimizer='lamb'", lambda c: c.optimizer == "lamb"),
    "decoupled_min_lr": ("decoupled_lr", lambda c: c.decoupled_lr is not None),
    "exp_avg_dtype": ("use_precision_aware_optimizer=True", lambda c: c.use_precision_aware_optimizer),
    "exp_avg_sq_dtype": ("use_precision_aware_optimizer=True and optimizer='adam' or 'lamb'",
                         lambda c: c.use_precision_aware_optimizer and c.optimizer in ("adam", "lamb")),
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
}
"""Fields that do something only in company: what they need, and whether a config has it."""


def _check_inert(config: OptimizerConfig) -> None:
    defaults = {field.name: field.default for field in fields(config)}
    for name, (needed, has) in _NEEDS.items():
        if getattr(config, name) != defaults[name] and not has(config):
            _fail(config, name, f"has no effect without {needed}; set that, or leave it at {defaults[name]!r}")
