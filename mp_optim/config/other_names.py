"""Names of settings in other libraries and Megatron, with their names in this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from mp_optim.config.setting_checks import NOT_HERE, nearest

T = TypeVar("T")


def by_name(table: Mapping[str, T]) -> dict[str, T]:
    """Return a table with one name per key, from a table whose keys hold several names separated
    by spaces."""
    return {name: value for names, value in table.items() for name in names.split()}


_OFFLOAD = "optimizer_cpu_offload=True with optimizer_offload_fraction"
_8_BIT = (
    "use_precision_aware_optimizer=True with exp_avg_dtype='uint8' and exp_avg_sq_dtype='uint8'"
)
_DTYPE = "bf16=True or fp16=True"
_SCHEDULE = "an OptimizerParamScheduler, or any scheduler of torch"
_MICRO_BATCHES = "one backward() for each micro-batch, then step()"
_MODEL = "get_megatron_optimizer(config, model)"
_FIELDS = {
    "learning_rate learningrate base_lr max_lr": "lr",
    "gradient_clipping grad_clip clip_grad_norm gradient_clip_val max_norm clip clipping": (
        "clip_grad"
    ),
    "percentile_clipping": "clip_grad",
    "adam_betas betas": "adam_beta1",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "epsilon adam_epsilon": "adam_eps",
    "wd decay": "weight_decay",
    "momentum": "sgd_momentum (muon_momentum for muon)",
    "nesterov muon_nesterov": "muon_use_nesterov",
    "optim optimizer_type optimizer_name": "optimizer",
    "zero_stage zero_optimization stage zero": (
        "use_distributed_optimizer=True (ZeRO-1), with "
        "data_parallel_sharding_strategy='optim_grads' for ZeRO-2"
    ),
    "foreach fused use_fused backend": "fused_backend",
    "dtype precision mixed_precision": _DTYPE,
    "cpu_offload offload_optimizer offload_fraction offload_ratio is_paged": _OFFLOAD,
    "offload optimizer_state_offload_fraction": _OFFLOAD,
    "chunked_optimizer_state_offload offload_optimizer_states": (
        f"{_OFFLOAD} and offload_place='streamed'"
    ),
    "optimizer_state_offload_chunk_size_mb": "stream_window_bytes, in bytes",
    "max_memory": "gpu_memory",
    "offload_gradients": "release_gradients",
    "min_8bit_size": "fp32_state_below",
    "use_8bit optim_bits block_wise quantize": _8_BIT,
    "state state_dtype state_precision optimizer_state_dtype": "exp_avg_dtype",
    "kahan_sum main_params": "param_remainder_bits",
    "bf16_stochastic_round": "stochastic_rounding",
    "initial_scale init_scale": "initial_loss_scale",
    "growth_interval": "loss_scale_window",
    "overlap_communication overlap_comm": "overlap_grad_reduce and overlap_param_gather",
    "average_in_collective calculate_per_token_loss": "grad_reduce_op",
    "sigma_factor": "skip_step_sigma_factor",
    "total_steps max_steps warmup warmup_steps warmup_ratio num_warmup_steps": _SCHEDULE,
    "lr_warmup_steps lr_decay_steps lr_decay_style lr_scheduler_type scheduler": _SCHEDULE,
    "start_weight_decay start_wd end_weight_decay end_wd": _SCHEDULE,
    "gradient_accumulation_steps accumulate_grad_batches": _MICRO_BATCHES,
    "params model parameters": _MODEL,
}
"""The field of OptimizerConfig, or the procedure to use instead, for each name in other libraries.
"""
FIELDS = by_name(_FIELDS)

_SHARE = "offload=1.0, another share, or 'auto'"
ARGUMENTS = {
    **{name: name for name in ("lr", "weight_decay", "release_gradients", "stochastic_rounding")},
    **{name: name for name in ("skip_step_sigma_factor", _SCHEDULE, _MICRO_BATCHES)},
    "clip_grad": "max_grad_norm",
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "betas=(..., ...)"),
    "adam_eps": "eps",
    "optimizer": "the class of the rule",
    "fused_backend": "backend",
    **dict.fromkeys((_DTYPE, "bf16", "fp16"), "state; the dtype of parameters is their own"),
    **dict.fromkeys((_OFFLOAD, "optimizer_cpu_offload", "optimizer_offload_fraction"), _SHARE),
    f"{_OFFLOAD} and offload_place='streamed'": "offload with offload_place='streamed'",
    "stream_window_bytes, in bytes": "stream_window_bytes, in bytes",
    "gpu_memory": "offload='auto'",
    "fp32_state_below": "min_8bit_size",
    _8_BIT: "state='8bit'",
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), "state"),
    "use_precision_aware_optimizer": "state",
    **dict.fromkeys(
        ("store_param_remainders", "param_remainder_bits"),
        "main_params, such as main_params='remainder16'",
    ),
    _MODEL: "params",
}
"""The argument of the optimizer classes for each value of :data:`FIELDS`: for a field of
OptimizerConfig, or for a procedure such as gradient accumulation."""

NO_GRAPHS = (
    "steps are not captured in CUDA graphs (docs/decisions.md); leave it out, or False in "
    "Megatron's config"
)
_NO_RULES = (
    "OptimizerConfig has no adafactor and no ademamix; pass it to mp_optim.Adafactor or "
    "pytorch_optimizer.AdEMAMix (docs/migrate.md, 'Any other torch optimizer')"
)
_NOT_FIELDS = {**NOT_HERE, "optimizer_cuda_graph": NO_GRAPHS}
"""The reason or replacement for each setting that this package does not have."""


def hint(name: str, known: Sequence[str], *, fields: Sequence[str] = ()) -> str:
    """Return the end of an error about an unknown name: its replacement, or the nearest known name.

    Args:
        name: unknown name.
        known: accepted names.
        fields: names of OptimizerConfig's fields if ``known`` are arguments of an optimizer class;
            empty if ``known`` are the fields.
    """
    if name in _NOT_FIELDS:
        return f": {_NOT_FIELDS[name]}"
    if name.startswith(("adafactor_", "ademamix_")):
        return f": {_NO_RULES}"
    meant = FIELDS.get(name.lower(), name if name in fields else "")
    if not meant:
        return nearest(name, known, 0.6)
    if not fields or (argument := ARGUMENTS.get(meant)) is None:
        of_config = " of OptimizerConfig, with get_megatron_optimizer" if fields else ""
        return f"; use {meant}{of_config}{'; this class has no such setting' if fields else ''}"
    return f"; use {argument}"
