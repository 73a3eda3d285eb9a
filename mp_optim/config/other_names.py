"""Names of settings in other libraries and in Megatron, and their names here, as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from mp_optim.config.setting_checks import NOT_HERE, nearest

T = TypeVar("T")

OF_CONFIG = "of OptimizerConfig, with get_megatron_optimizer; this class has no such setting"
_SCHEDULE = "an OptimizerParamScheduler, or any scheduler of torch"
_MICRO_BATCHES = "one backward() for each micro-batch, then step()"
_ZERO = (
    "use_distributed_optimizer=True (ZeRO-1), with data_parallel_sharding_strategy='optim_grads' "
    "for ZeRO-2"
)
_8_BIT = (
    "use_precision_aware_optimizer=True with exp_avg_dtype='uint8' and exp_avg_sq_dtype='uint8'"
)
_OFFLOAD = "optimizer_cpu_offload=True with optimizer_offload_fraction"
_SHARE = "offload, 0.0 to 1.0 or 'auto'"
_STREAMED = f"{_OFFLOAD} and offload_place='streamed'"

_ROWS = (
    ("learning_rate learningrate base_lr", "lr", "lr"),
    ("max_lr", "lr (or max_lr in a ParamKey's override)", "lr"),
    (
        "gradient_clipping grad_clip clip_grad_norm gradient_clip_val max_norm clip clipping",
        "clip_grad",
        "max_grad_norm",
    ),
    ("clip_grad", "clip_grad", "max_grad_norm"),
    ("percentile_clipping", "clip_grad", "max_grad_norm, or skip_step_sigma_factor for spikes"),
    ("adam_betas", "betas", "betas"),
    ("beta1 adam_beta1", "adam_beta1", "betas=(..., ...)"),
    ("beta2 adam_beta2", "adam_beta2", "betas=(..., ...)"),
    ("epsilon adam_epsilon adam_eps", "adam_eps", "eps"),
    ("wd decay", "weight_decay", "weight_decay"),
    ("momentum", "sgd_momentum (muon_momentum for muon)", ""),
    ("nesterov muon_nesterov", "muon_use_nesterov", ""),
    ("ns_steps", "muon_num_ns_steps", ""),
    ("ns_method", "muon_ns_method", ""),
    ("optim optimizer optimizer_type optimizer_name", "optimizer", "the class of the rule"),
    ("zero_stage zero_optimization stage zero", _ZERO, ""),
    ("foreach fused use_fused fused_backend", "fused_backend", "backend"),
    ("backend", "fused_backend", "backend"),
    (
        "dtype precision mixed_precision bf16 fp16",
        "bf16=True or fp16=True",
        "state and main_params; the dtype of parameters is their own",
    ),
    ("cpu_offload offload_optimizer offload_fraction offload_ratio", _OFFLOAD, _SHARE),
    ("offload optimizer_offload_fraction optimizer_cpu_offload", _OFFLOAD, "offload"),
    ("optimizer_state_offload_fraction", "optimizer_offload_fraction", "offload"),
    (
        "chunked_optimizer_state_offload offload_optimizer_states",
        _STREAMED,
        "offload with offload_place='streamed'",
    ),
    ("optimizer_state_offload_chunk_size_mb", *["stream_window_bytes, in bytes"] * 2),
    ("use_torch_optimizer_for_cpu_offload", "fused_backend='torch'", ""),
    ("is_paged", _OFFLOAD, "offload=1.0, or offload='auto'"),
    ("gpu_memory max_memory", "gpu_memory", "offload='auto'"),
    ("offload_gradients", "release_gradients", "release_gradients"),
    ("min_8bit_size fp32_state_below", "fp32_state_below", "min_8bit_size"),
    ("use_8bit optim_bits block_wise quantize", _8_BIT, "state='8bit'"),
    ("state_dtype state_precision optimizer_state_dtype", "exp_avg_dtype", "state"),
    ("exp_avg_dtype exp_avg_sq_dtype", "exp_avg_dtype", "state"),
    ("use_precision_aware_optimizer", "exp_avg_dtype", "state and main_params"),
    ("store_param_remainders param_remainder_bits", "param_remainder_bits", "main_params"),
    ("kahan_sum", "param_remainder_bits=16", "main_params='remainder16'"),
    ("bf16_stochastic_round", "stochastic_rounding", "stochastic_rounding, with state='bf16'"),
    ("seed", "stochastic_rounding_seed", ""),
    ("initial_scale init_scale", "initial_loss_scale", ""),
    ("initial_scale_power", "initial_loss_scale=2.0**power", ""),
    ("growth_interval", "loss_scale_window", ""),
    ("min_scale", "min_loss_scale", ""),
    ("nvlamb", "lamb_use_nvlamb", ""),
    ("cautious cautious_update cautious_updates cautious_optimizer", "caution", "caution"),
    ("cautious_weight_decay cautious_decay", "cautious_wd", "cautious_wd"),
    ("adam_w_mode", "decoupled_weight_decay", ""),
    ("threads num_threads", "host_threads", ""),
    ("overlap_communication overlap_comm", "overlap_grad_reduce and overlap_param_gather", ""),
    ("overlap_param_gather_with_optimizer_step", "overlap_param_gather", ""),
    ("reduce_bucket_size", "bucket_size", ""),
    ("average_in_collective calculate_per_token_loss", "grad_reduce_op", ""),
    ("sigma_factor", *["skip_step_sigma_factor"] * 2),
    ("rolling_interval_length", *["skip_step_rolling_interval_length"] * 2),
    (
        "adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps",
        "optimizer='muon' with muon_moment2_method and muon_beta2",
        "",
    ),
    (
        "total_steps max_steps warmup warmup_steps warmup_ratio num_warmup_steps lr_warmup_steps "
        "lr_decay_steps lr_decay_style lr_scheduler_type scheduler start_weight_decay start_wd "
        "end_weight_decay end_wd",
        *[_SCHEDULE] * 2,
    ),
    ("gradient_accumulation_steps accumulate_grad_batches", *[_MICRO_BATCHES] * 2),
    ("params model parameters", "get_megatron_optimizer(config, model)", "params"),
)
"""Rows of other names, the field of OptimizerConfig, and the argument of the torch-shaped classes
(empty if they have none)."""


NO_GRAPHS = (
    "steps are not captured in CUDA graphs (an eager step of 100 M parameters takes 1.60 ms on an "
    "H100, a graph took 1.64); leave it out, or False in Megatron's config"
)
_NO_RULES = (
    "adafactor and ademamix are no rules of a config; pass it to mp_optim.Adafactor or "
    "pytorch_optimizer.AdEMAMix (docs/migrate.md, 'Any other torch optimizer')"
)
_OF_NO_RULES = (
    *("adafactor_beta2_decay", "adafactor_eps1", "adafactor_eps2", "adafactor_clip_threshold"),
    *("ademamix_beta3", "ademamix_alpha", "ademamix_beta3_warmup", "ademamix_alpha_warmup"),
)
NOT_FIELDS = {
    **NOT_HERE,
    "optimizer_cuda_graph": NO_GRAPHS,
    **dict.fromkeys(_OF_NO_RULES, _NO_RULES),
}
"""Names that are not supported under any name, with the reason and the cure."""


def by_name(table: Mapping[str, T]) -> dict[str, T]:
    """Split keys that are several names, separated by spaces, into one key for each name."""
    return {name: value for names, value in table.items() for name in names.split()}


FIELDS = by_name({names: field for names, field, _ in _ROWS})
"""The field of OptimizerConfig for a name of another library."""
ARGUMENTS = by_name({names: argument or f"{field} {OF_CONFIG}" for names, field, argument in _ROWS})
"""The argument of the torch-shaped classes for a name of another library, or for a field."""


def hint(name: str, answers: Mapping[str, str], known: Sequence[str]) -> str:
    """Return the end of an error about an unknown name: the name to use, or the nearest known one.

    Args:
        name: unknown name.
        answers: :data:`FIELDS` or :data:`ARGUMENTS`.
        known: names that would be accepted.
    """
    if name in NOT_FIELDS:
        return f": {NOT_FIELDS[name]}"
    answer = answers.get(name.lower())
    return f"; use {answer}" if answer else nearest(name, known, 0.6)
