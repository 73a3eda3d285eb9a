"""The fields of an OptimizerConfig: what each means, its default, and what it may be by itself (for
a rule's own fields, :mod:`mp_optim.config.rules` has that). What fields may be together is in
:mod:`mp_optim.config.combinations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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
from mp_optim.config.state_forms import KAHAN_IS_GONE, NO_REMAINDER, REMAINDER_CHOICES, REMAINDERS


@dataclass(kw_only=True)
class ConfigFields:
    """See :class:`mp_optim.OptimizerConfig`, which adds the checks."""

    optimizer: str = "adam"
    """The rule: adam (AdamW unless decoupled_weight_decay is off), sgd, lamb, lion, or muon for
    matrices with ``muon_scalar_optimizer`` for the rest. Of a parameter that plain tensor
    parallelism cuts, lamb sees each rank's part as a parameter of its own."""
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
    """Dtype of the model's parameters, a torch dtype or its name. float32 stands for what fp16 and
    bf16 say."""
    use_precision_aware_optimizer: bool = False
    """Keep optimizer state in the dtypes below, on the host too."""
    main_grads_dtype: torch.dtype | str = torch.float32
    """Gradients are read in the dtype they have and widened to this one in registers: float32."""
    main_params_dtype: torch.dtype | str = torch.float32
    """Dtype of the main params: float32."""
    exp_avg_dtype: torch.dtype | str = torch.float32
    """Dtype of the first moment, or sgd's momentum: float32, bfloat16, float16 (with a scale for
    each block of 256), or uint8 or uint4 (codes of 8 or 4 bits with a scale for each block of
    256)."""
    exp_avg_sq_dtype: torch.dtype | str = torch.float32
    """Dtype of the second moment; the same choices but uint4."""
    fp32_state_below: int = 0
    """State in 8 or 4 bits is for parameters of at least so many elements; smaller ones have theirs
    in FP32 (bitsandbytes' ``min_8bit_size``). A DTensor and a distributed optimizer's part count
    as the whole parameter, what plain tensor parallelism cuts as parameters of their own."""
    store_param_remainders: bool = True
    """With ``use_precision_aware_optimizer``, keep of a bfloat16 parameter's FP32 main param only
    what the parameter itself does not say: 2 bytes instead of 4, and the same bits."""
    param_remainder_bits: int = 16
    """Bits of a remainder: 16 for all of FP32, 8 for its upper 24 bits; 0 for none, so that the
    bfloat16 parameter is all there is, and is rounded stochastically."""
    stochastic_rounding: bool = False
    """Round bfloat16, 8-bit and 4-bit state stochastically; reproducible for any placement and
    number of threads."""
    stochastic_rounding_seed: int = 0
    """Seed of the random bits."""
    ema_decay: float | None = None
    """Keep a moving average of every main param, with this decay a step; None keeps none.
    ``optimizer.averaged_weights()`` evaluates with them."""
    ema_dtype: torch.dtype | str = torch.float32
    """Dtype of these averages: float32, or bfloat16 with ``stochastic_rounding``."""
    loss_scale: float | None = None
    """Constant loss scale, for fp16 or bf16; with fp16 dynamic if not given, with bf16 none."""
    initial_loss_scale: float = 2.0**32
    """Where the dynamic loss scale starts."""
    min_loss_scale: float = 1.0
    """Floor of the dynamic loss scale."""
    loss_scale_window: int = 1000
    """Clean steps in a row before the loss scale doubles."""
    hysteresis: int = 2
    """Overflows in a row before the loss scale halves."""
    adam_beta1: float = 0.9
    """Decay of the first moment (adam, lamb); at 0 adam keeps none."""
    adam_beta2: float = 0.999
    """Decay of the second moment (adam, lamb)."""
    adam_eps: float = 1e-8
    """Added to the denominator (adam, lamb)."""
    decoupled_weight_decay: bool = True
    """Decay the parameter (AdamW) rather than adding to the gradient."""
    caution: bool = False
    """Cautious updates (adam, lion, muon; Liang et al. 2024): elements whose step does
    not go the way of their gradient stay, and the others step by as much more, at most 1,000 times
    as much. Which share stays is counted over the whole parameter, so that a step reads gradient
    and first moment twice."""
    cautious_wd: bool = False
    """Cautious weight decay (adam, lion, muon; Chen et al. 2025): an
    element is decayed only where the step does not take it away from 0. May be set for a param
    group."""
    sgd_momentum: float = 0.9
    """Momentum of sgd."""
    lion_beta1: float = 0.95
    """Weight of the momentum in the blend whose sign is the step (lion)."""
    lion_beta2: float = 0.98
    """Decay of the momentum (lion)."""
    muon_momentum: float = 0.95
    """Decay of muon's momentum, an average of gradients."""
    muon_use_nesterov: bool = False
    """Muon orthogonalises its momentum one step ahead."""
    muon_split_qkv: bool = True
    """Muon orthogonalises the query, key and value parts of a fused weight (``linear_qkv``) each by
    itself."""
    muon_scale_mode: str = "spectral"
    """Scale of muon's steps: spectral sqrt(max(rows, columns)), unit_rms_norm sqrt(rows / columns),
    or shape_scaling sqrt(max(1, rows / columns))."""
    muon_extra_scale_factor: float = 1.0
    """Multiplies the scale; 0.2 with spectral comes near the length of AdamW's steps, so that its
    lr can be kept."""
    muon_fp32_matmul_prec: str = "medium"
    """Products of matrices in muon: medium is bfloat16, highest is FP32."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz steps of muon."""
    muon_coefficient_type: str = "quintic"
    """Polynomials of these steps: simple, quintic or polar_express."""
    muon_ns_method: str = "standard"
    """How the steps are taken: standard, or gram, which multiplies rectangular matrices with fewer
    operations, and rounds differently."""
    muon_tp_mode: str = "duplicated"
    """Matrices that are split over ranks: duplicated, orthogonalised whole, each by one rank, or
    blockwise, each part by itself, so that results depend on the layout."""
    muon_moment2_method: str | None = None
    """normuon: muon brings the rows of a direction, a neuron each, to one size by an average of
    their squares, and leaves its norm as it was (NorMuon; Li et al. 2025). 4 bytes a row."""
    muon_beta2: float = 0.95
    """Decay of this average."""
    muon_scalar_optimizer: str = "adam"
    """With muon, what steps embeddings, output layers and whatever is no matrix: adam or lion."""
    lamb_use_nvlamb: bool = False
    """LAMB adapts the learning rate also where weight decay is 0."""
    lamb_grad_averaging: bool = True
    """LAMB weighs the gradient with 1 - beta1 in the first moment."""
    clip_grad: float = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""
    grad_norm_skip_threshold: float = math.inf
    """Skip steps whose gradient norm is larger."""
    skip_step_sigma_factor: float = math.inf
    """Skip steps whose gradient norm, or loss (``optimizer.health.report_loss``), is more than so
    many sigma above the median of the last steps; 6 is usual, inf skips none."""
    skip_step_rolling_interval_length: int = 128
    """The last steps that ``skip_step_sigma_factor`` compares with; from half of them on."""
    log_num_zeros_in_grad: bool = False
    """Count zero gradient elements (one more read of every gradient)."""
    log_param_grad_norms: int = 0
    """Keep the gradient norm of each parameter, and show so many of the largest in ``metrics()``;
    0 keeps none. Gradients are not read again; ranks that hold parts of parameters reduce one more
    vector."""
    log_update_ratios_interval: int = 0
    """Every so many steps compare what the step adds to each parameter with its size; 0 never does.
    Such a step copies this rank's main params for its duration, 4 bytes a parameter where they are
    stepped, and reads them three times more."""
    optimizer_cpu_offload: bool = False
    """Keep part of the optimizer on the host, and step it there (or see ``offload_place``)."""
    optimizer_offload_fraction: float | str = 0.0
    """Share of parameter elements that are offloaded, 0 to 1, or ``"auto"``: as little as
    ``gpu_memory`` allows, on each rank."""
    gpu_memory: int | None = None
    """Bytes of the accelerator that model parameters, gradients and optimizer may take with
    ``optimizer_offload_fraction="auto"``; by default three quarters of it. Activations have to do
    with the rest."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Overlap transfers in both directions with the host's arithmetic."""
    offload_mode: str = "sync"
    """What is done during backward: nothing (sync), gradients come down and are measured (overlap),
    or they are also stepped by the host, into a spare of main params and moments, which the verdict
    publishes (speculative). Where state is on a disk, overlap reads the first windows, and the
    spare is on the disk, too. Streamed parameters are stepped in ``step()`` in every mode. The same
    bits in all three (docs/settings.md)."""
    offload_place: str = "host"
    """Where offloaded parameters are stepped: host, or streamed: main params and state stay in host
    memory and are copied to the accelerator window by window in ``step()``. The same bits in both.
    docs/settings.md says which is faster."""
    stream_window_bytes: int = 256 << 20
    """Bytes of main params and state in a window, with ``offload_place="streamed"`` or
    ``optimizer_state_path``; streamed, at most three are on the accelerator, within ``step()``.
    A gradient that was released takes part of it. Larger parameters go in pieces (adam, sgd, lion)
    or are refused (the other rules)."""
    optimizer_state_path: str | None = None
    """A folder on a local disk. Main params and state of what is offloaded lie there in a file
    between steps; host memory holds windows of ``stream_window_bytes``, five (``offload_place``
    host) or six (streamed). With ``offload_mode`` speculative the file is twice as large. It
    has no name, goes with the process, and is no checkpoint. The same bits as in memory."""
    release_gradients: bool = False
    """With ``offload_mode`` overlap or speculative: what is offloaded leaves ``.grad`` as soon as
    its bucket is complete in backward, so that at most two buckets of such gradients are on the
    device; micro-batches add up on the host, and the gradient of a streamed parameter comes up with
    its window. ``.grad`` reads as None then, so nothing else may
    clip or read it; ``step()`` ends with ``zero_grad()``, and a batch is given up by the
    optimizer's ``zero_grad()``, not the model's. Off by default, as none of that can be noticed
    (docs/settings.md)."""
    offload_bucket_bytes: int = 64 << 20
    """Staging bytes after which a bucket of host slots is closed; one larger parameter is a bucket
    by itself. With ``offload_mode`` overlap or speculative, a sixteenth of all if that is less."""
    pin_cpu_grads: bool = True
    """Page-lock the staging memory for gradients and parameters."""
    pin_cpu_params: bool = True
    """Page-lock main params on the host."""
    use_distributed_optimizer: bool = False
    """Reduce gradients over the data-parallel ranks, and keep main params and state only for an
    owned share (ZeRO)."""
    data_parallel_sharding_strategy: str = "optim"
    """What data-parallel ranks share out: optim (main params and state: ZeRO-1), optim_grads
    (gradients too: ZeRO-2), or no_shard (nothing: every rank steps everything, with the same
    bits)."""
    use_layer_wise_distributed_optimizer: bool = False
    """Share out whole parameters, balanced by size: muon then exchanges no matrices."""
    overlap_grad_reduce: bool = False
    """Reduce each bucket of gradients while backward computes the others."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward; each module waits for its own."""
    grad_reduce_in_fp32: bool = False
    """Add up and send gradients in FP32 rather than in the parameter's dtype."""
    grad_reduce_op: str = "avg"
    """What becomes of the ranks' gradients: avg, or sum (for losses divided by the number of tokens
    of all ranks)."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """Send 16-bit gradients as they are but add them in FP32, in the order of ranks, rounding once;
    always so where the backend is not NCCL."""
    bucket_size: int | None = None
    """Elements after which a bucket of parameters is closed; by default 40 M, or 1 M for each rank
    if that is more."""
    fused_backend: str = "auto"
    """What carries the rule out: auto (the fastest that has the bits of ``reference``), native (on
    the host), reference, torch, triton, apex or transformer_engine (their own bits; see
    docs/numerics.md)."""
    audit_rate: float = 0.0
    """Share of the elements, 0 to 1, that each step repeats by ``reference``, in host memory, to
    compare bits (adam, sgd, lion). 1e-4 costs about a hundredth of a step; 0.0 nothing."""
    audit_action: str = "warn"
    """What comes of other bits: warn, or raise (``mp_optim.AuditError``; then the last checkpoint
    has to be loaded)."""
    host_threads: int | None = None
    """Threads of the native host kernels, for the whole process; by default a thread for each core
    of this rank's share of the host (``describe()`` says which and why), whatever
    ``OMP_NUM_THREADS`` says, and during backward (``offload_mode``) two and at least a quarter
    fewer."""
    timers: Callable[..., Any] | None = None
    """Megatron's timers: ``timers(name, log_level=1)`` has ``start(barrier=)`` and ``stop()``;
    called around the measuring (``optimizer-clip-main-grad``) and the stepping
    (``optimizer-inner-step``)."""
    barrier_with_L1_time: bool = False
    """Timers wait for all ranks before they start."""

    @property
    def is_distributed(self) -> bool:
        """Whether gradients are reduced, and state shared out, over data-parallel ranks."""
        return self.use_distributed_optimizer or self.use_layer_wise_distributed_optimizer

    @property
    def may_offload(self) -> bool:
        """Whether some of the optimizer is on the host, or will be if that turns out to be
        needed."""
        return self.optimizer_cpu_offload and self.optimizer_offload_fraction != 0.0

    @property
    def has_windows(self) -> bool:
        """Whether some of what is offloaded is stepped window by window."""
        return self.offload_place != "host" or self.optimizer_state_path is not None

    @property
    def has_buckets(self) -> bool:
        """Whether some of what is offloaded is stepped by the host bucket by bucket."""
        return self.offload_place != "streamed" and self.optimizer_state_path is None

    @property
    def keeps_remainders(self) -> bool:
        """Whether bfloat16 parameters are stepped as they are, beside their remainders if there
        are some."""
        return self.use_precision_aware_optimizer and self.store_param_remainders and self.bf16

    @property
    def has_no_main_params(self) -> bool:
        """Whether bfloat16 parameters are all there is of their main params."""
        return self.keeps_remainders and self.param_remainder_bits == NO_REMAINDER.name

    @property
    def elementwise_rule(self) -> str:
        """The rule that backends carry out: muon's products of matrices are torch's, whatever the
        backend."""
        return self.muon_scalar_optimizer if self.optimizer == "muon" else self.optimizer


_INT32 = 2**31 - 1
_SCALE = Number(2.0**-126, 2.0**126)
"""Loss scales and their reciprocals are normal FP32 numbers."""
_STEPS = whole(1, _INT32)
_THRESHOLD = Number(0.0, open_low=True, may_be_infinite=True)
_NO_RULE = f"optimizer is {rules_in_words()}"
_MOMENTS_IN_8_BITS = (
    "8-bit moments are use_precision_aware_optimizer=True with exp_avg_dtype='uint8' and "
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
    if value == "kahan":
        raise ValueError(f"{REMAINDER_CHOICES}; {KAHAN_IS_GONE}: use 16")
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
    "log_update_ratios_interval": whole(0, _INT32),
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
"""Fields that are not switches, and what they may be."""


def check_field(name: str, value: Any) -> Any:
    """A field's value in the form in which it is kept.

    Raises:
        ValueError: naming field and value.
    """
    check: Check = CHECKS.get(name, as_bool)
    try:
        return check(value)
    except ValueError as error:
        raise SettingError(name, value, str(error)) from error


def check_fields(config: ConfigFields) -> None:
    """Check every field of a config by itself, and keep each in its form.

    Raises:
        ValueError: naming field and value.
    """
    for spec in fields(config):
        value = getattr(config, spec.name)
        kept = check_field(spec.name, value)
        if kept is not value:
            setattr(config, spec.name, kept)
