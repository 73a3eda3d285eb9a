"""Conversion of Megatron's ``OptimizerConfig`` to this package's config.

Megatron sets every field for every optimizer, and reads only the fields of the chosen optimizer.
This package's config refuses fields without effect, so the conversion leaves such fields out. A
field that this package does not support is accepted with Megatron's default, and refused by name
with any other value. ``tools/write_docs.py`` writes the table of docs/clients/megatron.md from this
module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from mp_optim.config import OptimizerConfig
from mp_optim.config.combinations import inert_fields
from mp_optim.config.fields import ConfigFields
from mp_optim.config.other_names import NO_GRAPHS, by_name
from mp_optim.config.rules import RULES
from mp_optim.host.calls import warn


class Kind(Enum):
    """Treatment of a Megatron field by this package."""

    SAME = "same"
    RENAMED = "other name"
    WITHOUT_EFFECT = "accepted, no effect"
    DDP = "its DDP does it"
    STREAMED = "`offload_place`"
    REFUSED = "refused if set"


@dataclass(frozen=True)
class Meaning:
    """Meaning of a Megatron field in this package.

    Attributes:
        kind: treatment of the field.
        note: a note for users, or the replacement.
        name: name of the field in this package, if it differs.
        values: Megatron values of the field that have other names here.
    """

    kind: Kind
    note: str = ""
    name: str = ""
    values: Mapping[Any, Any] = field(default_factory=lambda: MappingProxyType({}))


SAME = Meaning(Kind.SAME)
_DDP = Meaning(Kind.DDP)
_noted = partial(Meaning, Kind.SAME)
_ignored = partial(Meaning, Kind.WITHOUT_EFFECT)
_refused = partial(Meaning, Kind.REFUSED)
_streamed = partial(Meaning, Kind.STREAMED)

_MOMENT = _noted("float16 and uint8 have one scale for each block of 256 elements")
_SOAP = _ignored('read by optimizer="soap", which is refused')
_ADAPTIVE = _ignored(
    'read by optimizer="adaptive_muon", which is refused; muon_moment2_method is NorMuon by rows'
)
_WHOLE_8_BIT = _refused(
    "parameters in 8 bits are stepped only if they are not sharded; leave the field False"
)
_FSDP = _ignored("read by Megatron-FSDP, which is refused")
_NO_FSDP = _refused(
    "use torch's FSDP2 (--use-torch-fsdp2), whose DTensors are stepped shard by shard"
)

_OURS = dict.fromkeys((spec.name for spec in dataclasses.fields(ConfigFields)), SAME)
OPTIMIZER_FIELDS: dict[str, Meaning] = _OURS | by_name(
    {
        "optimizer": Meaning(
            Kind.SAME,
            "adam, sgd, muon, lion, and dist_muon as muon with "
            "use_layer_wise_distributed_optimizer; others are refused",
            values=MappingProxyType({"dist_muon": "muon"}),
        ),
        "fp8_recipe": _ignored(
            "parameters in 8 bits are recognised, and quantised by their own recipe"
        ),
        "reuse_grad_buf_for_mxfp8_param_ag": _WHOLE_8_BIT,
        "params_dtype": _noted("has to fit fp16 and bf16"),
        "store_param_remainders": _noted("on the host too, and without Transformer Engine"),
        "main_grads_dtype": _ignored(
            "gradients are read in the dtype of DDP's buffers, and widened in registers"
        ),
        "main_params_dtype": _noted("float32; others are refused"),
        "exp_avg_dtype exp_avg_sq_dtype": _MOMENT,
        "loss_scale": _noted("with muon and lion, too, where Megatron ignores the field"),
        "muon_nesterov": Meaning(Kind.RENAMED, name="muon_use_nesterov"),
        "muon_fp32_matmul_prec": _noted("medium, highest; high is refused"),
        "muon_coefficient_type": _noted("simple, quintic, polar_express; others are refused"),
        "muon_tp_mode": Meaning(
            Kind.SAME,
            "distributed runs as duplicated: both orthogonalize the whole matrix",
            values=MappingProxyType({"distributed": "duplicated"}),
        ),
        "muon_use_syrk": _ignored("another kernel for the same product"),
        "lion_beta1 lion_beta2": _noted(
            'with optimizer="lion", too; Megatron reads adam_beta1 and adam_beta2'
        ),
        "soap_shampoo_beta soap_use_kl_shampoo": _SOAP,
        "adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps": _ADAPTIVE,
        "use_layer_wise_distributed_optimizer": _noted(
            "each rank stores whole matrices, in Megatron's DDP or in buckets of this package"
        ),
        "use_layer_wise_param_layout": _ignored(
            "the layout of the buffers of Megatron's DDP decides"
        ),
        "overlap_param_gather": _noted("the DDP config decides the field"),
        "overlap_param_gather_with_optimizer_step": _refused(
            "set overlap_param_gather=True, which gathers during the next forward"
        ),
        "chunked_optimizer_state_offload": _streamed(
            "streamed: state and main params are stored on the host and stepped on the device, "
            "window by window"
        ),
        "offload_optimizer_states": _streamed("streamed, for all parameters"),
        "optimizer_state_offload_chunk_size_mb": _streamed(
            "stream_window_bytes, in bytes; 0 leaves its default"
        ),
        "optimizer_state_offload_fraction": _streamed(
            "optimizer_offload_fraction; 0 turns offloading off"
        ),
        "use_torch_optimizer_for_cpu_offload": _ignored(
            "Megatron's factory does not use the field either"
        ),
        "timers": _noted("around measuring and stepping"),
        "config_logger_dir": _ignored("no log is written"),
        "optimizer_cuda_graph": _refused(NO_GRAPHS),
    }
)
"""Meanings of ``OptimizerConfig``'s fields. A field that is missing here has the same name and
meaning in this package."""

DDP_FIELDS: dict[str, Meaning] = by_name(
    {
        "overlap_grad_reduce align_param_gather check_for_nan_in_grad check_for_large_grads "
        "bucket_size num_buckets pad_buckets_for_high_nccl_busbw "
        "reduce_scatter_with_fp32_accumulation "
        "param_name_patterns_for_fp32_local_accumulation average_in_collective nccl_ub "
        "disable_symmetric_registration delay_wgrad_compute use_layer_wise_param_layout "
        "disable_grad_buffers_cpu_backup": _DDP,
        "grad_reduce_in_fp32": Meaning(
            Kind.DDP, "gradients are read in the dtype that main_grad has"
        ),
        "overlap_param_gather": _noted("the forward hooks of Megatron's DDP gather"),
        "use_distributed_optimizer": _noted("must equal the field of OptimizerConfig"),
        "num_distributed_optimizer_instances": _refused(
            "state is sharded over all data-parallel ranks; leave the field at 1"
        ),
        "fp4_param_gather": _refused(
            "parameters in 4 bits are not supported; leave the field False"
        ),
        "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag": _WHOLE_8_BIT,
        "disable_param_buffers_cpu_backup": _refused(
            "parameters that DDP restores without values are not written again from the main "
            "params; leave the field False"
        ),
        "use_megatron_fsdp use_custom_fsdp": _NO_FSDP,
        "megatron_fsdp_version data_parallel_sharding_strategy gradient_reduce_div_fusion "
        "suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache "
        "fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail "
        "fsdp_all_gather_in_start_param_sync outer_dp_sharding_strategy "
        "fsdp_manual_registration megatron_fsdp_main_params_dtype "
        "megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype "
        "megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode "
        "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer "
        "megatron_fsdp_prefetch_recompute_forward_weights "
        "megatron_fsdp_cache_param_bucket_views": _FSDP,
    }
)
"""Meanings of ``DistributedDataParallelConfig``'s fields."""

