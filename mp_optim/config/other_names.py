"""Settings that are no fields: other names for a field, which are taken as it; and where what is
not taken is: under another name, elsewhere, or nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mp_optim.config.rules import RULES, rules_in_words

_TAKEN_AS = {"learning_rate": "lr", "max_grad_norm": "clip_grad"}
"""Names of torch and Hugging Face, and the field that each is taken as."""

_TAKEN_AS_THE_RULES = ("betas", "eps")
"""Names that are taken as the fields which the rule reads for it: ``betas`` as ``adam_beta1`` and
``adam_beta2``, or as ``lion_beta1`` and ``lion_beta2``."""

_ELSEWHERE = {
    "average_in_collective": (
        "gradients are averaged where they are reduced; grad_reduce_op='sum' adds them up"
    ),
    "calculate_per_token_loss": "grad_reduce_op='sum' adds gradients up",
    "overlap_param_gather_with_optimizer_step": (
        "overlap_param_gather=True gathers during the next forward"
    ),
    "num_distributed_optimizer_instances": "the state is shared out over all of ProcessGroups.dp",
    **dict.fromkeys(
        ("chunked_optimizer_state_offload", "offload_optimizer_states"),
        "optimizer_cpu_offload=True with optimizer_offload_fraction and offload_place='streamed'",
    ),
    "optimizer_state_offload_fraction": "it is called optimizer_offload_fraction here",
    "optimizer_state_offload_chunk_size_mb": "stream_window_bytes limits main params and state, in "
    "bytes",
    "use_torch_optimizer_for_cpu_offload": "choose fused_backend='torch'",
    "fp8_recipe": "parameters in 8 bits are recognised, and quantised by their own recipe",
    "reuse_grad_buf_for_mxfp8_param_ag": "parameters in 8 bits are not sharded",
    "config_logger_dir": "log dataclasses.asdict(config)",
    "muon_use_syrk": "products of matrices are torch's",
    "muon_nesterov": "it is called muon_use_nesterov here",
    **dict.fromkeys(("adaptive_muon_", "soap_"), f"optimizer is {rules_in_words()}"),
}
"""Megatron's fields (or their beginnings) that this version has no use for, and what there is
instead."""


_ALIASES = {
    "base_lr": "lr",
    "max_lr": "lr (or max_lr in a ParamKey's override)",
    **dict.fromkeys(
        (
            "gradient_clipping",
            "grad_clip",
            "clip_grad_norm",
            "gradient_clip_val",
            "max_norm",
        ),
        "clip_grad",
    ),
    "adam_betas": "betas",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    **dict.fromkeys(("epsilon", "adam_epsilon"), "adam_eps"),
    **dict.fromkeys(("wd", "decay"), "weight_decay"),
    "momentum": "sgd_momentum (muon_momentum for muon)",
    "nesterov": "muon_use_nesterov",
    "ns_steps": "muon_num_ns_steps",
    "ns_method": "muon_ns_method",
    **dict.fromkeys(("optim", "optimizer_type", "optimizer_name"), "optimizer"),
    **dict.fromkeys(
        ("zero_stage", "zero_optimization", "stage", "zero"),
        "use_distributed_optimizer=True (ZeRO-1), "
        "with data_parallel_sharding_strategy='optim_grads' for ZeRO-2",
    ),
    **dict.fromkeys(("foreach", "fused", "use_fused", "backend"), "fused_backend"),
    **dict.fromkeys(
        ("dtype", "precision", "mixed_precision"), "bf16=True or fp16=True"
    ),
    **dict.fromkeys(
        (
            "offload",
            "cpu_offload",
            "offload_optimizer",
            "offload_fraction",
            "offload_ratio",
        ),
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
    "sigma_factor": "skip_step_sigma_factor",
    "rolling_interval_length": "skip_step_rolling_interval_length",
}
"""What torch, Hugging Face, DeepSpeed, bitsandbytes and OLMo call things, and what they are called
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


def in_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of fields; names that are no fields stay.

    Raises:
        TypeError: a field is given twice, under its own name and another, or the rule has nothing
            of that name.
        ValueError: ``betas`` that are not two.
    """
    found = dict(settings)
    for name in (*_TAKEN_AS, *_TAKEN_AS_THE_RULES):
        if name in settings:
            value = found.pop(name)
            for field, part in _parts(name, value, _rule_of(settings)):
                if field in settings:
                    raise TypeError(
                        f"{name}={value!r} and {field}={settings[field]!r} are the same setting "
                        f"of OptimizerConfig; give one of them"
                    )
                found[field] = part
    return found


def _rule_of(settings: Mapping[str, Any]) -> str:
    """The rule that reads ``betas`` and ``eps``: with muon, the one of what is not a matrix."""
    name = str(settings.get("optimizer", "adam")).lower()
    if name == "muon":
        name = str(settings.get("muon_scalar_optimizer", "adam"))
    return name if name in RULES else "adam"


def _parts(name: str, value: Any, rule: str) -> list[tuple[str, Any]]:
    if name in _TAKEN_AS:
        return [(_TAKEN_AS[name], value)]
    fields = RULES[rule].settings.get(name)
    if fields is None:
        raise TypeError(f"{name}={value!r}: optimizer={rule!r} has none; leave it away")
    if isinstance(fields, str):
        return [(fields, value)]
    if not isinstance(value, (tuple, list)) or len(value) != len(fields):
        raise ValueError(
            f"{name}={value!r}: must be {len(fields)} numbers, for {' and '.join(fields)}"
        )
    return list(zip(fields, value, strict=True))


def elsewhere(name: str) -> str:
    """What to say of a name that is no field; empty for one that nobody uses."""
    low = name.lower()
    if low in _ALIASES:
        return f"; it is called {_ALIASES[low]} here"
    if low in _NOT_A_FIELD:
        return f": {_NOT_A_FIELD[low]}"
    megatron = next(
        (text for key, text in _ELSEWHERE.items() if name.startswith(key)), ""
    )
    return f"; Megatron's is not part of this version: {megatron}" if megatron else ""
