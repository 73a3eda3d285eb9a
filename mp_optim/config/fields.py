"""Fields of OptimizerConfig: meaning, default and allowed values of each field.

:mod:`mp_optim.config.rules` has the allowed values of fields that only one rule reads, and
:mod:`mp_optim.config.combinations` the allowed combinations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mp_optim.config.rules import BACKENDS, OPTIMIZERS, RULE_FIELDS, rules_in_words
from mp_optim.config.setting_checks import (
    BETA,
    OPTIONAL_RATE,
    RATE,
    UP_TO_1,
    Check,
    Choice,
    Number,
    SettingError,
    as_bool,
    as_dtype,
    as_folder,
    as_fraction,
    as_timers,
    whole,
)
from mp_optim.config.state_forms import NO_REMAINDER, REMAINDER_CHOICES, REMAINDERS


@dataclass(kw_only=True)
class ConfigFields:
    """Fields of :class:`mp_optim.OptimizerConfig`, without its checks."""

    optimizer: str = "adam"
    """Optimizer rule: adam (AdamW unless ``decoupled_weight_decay`` is False), sgd, lamb, lion, or
    muon. muon steps hidden matrices, and ``muon_scalar_optimizer`` steps all other parameters. lamb
    treats each rank's shard of a plain tensor-parallel parameter as a separate parameter."""
    lr: float | None = None
    """Learning rate, and ``max_lr`` of every param group. Required before the first step."""
    min_lr: float | None = None
    """Lowest learning rate of the schedule."""
    decoupled_lr: float | None = None
    """Learning rate of embedding and output parameters."""
    decoupled_min_lr: float | None = None
    """Lowest learning rate of embedding and output parameters in the schedule."""
    weight_decay: float = 0.01
    """Factor of the weight decay. The standard overrides exclude biases and 1-D parameters."""
    apply_wd_to_qk_layernorm: bool = False
    """True to decay query and key layernorm weights, although they are 1-D."""
    fp16: bool = False
    """True if model parameters are float16. The stack then has FP32 main params and a loss
    scale."""
    bf16: bool = False
    """True if model parameters are bfloat16. The stack then has FP32 main params."""
    params_dtype: torch.dtype | str = torch.float32
    """Dtype of the model's parameters, a torch dtype or its name. With float32, the default,
    ``fp16`` and ``bf16`` give the dtype."""
    use_precision_aware_optimizer: bool = False
    """True to store optimizer state in ``exp_avg_dtype``, ``exp_avg_sq_dtype`` and remainders,
    also in host memory."""
    main_grads_dtype: torch.dtype | str = torch.float32
    """Dtype to which a step converts gradients, in registers. Only float32 is supported."""
    main_params_dtype: torch.dtype | str = torch.float32
    """Dtype of the main params. Only float32 is supported."""
    exp_avg_dtype: torch.dtype | str = torch.float32
    """Dtype of the first moment, or of sgd's momentum: float32, bfloat16, float16, or 8-bit (uint8)
    or 4-bit (uint4) codes. float16 and codes have a scale for each block of 256 elements."""
    exp_avg_sq_dtype: torch.dtype | str = torch.float32
    """Dtype of the second moment: float32, bfloat16, float16 or uint8."""
    fp32_state_below: int = 0
    """Number of elements below which a parameter keeps FP32 moments, with 8-bit or 4-bit moments
    (bitsandbytes' ``min_8bit_size``). A DTensor or a distributed optimizer's shard counts as the
    whole parameter; a shard of plain tensor parallelism counts by itself."""
    store_param_remainders: bool = True
    """True to store only the bits of an FP32 main param that its bfloat16 parameter lacks, with
    ``use_precision_aware_optimizer``: 2 bytes per element instead of 4. Main params above 4.6e-41
    keep their bits, and the parameter rounds ties away from zero."""
    param_remainder_bits: int = 16
    """Bits of a remainder: 16 for a full FP32 main param, or 8 for the upper 24 bits of the main
    param. With 0 there are no main params, and steps round the bfloat16 parameter
    stochastically."""
    stochastic_rounding: bool = False
    """True to round bfloat16, 8-bit and 4-bit state stochastically. Results are reproducible for
    any placement and number of threads."""
    stochastic_rounding_seed: int = 0
    """Seed of the random bits for stochastic rounding."""
    ema_decay: float | None = None
    """Decay per step of a moving average of every main param; None keeps no averages.
    ``optimizer.averaged_weights()`` evaluates with the averages."""
    ema_dtype: torch.dtype | str = torch.float32
    """Dtype of the averages of ``ema_decay``: float32, or bfloat16 with ``stochastic_rounding``."""
    loss_scale: float | None = None
    """Constant loss scale. With None, fp16 has a dynamic loss scale, and bf16 has no loss scale."""
    initial_loss_scale: float = 2.0**32
    """First value of the dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Lowest value of the dynamic loss scale."""
    loss_scale_window: int = 1000
    """Number of consecutive steps without overflow after which the loss scale doubles."""
    hysteresis: int = 2
    """Number of consecutive overflows after which the loss scale halves. Every further consecutive
    overflow halves the scale again."""
    adam_beta1: float = 0.9
    """Decay per step of the first moment (adam, lamb)."""
    adam_beta2: float = 0.999
    """Decay per step of the second moment (adam, lamb)."""
    adam_eps: float = 1e-8
    """Number added to the denominator (adam, lamb)."""
    decoupled_weight_decay: bool = True
    """True to decay the parameter itself (AdamW). False adds the decay to the gradient."""
    cautious_wd: bool = False
    """Cautious weight decay (adam, lion, muon; Chen et al. 2025): an element decays only if the
    update does not move the element away from 0. May be set per param group."""
    sgd_momentum: float = 0.9
    """Decay per step of the momentum (sgd)."""
    lion_beta1: float = 0.95
    """Weight of the momentum in its sum with the gradient; the sign of the sum is the update
    (lion)."""
    lion_beta2: float = 0.98
    """Decay per step of the momentum (lion)."""
    muon_momentum: float = 0.95
    """Decay per step of muon's momentum, a moving average of gradients."""
    muon_use_nesterov: bool = False
    """True for Nesterov momentum in muon."""
    muon_split_qkv: bool = True
    """True to orthogonalize query, key and value of a fused weight (``linear_qkv``) separately."""
    muon_scale_mode: str = "spectral"
    """Factor of muon's updates: spectral sqrt(max(rows, columns)), unit_rms_norm sqrt(rows /
    columns), or shape_scaling sqrt(max(1, rows / columns))."""
    muon_extra_scale_factor: float = 1.0
    """Second factor of muon's updates, after ``muon_scale_mode``. 0.2 with spectral makes
    updates about as large as AdamW's, so that AdamW's learning rate fits."""
    muon_fp32_matmul_prec: str = "medium"
    """Precision of muon's matrix products: medium for bfloat16, highest for FP32."""
    muon_num_ns_steps: int = 5
    """Number of Newton-Schulz steps in muon."""
    muon_coefficient_type: str = "quintic"
    """Polynomials of the Newton-Schulz steps: simple, quintic or polar_express."""
    muon_ns_method: str = "standard"
    """Algorithm of the Newton-Schulz steps: standard, or gram, which needs fewer operations for
    rectangular matrices and rounds differently."""
    muon_tp_mode: str = "duplicated"
    """Orthogonalization of matrices that are sharded over ranks. duplicated: one rank gathers and
    orthogonalizes the whole matrix. blockwise: each rank orthogonalizes its shard, and results
    depend on the layout."""
    muon_moment2_method: str | None = None
    """Second moment of muon by row. ``"normuon"`` (Li et al. 2025) divides each row of an update
    by the root of a moving average of the row's mean square, keeps the norm of the update, and
    stores 4 bytes per row. None has no second moment."""
    muon_beta2: float = 0.95
    """Decay per step of the moving average of ``muon_moment2_method``."""
    muon_scalar_optimizer: str = "adam"
    """Rule that steps embeddings, output layers and non-matrices with muon: adam or lion."""
    lamb_use_nvlamb: bool = False
    """True to adapt the learning rate of parameters without weight decay, too (lamb)."""
    lamb_grad_averaging: bool = True
    """True to multiply the gradient by 1 - beta1 in the first moment (lamb)."""
    clip_grad: float = 1.0
    """Limit of the global gradient norm; 0 turns clipping off."""
    grad_norm_skip_threshold: float = math.inf
    """Gradient norm above which a step is skipped."""
    skip_step_sigma_factor: float = math.inf
    """Limit of the gradient norm and of the loss (``optimizer.health.report_loss``): number of
    sigma above the median of the last steps. A step above the limit is skipped. Sigma is 1.4826
    times the median distance from the median. 6 is usual; inf skips no step."""
    skip_step_rolling_interval_length: int = 128
    """Number of last steps in the median of ``skip_step_sigma_factor``. Skipping begins when
    half of these steps are recorded."""
    log_num_zeros_in_grad: bool = False
    """True to count zero gradient elements, which reads every gradient once more."""
    log_param_grad_norms: int = 0
    """Number of largest parameter gradient norms that ``metrics()`` shows; 0 records no norms.
    Norms are recorded for every parameter, without another read of gradients. Ranks with shards
    reduce one more vector. The first step decides whether norms are recorded."""
    optimizer_cpu_offload: bool = False
    """True to keep a part of main params and state in host memory. The host steps this part
    unless ``offload_place`` is streamed."""
    optimizer_offload_fraction: float | str = 0.0
    """Share of the parameter elements to offload, 0 to 1. ``"auto"`` selects the smallest share
    that fits ``gpu_memory`` on each rank. Must be given with ``optimizer_cpu_offload=True``."""
    gpu_memory: int | None = None
    """Bytes on the accelerator for model parameters, gradients and optimizer, with
    ``optimizer_offload_fraction="auto"``. The default is three quarters of the accelerator's
    memory; activations need the rest."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """True to overlap transfers in both directions with the host's arithmetic."""
    offload_mode: str = "sync"
    """Work that the host does during backward. All modes give the same bits
    (docs/offload_modes.md).

    - sync: the host begins in ``step()``.
    - overlap: gradients are copied to the host. The host computes norms of gradients that only the
      host has.
    - speculative: the host also steps parameters into back buffers of main params and moments.
      ``step()`` commits or discards the result.

    ``step()`` steps parameters that are streamed or have state on a disk, in every mode.
    """
    offload_place: str = "host"
    """Device that steps offloaded parameters: host, or streamed for the accelerator. streamed
    keeps main params and state in host memory, and copies them to the accelerator window by
    window in ``step()``. Both values give the same bits; docs/offload_modes.md compares their
    speed."""
    stream_window_bytes: int = 256 << 20
    """Bytes of main params and state in a window, with ``offload_place="streamed"`` or
    ``optimizer_state_path``. Released gradients count as part of a window. With streamed, the
    accelerator holds at most three windows, during ``step()``. Larger parameters are split into
    pieces (adam, sgd, lion) or refused (other rules)."""
    optimizer_state_path: str | None = None
    """Folder on a local disk for a file with main params and state of offloaded parameters, with
    the same bits as in memory. Host memory holds five windows of ``stream_window_bytes`` with
    ``offload_place="host"``, or six with ``"streamed"``. The file has no name, is deleted when
    the process ends, and is not a checkpoint."""
    release_gradients: bool = False
    """True to free gradients of offloaded parameters on the accelerator during backward, with
    ``offload_mode`` overlap or speculative (docs/offload_modes.md).

    At most two buckets of these gradients are on the device. The host adds the gradients of
    micro-batches; gradients of streamed parameters are copied back with their window. ``.grad`` is
    then None, so other code must not read or clip gradients. ``step()`` ends with ``zero_grad()``.
    To discard a batch, call the optimizer's ``zero_grad()``, not the model's.
    """
    offload_bucket_bytes: int = 64 << 20
    """Staging bytes of a bucket of offloaded parameters. A larger parameter is a bucket of its
    own. With ``offload_mode`` overlap or speculative, a bucket has at most a sixteenth of all
    staging bytes."""
    pin_cpu_grads: bool = True
    """True to pin the staging memory for gradients and parameters."""
    pin_cpu_params: bool = True
    """True to pin the main params in host memory, and streamed state."""
    use_distributed_optimizer: bool = False
    """True to reduce gradients over the data-parallel ranks, and to keep main params and state
    only for this rank's shard (ZeRO)."""
    data_parallel_sharding_strategy: str = "optim"
    """Data sharded over data-parallel ranks: optim (main params and state: ZeRO-1),
    optim_grads (also gradients: ZeRO-2), or no_shard (nothing: each rank steps all
    parameters)."""
    use_layer_wise_distributed_optimizer: bool = False
    """True to assign whole parameters to ranks, balanced by size, so that muon exchanges no
    matrices."""
    overlap_grad_reduce: bool = False
    """True to reduce each bucket of gradients while backward computes the other buckets."""
    overlap_param_gather: bool = False
    """True to gather updated parameters during the next forward. Each module waits for its own
    parameters."""
    grad_reduce_in_fp32: bool = False
    """True to accumulate and communicate gradients in FP32 instead of the parameter's dtype."""
    grad_reduce_op: str = "avg"
    """Reduction of the ranks' gradients: avg, or sum (if the loss is divided by the number of
    tokens of all ranks)."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """True to communicate 16-bit gradients, add them in FP32 in the order of ranks, and round
    once. Backends other than NCCL always do so."""
    bucket_size: int | None = None
    """Parameters are added to a bucket until it has this number of elements. The default is
    the larger of 40 M and 1 M per rank."""
    fused_backend: str = "auto"
    """Implementation of the step: auto (the fastest with the bits of ``reference``), native (on
    the host), reference, torch, triton, apex or transformer_engine. torch, apex and
    transformer_engine may give other bits (docs/numerics.md)."""
    audit_rate: float = 0.0
    """Share of the elements, 0 to 1, that each step repeats with ``reference`` in host memory to
    compare bits (adam, sgd, lion). 1e-4 costs about 1 % of a step; 0.0 turns audits off."""
    audit_action: str = "warn"
    """Reaction to different bits in an audit: warn, or raise ``mp_optim.AuditError``. Load the last
    checkpoint after this error."""
    host_threads: int | None = None
    """Number of threads of the native host kernels in the whole process, regardless of
    ``OMP_NUM_THREADS``. The default is one thread per core of this rank's share of the host
    (``describe()`` shows the number). With the default, steps during backward (``offload_mode``)
    use two threads fewer, or three quarters if that is less."""
    timers: Callable[..., Any] | None = None
    """Megatron's timers. ``timers(name, log_level=1)`` returns an object with
    ``start(barrier=)`` and ``stop()``. The name ``optimizer-clip-main-grad`` covers norm and
    clipping, and ``optimizer-inner-step`` covers the step."""
    barrier_with_L1_time: bool = False
    """True if timers wait for all ranks before they start."""

    @property
    def is_distributed(self) -> bool:
        """True if gradients are reduced, and state is sharded, over data-parallel ranks."""
        return self.use_distributed_optimizer or self.use_layer_wise_distributed_optimizer

    @property
    def may_offload(self) -> bool:
        """True if a part of the optimizer is offloaded, or if the fraction is ``"auto"``."""
        return self.optimizer_cpu_offload and self.optimizer_offload_fraction != 0.0

    @property
    def keeps_remainders(self) -> bool:
        """True if bfloat16 parameters have remainders or no main params at all, instead of FP32
        main params."""
        return self.use_precision_aware_optimizer and self.store_param_remainders and self.bf16

    @property
    def has_no_main_params(self) -> bool:
        """True if bfloat16 parameters have neither main params nor remainders."""
        return self.keeps_remainders and self.param_remainder_bits == NO_REMAINDER.name

    @property
    def elementwise_rule(self) -> str:
        """The rule that ``fused_backend`` implements. For muon that is ``muon_scalar_optimizer``,
        because torch computes muon's matrix products."""
        return self.muon_scalar_optimizer if self.optimizer == "muon" else self.optimizer


