"""OptimizerConfig: what to build, in Megatron's names; and other libraries' names for its fields,
which are taken as the field, or answered with it.

A field exists only if setting it changes something; a setting that would be ignored raises.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from mp_optim.config.combinations import check_config
from mp_optim.config.fields import ConfigFields, check_field
from mp_optim.config.rules import RULES, rules_in_words
from mp_optim.config.setting_checks import NOT_HERE, nearest


def _checked_arguments(cls: type[OptimizerConfig]) -> type[OptimizerConfig]:
    """Let a config's constructor say what is wrong with the names it is given."""
    generated = cls.__init__
    known = [field.name for field in fields(cls)]

    @functools.wraps(generated)
    def init(self: OptimizerConfig, *positional: Any, **settings: Any) -> None:
        if positional:
            named = zip(known, positional, strict=False)
            shown = ", ".join(f"{name}={value!r}" for name, value in named)
            raise TypeError(
                f"OptimizerConfig takes its fields by name, as in OptimizerConfig({shown})"
            )
        settings = _in_fields(settings)
        for name in settings:
            if name not in known:
                hint = elsewhere(name) or nearest(name, known, 0.6)
                raise TypeError(f"OptimizerConfig has no field {name!r}{hint}")
        offloads = settings.get("optimizer_cpu_offload", False)
        if "optimizer_offload_fraction" not in settings and check_field(
            "optimizer_cpu_offload", offloads
        ):
            raise ValueError(
                "optimizer_cpu_offload=True without optimizer_offload_fraction: Megatron's default "
                "of 0 would offload nothing; set the fraction (1.0 for everything)"
            )
        generated(self, **_with_rule(settings))

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


@_checked_arguments
@dataclass(kw_only=True)
class OptimizerConfig(ConfigFields):
    """Everything :func:`mp_optim.get_megatron_optimizer` needs to know besides the model.

    ``learning_rate``, ``max_grad_norm``, ``betas`` and ``eps`` are taken as the fields they mean,
    sizes as text with a unit (``gpu_memory="60GiB"``), and numbers as text.

    Raises:
        TypeError: an unknown field, naming the nearest one; one that is given under two names.
        ValueError: a value out of range, contradictory or without effect, naming field and value.
    """

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise if a value is out of range, contradictory or without effect; done at construction,
        and again by :func:`mp_optim.get_megatron_optimizer` for fields set since. Values are kept
        as Python's own numbers, and dtypes as torch's."""
        check_config(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> OptimizerConfig:
        """A config from plain data, such as a YAML mapping."""
        return cls(**settings)


AdamOptimizerConfig = SGDOptimizerConfig = OptimizerConfig


def _with_rule(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the rule under its own name: AdamW is adam with decoupled decay."""
    rule = settings.get("optimizer")
    if not (isinstance(rule, str) and rule.lower() == "adamw"):
        return settings
    if settings.get("decoupled_weight_decay") is False:
        raise ValueError(
            f"optimizer={rule!r} with decoupled_weight_decay=False: AdamW decouples it; write "
            "optimizer='adam'"
        )
    return {**settings, "optimizer": "adam"}


# -- other names ----------------------------------------------------------------------------------

T = TypeVar("T")
_TAKEN_AS = {"learning_rate": "lr", "max_grad_norm": "clip_grad"}
"""Names of torch and Hugging Face, and the field that each is taken as."""
_TAKEN_AS_THE_RULES = ("betas", "eps")
"""Names that are taken as the fields which the rule reads for it: ``betas`` as ``adam_beta1`` and
``adam_beta2``, or as ``lion_beta1`` and ``lion_beta2``."""


def by_name(table: Mapping[str, T]) -> dict[str, T]:
    """A table of answers by the names, separated by spaces, that each is for, as one by name."""
    return {name: answer for names, answer in table.items() for name in names.split()}


