"""OptimizerConfig: what to build, in Megatron's names.

A field exists only if setting it changes something; a setting that would be ignored raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from mp_optim.config_checks import check_config
from mp_optim.config_fields import check_field, nearest

__all__ = ["AdamOptimizerConfig", "OptimizerConfig", "SGDOptimizerConfig"]


@dataclass(kw_only=True)
class OptimizerConfig:
    """Everything :func:`mp_optim.get_megatron_optimizer` needs to know besides the model.

    Raises:
        TypeError: an unknown field, naming the nearest one.
        ValueError: a value out of range, contradictory or without effect, naming field and value.
    """

    optimizer: str = "adam"
    """The rule: adam (AdamW unless decoupled_weight_decay is off), sgd, lamb, lion, or muon for
    matrices with ``muon_scalar_optimizer`` for the rest."""
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
    each block of 256), or uint8 (8-bit codes with a scale for each block of 256)."""
    exp_avg_sq_dtype: torch.dtype | str = torch.float32
    """Dtype of the second moment; the same choices."""
    store_param_remainders: bool = True
    """With ``use_precision_aware_optimizer``, keep of a bfloat16 parameter's FP32 main param only
    what the parameter itself does not say: 2 bytes instead of 4, and the same bits."""
    param_remainder_bits: int = 16
    """Bits of a remainder: 16 for all of FP32, 8 for its upper 24 bits."""
    stochastic_rounding: bool = False
    """Round bfloat16 and 8-bit state stochastically; reproducible for any placement and number of
    threads."""
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
    muon_tp_mode: str = "duplicated"
    """Matrices that are split over ranks: duplicated, gathered and orthogonalised whole, or
    blockwise, each part by itself, so that results depend on the layout."""
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
    log_num_zeros_in_grad: bool = False
    """Count zero gradient elements (one more read of every gradient)."""
    optimizer_cpu_offload: bool = False
    """Keep and step part of the optimizer on the host."""
    optimizer_offload_fraction: float | str = 0.0
    """Share of parameter elements that are stepped on the host, 0 to 1, or ``"auto"``: as little as
    ``gpu_memory`` allows, on each rank."""
    gpu_memory: int | None = None
    """Bytes of the accelerator that model parameters, gradients and optimizer may take with
    ``optimizer_offload_fraction="auto"``; by default three quarters of it. Activations have to do
    with the rest."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Overlap transfers in both directions with the host's arithmetic."""
    offload_mode: str = "sync"
    """When the host works: sync (in ``step()``), overlap (gradients come down and are measured
    during backward) or speculative (they are also stepped then, into a second half of main params
    and moments; the verdict publishes it). The same bits in all three."""
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
    """Share out whole parameters, balanced by size, for rules that need whole matrices."""
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
    optimizer_cuda_graph: bool = False
    """Capture the step in CUDA graphs and replay it, once gradients stay where they are in memory
    (triton kernels, all of the optimizer on a GPU)."""
    host_threads: int | None = None
    """Threads of the native host kernels, for the whole process; by default
    ``torch.get_num_threads()``, and during backward (``offload_mode``) two and at least a quarter
    fewer."""
    host_cores: tuple[int, ...] | None = None
    """Cores that the native kernels' threads are pinned to, in turn, for the whole process."""
    timers: Callable[..., Any] | None = None
    """Megatron's timers: ``timers(name, log_level=1)`` has ``start(barrier=)`` and ``stop()``;
    called around the measuring (``optimizer-clip-main-grad``) and the stepping
    (``optimizer-inner-step``)."""
    barrier_with_L1_time: bool = False
    """Timers wait for all ranks before they start."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise if a value is out of range, contradictory or without effect; done at construction,
        and again by :func:`mp_optim.get_megatron_optimizer` for fields set since. Values are kept
        as Python's own numbers, and dtypes as torch's."""
        check_config(self)

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
    def keeps_remainders(self) -> bool:
        """Whether bfloat16 parameters are stepped as they are, beside their remainders."""
        return self.use_precision_aware_optimizer and self.store_param_remainders and self.bf16

    @property
    def elementwise_rule(self) -> str:
        """The rule that backends carry out: muon's products of matrices are torch's, whatever the
        backend."""
        return self.muon_scalar_optimizer if self.optimizer == "muon" else self.optimizer

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> OptimizerConfig:
        """A config from plain data, such as a YAML mapping."""
        return cls(**settings)


AdamOptimizerConfig = SGDOptimizerConfig = OptimizerConfig

_generated_init = OptimizerConfig.__init__


def _init(self: OptimizerConfig, *positional: Any, **settings: Any) -> None:
    known = [field.name for field in fields(OptimizerConfig)]
    if positional:
        shown = ", ".join(
            f"{name}={value!r}" for name, value in zip(known, positional, strict=False)
        )
        raise TypeError(f"OptimizerConfig takes its fields by name, as in OptimizerConfig({shown})")
    for name in settings:
        if name not in known:
            raise TypeError(
                "OptimizerConfig has no field "
                f"{name!r}{_elsewhere(name) or nearest(name, known, 0.6)}"
            )
    offloads = check_field("optimizer_cpu_offload", settings.get("optimizer_cpu_offload", False))
    if offloads and "optimizer_offload_fraction" not in settings:
        raise ValueError(
            "optimizer_cpu_offload=True without optimizer_offload_fraction: Megatron's default of "
            "0 would "
            "offload nothing; set the fraction (1.0 for everything)"
        )
    if isinstance(rule := settings.get("optimizer"), str) and rule.lower() == "adamw":
        if settings.get("decoupled_weight_decay") is False:
            raise ValueError(
                f"optimizer={rule!r} with decoupled_weight_decay=False: AdamW decouples it; write "
                "optimizer='adam'"
            )
        settings = {**settings, "optimizer": "adam"}
    _generated_init(self, **settings)