_INT32 = 2**31 - 1
_SCALE = Number(2.0**-126, 2.0**126)
"""Allowed loss scales. Each scale and its reciprocal are normal FP32 numbers."""
_STEPS = whole(1, _INT32)
_THRESHOLD = Number(0.0, open_low=True, may_be_infinite=True)
_NO_RULE = f"choose {rules_in_words()}"
_MOMENTS_IN_8_BITS = (
    "for 8-bit moments set use_precision_aware_optimizer=True, exp_avg_dtype='uint8' and "
    "exp_avg_sq_dtype='uint8'"
)
_BELOW = "below Float16OptimizerWithFloat16Params (docs/migrate.md, 'Any other torch optimizer')"
_OTHER_RULES = {
    "adafactor": "build mp_optim.Adafactor(params, offload=...), which is torch's",
    "ademamix": f"build pytorch_optimizer.AdEMAMix {_BELOW}",
    **dict.fromkeys(
        ("stable_adamw", "stableadamw"), f"build pytorch_optimizer.StableAdamW {_BELOW}"
    ),
    **dict.fromkeys(("shampoo", "soap"), _NO_RULE),
    **dict.fromkeys(("adamw8bit", "adam8bit", "adamw_8bit"), _MOMENTS_IN_8_BITS),
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "'adam' is AdamW"),
}
EMA_DECAY = replace(BETA, optional=True)