_ALIASES = by_name(
    {
        "base_lr": "lr",
        "max_lr": "lr (or max_lr in a ParamKey's override)",
        "gradient_clipping grad_clip clip_grad_norm gradient_clip_val max_norm": "clip_grad",
        "adam_betas": "betas",
        "beta1": "adam_beta1",
        "beta2": "adam_beta2",
        "epsilon adam_epsilon": "adam_eps",
        "wd decay": "weight_decay",
        "momentum": "sgd_momentum (muon_momentum for muon)",
        "nesterov": "muon_use_nesterov",
        "ns_steps": "muon_num_ns_steps",
        "ns_method": "muon_ns_method",
        "optim optimizer_type optimizer_name": "optimizer",
        "zero_stage zero_optimization stage zero": "use_distributed_optimizer=True (ZeRO-1), "
        "with data_parallel_sharding_strategy='optim_grads' for ZeRO-2",
        "foreach fused use_fused backend": "fused_backend",
        "dtype precision mixed_precision": "bf16=True or fp16=True",
        "offload cpu_offload offload_optimizer offload_fraction offload_ratio": (
            "optimizer_cpu_offload=True with optimizer_offload_fraction"
        ),
        "min_8bit_size": "fp32_state_below",
        "use_8bit optim_bits block_wise": "use_precision_aware_optimizer=True with "
        "exp_avg_dtype='uint8' and exp_avg_sq_dtype='uint8'",
        "initial_scale init_scale": "initial_loss_scale",
        "initial_scale_power": "initial_loss_scale=2.0**power",
        "growth_interval": "loss_scale_window",
        "min_scale": "min_loss_scale",
        "nvlamb": "lamb_use_nvlamb",
        "cautious cautious_update cautious_updates cautious_optimizer": "caution",
        "cautious_weight_decay cautious_decay": "cautious_wd",
        "adam_w_mode": "decoupled_weight_decay",
        "threads num_threads": "host_threads",
        "overlap_communication": "overlap_grad_reduce and overlap_param_gather",
        "overlap_comm": "overlap_grad_reduce",
        "reduce_bucket_size": "bucket_size",
        "seed": "stochastic_rounding_seed",
        "sigma_factor": "skip_step_sigma_factor",
        "rolling_interval_length": "skip_step_rolling_interval_length",
    }
)
"""What torch, Hugging Face, DeepSpeed, bitsandbytes and OLMo call things, and what they are called
here."""
_NOT_A_FIELD = NOT_HERE | by_name(
    {
        "total_steps max_steps warmup warmup_steps warmup_ratio num_warmup_steps lr_warmup_steps "
        "lr_decay_steps lr_decay_style lr_scheduler_type scheduler start_weight_decay start_wd "
        "end_weight_decay end_wd": "a schedule is an OptimizerParamScheduler, or any of torch's",
        "gradient_accumulation_steps accumulate_grad_batches": (
            "call backward as often as there are micro-batches, then step()"
        ),
        "capturable": "optimizer_cuda_graph=True captures the step",
        "params model parameters": "the model goes into get_megatron_optimizer(config, model)",
    }
)
"""What is set elsewhere or nowhere."""
_OF_MEGATRON = by_name(
    {
        "average_in_collective": "gradients are averaged where they are reduced; "
        "grad_reduce_op='sum' adds them up",
        "calculate_per_token_loss": "grad_reduce_op='sum' adds gradients up",
        "overlap_param_gather_with_optimizer_step": (
            "overlap_param_gather=True gathers during the next forward"
        ),
        "num_distributed_optimizer_instances": (
            "the state is shared out over all of ProcessGroups.dp"
        ),
        "chunked_optimizer_state_offload offload_optimizer_states": "optimizer_cpu_offload=True "
        "with optimizer_offload_fraction and offload_place='streamed'",
        "optimizer_state_offload_fraction": "it is called optimizer_offload_fraction here",
        "optimizer_state_offload_chunk_size_mb": (
            "stream_window_bytes limits main params and state, in bytes"
        ),
        "use_torch_optimizer_for_cpu_offload": "choose fused_backend='torch'",
        "fp8_recipe": "parameters in 8 bits are recognised, and quantised by their own recipe",
        "reuse_grad_buf_for_mxfp8_param_ag": "parameters in 8 bits are not sharded",
        "config_logger_dir": "log dataclasses.asdict(config)",
        "muon_use_syrk": "products of matrices are torch's",
        "muon_nesterov": "it is called muon_use_nesterov here",
        "adaptive_muon_": "NorMuon is optimizer='muon' with muon_moment2_method and muon_beta2",
        "soap_": f"optimizer is {rules_in_words()}",
    }
)
"""Megatron's fields (or their beginnings) that this version has no use for, and what there is
instead."""


def elsewhere(name: str) -> str:
    """What to say of a name that is no field; empty for one that nobody uses."""
    low = name.lower()
    if low in _ALIASES:
        return f"; it is called {_ALIASES[low]} here"
    if low in _NOT_A_FIELD:
        return f": {_NOT_A_FIELD[low]}"
    megatron = next((text for key, text in _OF_MEGATRON.items() if name.startswith(key)), "")
    return f"; Megatron's is not part of this version: {megatron}" if megatron else ""


def _in_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of fields; names that are no fields stay.

    Raises:
        TypeError: a field is given twice, under its own name and another, or the rule has nothing
            of that name.
        ValueError: ``betas`` that are not two.
    """
    # with muon, betas and eps are read by the rule of what is no matrix
    rule = str(settings.get("optimizer", "adam")).lower()
    if rule == "muon":
        rule = str(settings.get("muon_scalar_optimizer", "adam"))
    rule = rule if rule in RULES else "adam"
    read = RULES[rule].settings
    found = dict(settings)
    for name in (*_TAKEN_AS, *_TAKEN_AS_THE_RULES):
        if name not in settings:
            continue
        value, fields = found.pop(name), _TAKEN_AS.get(name) or read.get(name)
        if fields is None:
            raise TypeError(f"{name}={value!r}: optimizer={rule!r} has none; leave it away")
        for field, part in _parts(name, value, fields):
            if field in settings:
                raise TypeError(
                    f"{name}={value!r} and {field}={settings[field]!r} are the same setting "
                    f"of OptimizerConfig; give one of them"
                )
            found[field] = part
    return found


def _parts(name: str, value: Any, fields: str | tuple[str, ...]) -> list[tuple[str, Any]]:
    """A setting as the fields that it is taken as."""
    if isinstance(fields, str):
        return [(fields, value)]
    if not isinstance(value, (tuple, list)) or len(value) != len(fields):
        raise ValueError(
            f"{name}={value!r}: must be {len(fields)} numbers, for {' and '.join(fields)}"
        )
    return list(zip(fields, value, strict=True))