_init.__wrapped__ = _generated_init  # type: ignore[attr-defined]
_init.__name__ = "__init__"
_init.__qualname__ = "OptimizerConfig.__init__"
_init.__doc__ = _generated_init.__doc__
OptimizerConfig.__init__ = _init  # type: ignore[method-assign]


_ELSEWHERE = {
    "average_in_collective": (
        "gradients are averaged where they are reduced; grad_reduce_op='sum' adds them up"
    ),
    "calculate_per_token_loss": "grad_reduce_op='sum' adds gradients up",
    "overlap_param_gather_with_optimizer_step": (
        "overlap_param_gather=True gathers during the next forward"
    ),
    "num_distributed_optimizer_instances": "the state is shared out over all of ProcessGroups.dp",
    "use_torch_optimizer_for_cpu_offload": "choose fused_backend='torch'",
    "fp8_recipe": "parameters in 8 bits are recognised, and quantised by their own recipe",
    "reuse_grad_buf_for_mxfp8_param_ag": "parameters in 8 bits are not sharded",
    "config_logger_dir": "log dataclasses.asdict(config)",
    "muon_use_syrk": "products of matrices are torch's",
    "muon_nesterov": "it is called muon_use_nesterov here",
    "adaptive_muon_": "optimizer is adam, sgd, lamb, lion or muon",
    "soap_": "optimizer is adam, sgd, lamb, lion or muon",
}
"""Megatron's fields (or their beginnings) that this version has no use for, and what there is
instead."""


_ALIASES = {
    **dict.fromkeys(("learning_rate", "base_lr"), "lr"),
    "max_lr": "lr (or max_lr in a ParamKey's override)",
    **dict.fromkeys(
        (
            "max_grad_norm",
            "gradient_clipping",
            "grad_clip",
            "clip_grad_norm",
            "gradient_clip_val",
            "max_norm",
        ),
        "clip_grad",
    ),
    **dict.fromkeys(
        ("betas", "adam_betas"), "adam_beta1 and adam_beta2 (lion_beta1 and lion_beta2 for lion)"
    ),
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    **dict.fromkeys(("eps", "epsilon", "adam_epsilon"), "adam_eps"),
    **dict.fromkeys(("wd", "decay"), "weight_decay"),
    "momentum": "sgd_momentum (muon_momentum for muon)",
    "nesterov": "muon_use_nesterov",
    "ns_steps": "muon_num_ns_steps",
    **dict.fromkeys(("optim", "optimizer_type", "optimizer_name"), "optimizer"),
    **dict.fromkeys(
        ("zero_stage", "zero_optimization", "stage", "zero"),
        "use_distributed_optimizer=True (ZeRO-1), "
        "with data_parallel_sharding_strategy='optim_grads' for ZeRO-2",
    ),
    **dict.fromkeys(("foreach", "fused", "use_fused", "backend"), "fused_backend"),
    **dict.fromkeys(("dtype", "precision", "mixed_precision"), "bf16=True or fp16=True"),
    **dict.fromkeys(
        ("offload", "cpu_offload", "offload_optimizer", "offload_fraction", "offload_ratio"),
        "optimizer_cpu_offload=True with optimizer_offload_fraction",
    ),
    **dict.fromkeys(
        ("use_8bit", "optim_bits", "min_8bit_size", "block_wise"),
        "use_precision_aware_optimizer=True with exp_avg_dtype='uint8' and "
        "exp_avg_sq_dtype='uint8'",
    ),
    **dict.fromkeys(("initial_scale", "init_scale"), "initial_loss_scale"),
    "initial_scale_power": "initial_loss_scale=2.0**power",
    "growth_interval": "loss_scale_window",
    "min_scale": "min_loss_scale",
    "nvlamb": "lamb_use_nvlamb",
    "adam_w_mode": "decoupled_weight_decay",
    "threads": "host_threads",
    "num_threads": "host_threads",
    "overlap_communication": "overlap_grad_reduce and overlap_param_gather",
    "overlap_comm": "overlap_grad_reduce",
    "reduce_bucket_size": "bucket_size",
    "seed": "stochastic_rounding_seed",
}
"""What torch, Hugging Face, DeepSpeed and bitsandbytes call things, and what they are called
here."""

_NOT_A_FIELD = {
    **dict.fromkeys(
        (
            "total_steps",
            "max_steps",
            "warmup",
            "warmup_steps",
            "warmup_ratio",
            "num_warmup_steps",
            "lr_warmup_steps",
            "lr_decay_steps",
            "lr_decay_style",
            "lr_scheduler_type",
            "scheduler",
            "start_weight_decay",
            "start_wd",
            "end_weight_decay",
            "end_wd",
        ),
        "a schedule is an OptimizerParamScheduler, or any of torch's",
    ),
    "amsgrad": "there is no amsgrad here",
    "maximize": "negate the loss",
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches"),
        "call backward as often as there are micro-batches, then step()",
    ),
    **dict.fromkeys(("capturable",), "optimizer_cuda_graph=True captures the step"),
    "differentiable": "steps are not differentiable here",
    **dict.fromkeys(
        ("params", "model", "parameters"),
        "the model goes into get_megatron_optimizer(config, model)",
    ),
}
"""What is set elsewhere or nowhere."""


def _elsewhere(name: str) -> str:
    low = name.lower()
    if low in _ALIASES:
        return f"; it is called {_ALIASES[low]} here"
    if low in _NOT_A_FIELD:
        return f": {_NOT_A_FIELD[low]}"
    found = next((text for key, text in _ELSEWHERE.items() if name.startswith(key)), "")
    return f"; Megatron's is not part of this version: {found}" if found else ""