_LAYER_WISE = "use_layer_wise_distributed_optimizer"
_UNKNOWN = Meaning(
    Kind.REFUSED, "this version of mp_optim does not know the field; leave the field at its default"
)
_LION = (
    "optimizer='lion': Lion steps every parameter with lion_beta1 and lion_beta2; Megatron's own "
    "uses adam_beta1 and adam_beta2, and steps other tensors than matrices with Adam"
)


def config_from_megatron(
    config: Any,
    model_chunks: Sequence[nn.Module] = (),
    own_settings: Mapping[str, Any] = MappingProxyType({}),
) -> OptimizerConfig:
    """Return this package's config for a Megatron config.

    Args:
        config: ``megatron.core.optimizer.OptimizerConfig``, or any dataclass with such fields.
        model_chunks: modules of the model. If Megatron's DDP wraps them, its config decides some
            settings.
        own_settings: fields of this package's config to set in addition.

    Raises:
        ValueError: a field's value is not supported; the message names the field and the
            replacement.
    """
    if isinstance(config, OptimizerConfig):
        return config
    settings: dict[str, Any] = {}
    for name, value in _accepted_fields(config, OPTIMIZER_FIELDS):
        meaning = OPTIMIZER_FIELDS.get(name, SAME)
        if (meaning.name or name) in _OURS and meaning.kind is not Kind.WITHOUT_EFFECT:
            settings[meaning.name or name] = meaning.values.get(value, value)
    settings |= _settings_of_streaming(config)
    if config.optimizer == "dist_muon":
        settings[_LAYER_WISE] = True
    for chunk in model_chunks:
        if getattr(chunk, "ddp_config", None):
            settings |= _settings_of_ddp(chunk, settings)
    if config.optimizer == "lion":
        warn(_LION)
    settings |= own_settings
    # Do not look for inert fields of an unknown optimizer. ``OptimizerConfig`` below refuses its
    # name.
    is_known = settings["optimizer"] in RULES
    while is_known and (inert := inert_fields(ConfigFields(**settings))):
        settings = {key: settings[key] for key in settings if key not in inert}
    return OptimizerConfig(**{**settings, **own_settings})