def _as_remainder_form(value: Any) -> Any:
    form = whole(0, 16)(value)
    if form not in REMAINDERS:
        raise ValueError(REMAINDER_CHOICES)
    return form


CHECKS: dict[str, Check] = {
    "optimizer": Choice(OPTIMIZERS, tuple(_OTHER_RULES.items())),
    **RULE_FIELDS,
    **dict.fromkeys(("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"), OPTIONAL_RATE),
    "weight_decay": RATE,
    **dict.fromkeys(("params_dtype", "main_grads_dtype", "main_params_dtype"), as_dtype),
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "ema_dtype"), as_dtype),
    "fp32_state_below": whole(0, 2**62),
    "param_remainder_bits": _as_remainder_form,
    "stochastic_rounding_seed": whole(0, 2**32 - 1),
    "ema_decay": EMA_DECAY,
    "loss_scale": replace(_SCALE, optional=True),
    "initial_loss_scale": _SCALE,
    "min_loss_scale": _SCALE,
    "loss_scale_window": _STEPS,
    "hysteresis": _STEPS,
    "clip_grad": Number(),
    "grad_norm_skip_threshold": _THRESHOLD,
    "skip_step_sigma_factor": _THRESHOLD,
    "skip_step_rolling_interval_length": whole(4, 2**20),
    "log_param_grad_norms": whole(0, _INT32),
    "optimizer_offload_fraction": as_fraction,
    "gpu_memory": whole(1, 2**62, optional=True, in_bytes=True),
    "offload_mode": Choice(("sync", "overlap", "speculative")),
    "offload_place": Choice(("host", "streamed")),
    "stream_window_bytes": whole(4096, 2**62, in_bytes=True),
    "optimizer_state_path": as_folder,
    "offload_bucket_bytes": whole(1, 2**62, in_bytes=True),
    "data_parallel_sharding_strategy": Choice(("no_shard", "optim", "optim_grads")),
    "grad_reduce_op": Choice(("avg", "sum")),
    "bucket_size": whole(1, 2**62, optional=True),
    "fused_backend": Choice(BACKENDS),
    "audit_rate": UP_TO_1,
    "audit_action": Choice(("warn", "raise")),
    "host_threads": whole(1, 1024, optional=True),
    "timers": as_timers,
}
"""Checks of the fields that are not booleans, by field."""


def check_field(name: str, value: Any) -> Any:
    """Return a field's value, converted to the field's type.

    Args:
        name: name of the field.
        value: value to check.

    Raises:
        SettingError: the field does not allow the value.
    """
    check: Check = CHECKS.get(name, as_bool)
    try:
        return check(value)
    except ValueError as error:
        raise SettingError(name, value, str(error)) from error