def _settings_of_streaming(config: Any) -> dict[str, Any]:
    """Return settings for Megatron's fields that store state in host memory and step the state on
    the device.

    Raises:
        ValueError: ``optimizer_cpu_offload`` is set, too. Megatron also refuses this combination.
    """
    is_chunked = getattr(config, "chunked_optimizer_state_offload", False)
    share = float(getattr(config, "optimizer_state_offload_fraction", 1.0)) if is_chunked else 1.0
    if not (is_chunked or getattr(config, "offload_optimizer_states", False)) or share == 0.0:
        return {}
    if config.optimizer_cpu_offload:
        raise ValueError(
            "optimizer_cpu_offload=True steps on the host, but chunked_optimizer_state_offload "
            "and offload_optimizer_states step on the device; set only one of these fields of "
            "Megatron's OptimizerConfig"
        )
    settings = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": share,
        "offload_place": "streamed",
    }
    window = int(getattr(config, "optimizer_state_offload_chunk_size_mb", 0)) if is_chunked else 0
    return {**settings, "stream_window_bytes": window << 20} if window else settings


def _accepted_fields(config: Any, meanings: Mapping[str, Meaning]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a Megatron dataclass, with their values.

    Raises:
        ValueError: an unsupported or unknown field is set; the message names the field and the
            replacement.
    """
    for spec in dataclasses.fields(config):
        name, value = spec.name, getattr(config, spec.name)
        meaning = meanings.get(name, _OURS.get(name, _UNKNOWN))
        default = spec.default
        if spec.default_factory is not dataclasses.MISSING:
            default = spec.default_factory()
        if meaning.kind is Kind.REFUSED and value != default:
            raise ValueError(
                f"{name}={value!r} of Megatron's {type(config).__name__}: {meaning.note}"
            )
        yield name, value


def _settings_of_ddp(chunk: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the config of Megatron's DDP decides.

    Args:
        chunk: module wrapped in Megatron's DDP.
        settings: settings from Megatron's ``OptimizerConfig``.

    Raises:
        ValueError: a DDP field contradicts the settings; the message names the field.
    """
    kinds = ("buffers", "expert_parallel_buffers")
    buffers = [buffer for kind in kinds for buffer in getattr(chunk, kind, ())]
    ranks = max((buffer.data_parallel_group.size() for buffer in buffers), default=1)
    values = dict(_accepted_fields(chunk.ddp_config, DDP_FIELDS))
    gathers = values.get("overlap_param_gather")
    decided = {} if gathers is None else {"overlap_param_gather": gathers}
    splits = chunk.ddp_config.use_distributed_optimizer
    if settings.get(_LAYER_WISE, False):
        # Megatron's DDP puts every matrix whole into the shard of one rank. So this package's
        # distributed optimizer steps whole matrices.
        if not splits and ranks > 1:
            raise ValueError(
                f"{_LAYER_WISE}=True, but the model's ddp_config has "
                "use_distributed_optimizer=False, so its buffers are not laid out by rank. Leave "
                "out --no-use-layer-wise-param-layout, or set --use-layer-wise-param-layout; in "
                "a Megatron that has neither, use --optimizer muon without "
                "--use-distributed-optimizer, which trains the same with all state on every rank"
            )
        return {**decided, _LAYER_WISE: False, "use_distributed_optimizer": splits}
    if splits and ranks > 1 and not settings.get("use_distributed_optimizer", False):
        raise ValueError(
            "use_distributed_optimizer=True in the model's ddp_config shards gradients, but "
            "OptimizerConfig has False; set both to the same value"
        )
    return decided
